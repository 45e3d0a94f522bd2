import { describe, expect, it } from 'vitest'
import {
  boxAt,
  boxesOf,
  clamp,
  GUTTER,
  heightOf,
  neighbour,
  pan,
  showing,
  ticks,
  timelineOf,
  timeOf,
  xOf,
  zoom,
  type Category,
  type Segment,
} from './layout'

const size = { width: GUTTER + 1000, height: 222 }

function segment(rank: number, start: number, end: number, category: Category = 'forward'): Segment {
  return { rank, start, end, category, label: `${category} ${start}` }
}

const plain = timelineOf(
  [
    segment(0, 0, 0.4),
    segment(0, 0.4, 0.5, 'wait'),
    segment(0, 0.5, 1, 'backward'),
    segment(1, 0.2, 0.9),
    segment(9, 0, 5),
  ],
  [0, 1],
)

describe('timelineOf', () => {
  it('makes a row of each rank, in order of time, and spans them all', () => {
    expect(plain.rows.map((row) => row.segments.length)).toEqual([3, 1])
    expect(plain.whole).toEqual({ from: 0, to: 5 })
    expect(plain.overlaps).toBe(false)
  })

  it('sees that communication runs beside work', () => {
    const beside = timelineOf([segment(0, 0, 1, 'backward'), segment(0, 0.5, 1.5, 'transfer')], [0])
    expect(beside.overlaps).toBe(true)
    const [work, transfer] = boxesOf(beside, 0, beside.whole, size)
    expect(work!.y + work!.height).toBeLessThanOrEqual(transfer!.y)
  })

  it('takes stretches that touch, and nothing at all', () => {
    expect(timelineOf([segment(0, 0, 0.1), segment(0, 0.1 - 1e-9, 0.2)], [0]).overlaps).toBe(false)
    expect(timelineOf([], []).whole).toEqual({ from: 0, to: 1e-3 })
  })
})

describe('places', () => {
  const span = { from: 0, to: 1 }

  it('turns times into pixels and back', () => {
    expect(xOf(0.25, span, size)).toBe(GUTTER + 250)
    expect(timeOf(xOf(0.7, span, size), span, size)).toBeCloseTo(0.7)
  })

  it('draws what is seen, cut at the edges, and nothing else', () => {
    const boxes = boxesOf(plain, 0, { from: 0.45, to: 0.6 }, size)
    expect(boxes.map((box) => box.segment.category)).toEqual(['wait', 'backward'])
    expect(boxes[0]!.x).toBe(GUTTER)
    expect(boxes[1]!.x + boxes[1]!.width).toBeCloseTo(size.width)
  })

  it('finds the stretch under the pointer, and one that is less than a pixel wide beside it', () => {
    expect(boxAt(plain, xOf(0.45, span, size), 40, span, size)?.segment.category).toBe('wait')
    expect(boxAt(plain, xOf(0.1, span, size), 150, span, size)).toBeNull()
    expect(boxAt(plain, 10, 40, span, size)).toBeNull()
    const thin = timelineOf([segment(0, 0, 1, 'gap'), segment(0, 0.5, 0.5001, 'kernel')], [0])
    expect(boxAt(thin, xOf(0.5, span, size), 100, span, size)?.segment.category).toBe('kernel')
  })

  it('keeps rows readable, however many', () => {
    expect(heightOf(1, 600)).toBeLessThan(60)
    expect(heightOf(8, 600)).toBe(8 * 30 + 22)
    expect(heightOf(64, 600)).toBeGreaterThanOrEqual(64 * 9)
  })
})

describe('what is seen', () => {
  const whole = { from: 0, to: 2 }

  it('zooms about a time that stays where it is', () => {
    const seen = zoom(whole, 4, 0.5, whole)
    expect(seen.to - seen.from).toBeCloseTo(0.5)
    expect((0.5 - seen.from) / (seen.to - seen.from)).toBeCloseTo(0.25)
    expect(zoom(seen, 1 / 100, 0.5, whole)).toEqual(whole)
  })

  it('stays within the step, and is never too short to be seen', () => {
    expect(pan({ from: 1, to: 2 }, 5, whole)).toEqual({ from: 1, to: 2 })
    expect(zoom(whole, 1e9, 1, whole).to - zoom(whole, 1e9, 1, whole).from).toBeCloseTo(2 / 2000)
    expect(clamp({ from: NaN, to: NaN }, whole)).toEqual(whole)
  })

  it('follows the keys to what is not seen', () => {
    const seen = showing({ from: 0, to: 0.5 }, segment(0, 1.5, 1.6), whole)
    expect(seen.from).toBeCloseTo(1.3)
    expect(showing(whole, segment(0, 1, 1.1), whole)).toBe(whole)
  })
})

describe('neighbour', () => {
  it('goes along the row, and to the other rows at the same time', () => {
    const [first, wait] = plain.rows[0]!.segments as [Segment, Segment]
    expect(neighbour(plain, first, 1, 0)).toBe(wait)
    expect(neighbour(plain, first, -1, 0)).toBe(first)
    expect(neighbour(plain, wait, 0, 1).rank).toBe(1)
    expect(neighbour(plain, wait, 0, -1).rank).toBe(0)
  })
})

describe('ticks', () => {
  it('are round and within', () => {
    expect(ticks({ from: 0.05, to: 0.95 }, 4)).toEqual([0.5])
    expect(ticks({ from: 0, to: 1 }, 5).map((tick) => Number(tick.toFixed(3)))).toEqual([
      0, 0.2, 0.4, 0.6, 0.8, 1,
    ])
  })
})
