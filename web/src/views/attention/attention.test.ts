import { describe, expect, it } from 'vitest'
import type { Frame, Values } from '../../api/frames'
import { ENTRIES } from '../../draw/colours'
import { contrast, inkOf, inks, luminance } from './ink'
import { inSight, linesOf, lineWith } from './lines'
import { gridOf, mapOf, placeOf } from './map'
import { columnShares, largest, ofRow, receivedShares, rowShares, summaries } from './shares'
import { isOneRow, stacked } from './stack'
import { tableOf } from './table'
import { pooled } from './thumbnail'
import { label, placed, share, textOf } from './words'

type Given = Record<string, Values | [Values, number[]]>

function frame(given: Given, meta: Record<string, unknown> = {}): Frame {
  const arrays = Object.entries(given).map(([name, value]) => {
    const [values, shape] = Array.isArray(value) ? value : [value, [value.length]]
    return [name, { dtype: values.constructor.name.replace('Array', '').toLowerCase(), shape, values }]
  })
  return { tap: 'layers.0.attention.map', meta, arrays: Object.fromEntries(arrays) } as unknown as Frame
}

const texts = (list: string[]) => new TextEncoder().encode(JSON.stringify(list))

/** Two heads of three tokens: the first looks at itself, the second at the first token. */
const EXACT = {
  heads: Int32Array.of(4, 5),
  position: Int32Array.of(0, 1, 2),
  key_position: Int32Array.of(0, 1, 2),
  entropy: Float32Array.of(0, 0, 0, 0, 0.5, 0.25),
  first: Float32Array.of(1, 0, 0, 1, 0.75, 0.5),
  received: Float32Array.of(1, 1, 1, 2.25, 0.5, 0.25),
  queries: Int32Array.of(3),
  probabilities: Float32Array.of(1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0.75, 0.25, 0, 0.5, 0.25, 0.25),
}
/** One head of four tokens in tiles of two. */
const TILED = {
  heads: Int32Array.of(0),
  position: Int32Array.of(0, 1, 2, 3),
  key_position: Int32Array.of(0, 1, 2, 3),
  entropy: Float32Array.of(0, 1, 2, 3),
  first: Float32Array.of(1, 0.5, 0.4, 0.2),
  received: Float32Array.of(2, 1, 0.6, 0.4),
  queries: Int32Array.of(4),
  tiles: Uint8Array.of(255, 0, 128, 64),
  scale: Float32Array.of(0.5),
  peaks: Uint8Array.of(255, 0, 255, 255),
  peak_scale: Float32Array.of(1),
  tile_row: Int32Array.of(0, 2),
  tile_key: Int32Array.of(0, 2),
}

describe('a map', () => {
  it('of exact rows has what later keys are masked for', () => {
    const grid = gridOf(mapOf(frame(EXACT)), 1)
    expect([...grid.values]).toEqual([1, 0, 0, 0.75, 0.25, 0, 0.5, 0.25, 0.25])
    expect([...grid.missing]).toEqual([0, 1, 1, 0, 0, 1, 0, 0, 0])
    expect(grid.queries).toEqual([
      [0, 0],
      [1, 1],
      [2, 2],
    ])
  })

  it('that looks both ways in any head has nothing masked in any', () => {
    const both = EXACT.probabilities.slice()
    both[11] = 0.1 // head 5, query 0, key 2
    const map = mapOf(frame({ ...EXACT, probabilities: both }))
    expect(map.causal).toBe(false)
    expect(gridOf(map, 0).missing).not.toContain(1)
  })

  it('of tiles has the square of their levels, or peaks, and the spans of positions', () => {
    const map = mapOf(frame(TILED))
    const grid = gridOf(map, 0)
    expect([...grid.values].map((value) => +value.toFixed(4))).toEqual([0.5, 0, 0.126, 0.0315])
    expect([...gridOf(map, 0, true).values]).toEqual([1, 0, 1, 1])
    expect(grid.queries).toEqual([
      [0, 1],
      [2, 3],
    ])
    expect([...grid.missing]).toEqual([0, 1, 0, 0])
    expect([placeOf(grid.keys, 3), placeOf(grid.keys, 4)]).toEqual([1, -1])
  })

  it.each([
    ['neither rows nor tiles', { ...EXACT, probabilities: undefined }, /neither/],
    [
      'fewer numbers than it says',
      { ...EXACT, entropy: new Float32Array(2) },
      /entropy has 2 numbers in place of 6/,
    ],
    ['tiles that are no bytes', { ...TILED, tiles: new Float32Array(4) }, /tiles are no 4 bytes/],
    ['parts apart', { 'heads@1': EXACT.heads }, /choose one rank/],
  ])('is refused with %s', (_, given, message) => {
    const some = Object.fromEntries(Object.entries(given).filter(([, value]) => value)) as Given
    expect(() => mapOf(frame(some))).toThrow(message)
  })

  it('has the texts of its keys, where there are as many', () => {
    expect(mapOf(frame({ ...EXACT, texts: texts(['a', ' b', 'c']) })).texts).toEqual(['a', ' b', 'c'])
    expect(mapOf(frame({ ...EXACT, texts: texts(['a']) })).texts).toEqual([])
  })
})

describe('shares', () => {
  it('of an exact row are its probabilities', () => {
    const map = mapOf(frame(EXACT))
    const row = rowShares(gridOf(map, 1), 2)
    expect(row && [...row.values]).toEqual([0.5, 0.25, 0.25])
    expect(row && largest(row, 2)).toEqual([0, 1])
    expect(ofRow(map, 1, [2, 2])).toEqual({ entropy: 0.25, first: 0.5 })
    expect(rowShares(gridOf(map, 1), 7)).toBeNull()
  })

  it('of a row of tiles are of all keys of each', () => {
    const map = mapOf(frame(TILED))
    const row = rowShares(gridOf(map, 0), 3)
    expect(row?.picked).toEqual([2, 3])
    expect(row && [...row.values].map((value) => +value.toFixed(3))).toEqual([0.252, 0.063])
    expect(ofRow(map, 0, [2, 3])?.entropy).toBe(2.5)
  })

  it('of a column are who looks at it', () => {
    const column = columnShares(gridOf(mapOf(frame(EXACT)), 1), 1)
    expect(column && [...column.values]).toEqual([0, 0.25, 0.25])
    expect(column && [...column.missing]).toEqual([1, 0, 0])
  })

  it('that keys receive come to 1', () => {
    const received = receivedShares(mapOf(frame(EXACT)), 1)
    expect(received.reduce((sum, value) => sum + value)).toBeCloseTo(1)
    expect(received[0]).toBeCloseTo(0.75)
  })

  it('sum a head up without the query that sees one key only', () => {
    const [, second] = summaries(mapOf(frame(EXACT)))
    expect(second).toEqual({ head: 5, entropy: 0.375, sink: 0.625 })
  })
})

describe('rows of a generated text', () => {
  const first = mapOf(frame({ ...EXACT, texts: texts(['a', 'b', 'c']) }))
  const next = (words: string[]) =>
    mapOf(
      frame({
        heads: EXACT.heads,
        position: Int32Array.of(3),
        key_position: Int32Array.of(0, 1, 2, 3),
        entropy: Float32Array.of(1, 2),
        first: Float32Array.of(0.1, 0.2),
        received: Float32Array.of(0.1, 0.2, 0.3, 0.4, 0.2, 0.2, 0.2, 0.4),
        queries: Int32Array.of(1),
        probabilities: Float32Array.of(0.1, 0.2, 0.3, 0.4, 0.2, 0.2, 0.2, 0.4),
        texts: texts(words),
      }),
    )

  it('are put below each other', () => {
    const map = stacked([first, next(['a', 'b', 'c', 'd'])])
    expect(map && [map.queries, map.summed]).toEqual([[0, 1, 2, 3], 4])
    const grid = map && gridOf(map, 1)
    expect(grid && [...grid.values.slice(8, 12)].map((value) => +value.toFixed(2))).toEqual([
      0.5, 0.25, 0.25, 0,
    ])
    expect(grid && [...grid.missing]).toEqual([0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0])
    expect(map && +(map.received[4] as number).toFixed(3)).toBe(2.45)
    expect(map && [...map.entropy].slice(4)).toEqual([0, 0.5, 0.25, 2])
  })

  it('of another text stay out', () =>
    expect(stacked([first, next(['a', 'x', 'c', 'd'])])?.queries).toEqual([3]))

  it('are looked for where a step has one only', () => {
    expect(isOneRow(next(['a', 'b', 'c', 'd']))).toBe(true)
    expect(isOneRow(first)).toBe(false)
  })
})

describe('words', () => {
  const map = mapOf(frame({ ...EXACT, texts: texts(['It', ' was\n', '\u202ethe']) }))
  it('name positions with their tokens', () => {
    expect(label(map, [1, 1])).toBe('1 ␣was⏎')
    expect(label(map, [1, 2])).toBe('1–2 ␣was⏎\\u202ethe')
    expect(textOf(map, [1, 2])).toBe(' was\n\u202ethe')
    expect(label(mapOf(frame(EXACT)), [1, 2])).toBe('1–2')
    expect(placed([3, 3])).toBe('3')
  })

  it('say all shares in percent', () =>
    expect([0, 0.5, 0.0123, 1.54e-5, 2e-8].map(share)).toEqual([
      '0 %',
      '50 %',
      '1.23 %',
      '0.00154 %',
      '2e−6 %',
    ]))

  it('become a table without formulas', () => {
    const head = mapOf(frame({ ...EXACT, texts: texts(['=1', 'b', 'c']) }))
    expect(tableOf(head, gridOf(head, 1)).split('\r\n')).toEqual([
      'query \\ key,token,0,1,2',
      ",,'=1,b,c",
      "0,'=1,1,,",
      '1,b,0.75,0.25,',
      '2,c,0.5,0.25,0.25',
      '',
    ])
  })
})

describe('pictures', () => {
  it('small ones keep the largest value, and what is masked', () => {
    const grid = gridOf(mapOf(frame(EXACT)), 1)
    const small = pooled(grid, 2)
    expect([...small.values]).toEqual([1, 0.25, 0.5, 0.25].map((value, at) => (at === 1 ? -1 : value)))
  })

  it.each(['dark', 'light'] as const)('text on any colour of the %s theme is readable', (theme) => {
    const all = inks(theme)
    expect(all).toHaveLength(ENTRIES)
    for (const { background, text } of all) {
      const rgb = background.match(/\d+/g)!.map(Number)
      const [back, fore] = [luminance(rgb), text === '#000' ? 0 : 1]
      expect(contrast(Math.max(back, fore), Math.min(back, fore))).toBeGreaterThan(4.5)
    }
  })

  it('have the strongest colour for the largest share', () => {
    expect([0, 0.25, 1].map((value) => inkOf(value, 1, 'linear'))).toEqual([0, 64, 255])
    expect(inkOf(0.25, 1, 'sqrt')).toBe(128)
    expect(inkOf(0, 0, 'log')).toBe(0)
  })
})

describe('lines of a text', () => {
  const lines = linesOf([4, 4, 4, 20, 2, 2], [false, false, false, false, true, false], 10)
  it('hold what fits, and end where the text breaks', () =>
    expect(lines).toEqual([
      { first: 0, end: 2 },
      { first: 2, end: 3 },
      { first: 3, end: 4 },
      { first: 4, end: 5 },
      { first: 5, end: 6 },
    ]))

  it('are found by a token, and those in sight by the scroll position', () => {
    expect([lineWith(lines, 3), lineWith(lines, 9)]).toEqual([2, -1])
    expect(inSight(100, 30, 900, 300)).toEqual({ from: 26, to: 44 })
    expect(inSight(3, 30, 0, 300)).toEqual({ from: 0, to: 3 })
  })
})
