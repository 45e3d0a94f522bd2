import { describe, expect, it } from 'vitest'
import type { Frame, Values } from '../../api/frames'
import { choicesOf } from '../../parts/frameChoice'
import { placeAt, rangeOf } from '../../parts/bars'
import { layerPattern, layersOf, PARTS, tapName, titleOf } from './parts'
import { edgesOf, pictureOf } from './picture'
import { numbersOfAll } from './statistics'

function frame(
  what: string,
  arrays: Record<string, [Values, number[]]>,
  meta: object = {},
  more: object = {},
): Frame {
  const made = Object.entries(arrays).map(([name, [values, shape]]) => [
    name,
    { dtype: values.constructor.name.replace('Array', '').toLowerCase(), shape, values },
  ])
  const said = { tap: 'layers.0.x', subscription: 's', microbatch: 0, shard: [], meta, ...more }
  return { ...said, what, arrays: Object.fromEntries(made) } as unknown as Frame
}

const longs = (...values: number[]): [Values, number[]] => [
  BigInt64Array.from(values.map(BigInt)),
  [values.length],
]

describe('a picture of tiles', () => {
  const bytes = Uint8Array.of(0, 253, 254, 255)
  const tiles = frame(
    'tiles',
    { tiles: [bytes, [2, 2]], scale: [Float32Array.of(-1, 3), [2]], extent: longs(7, 4, 4, 2) },
    { labels: ['s', 'b', 'h'], shape: [7, 1, 4] },
  )

  it('keeps the bytes as they came', () => {
    const { cells, signed, about } = pictureOf(tiles)
    expect(cells).toEqual({ rows: 2, columns: 2, bytes, low: -1, high: 3, reserved: true })
    expect([signed, about]).toEqual([true, '4 × 2 elements a tile'])
  })

  it('labels its axes with the dimensions, and the elements of each tile', () => {
    const picture = pictureOf(tiles)
    expect([picture.rowTitle, picture.columnTitle]).toEqual(['token (s) × sequence (b)', 'hidden (h)'])
    expect([0, 1].map(picture.rowLabel)).toEqual(['s 0–3', 's 4–6'])
    expect([0, 1].map(picture.columnLabel)).toEqual(['0–1', '2–3'])
  })

  it('tells where a tile begins that holds a part of a token only', () => {
    const meta = { labels: ['s', 'b', 'n', 'd'], shape: [2, 1, 3, 4], heads: [0, 3, 3] }
    const cut = {
      ...tiles,
      meta,
      arrays: { ...tiles.arrays, ...frame('tiles', { extent: longs(6, 4, 2, 2) }).arrays },
    }
    expect([0, 1].map(pictureOf(cut as Frame).rowLabel)).toEqual(['s 0 n 0–1', 's 0 b 0 n 2 …'])
  })

  it('names the heads of a rank that has others than the first', () => {
    const values: [Values, number[]] = [new Float32Array(4), [4, 1]]
    const meta = { labels: ['s', 'b', 'n', 'd'], shape: [4, 2, 2, 2], heads: [2, 2, 4] }
    const one = (extent: number): Frame => frame('tiles', { values, extent: longs(16, 2, extent, 2) }, meta)
    expect(pictureOf(one(4)).rowLabel(1)).toBe('s 1 n 2–3')
    expect(pictureOf(one(1)).rowLabel(5)).toBe('s 1 b 0 n 3')
  })

  const below = {
    values: [Float32Array.of(1, 2, 3, 4), [4, 1]] as [Values, number[]],
    extent: longs(32, 2, 8, 2),
    places: [
      BigInt64Array.from(
        [0, 0, 0, 1, 1, 1, 2, 0, 0, 3, 1, 1, 0, 0, 2, 1, 1, 3, 2, 0, 2, -1, -1, -1].map(BigInt),
      ),
      [4, 2, 3],
    ] as [Values, number[]],
  }
  const cut = { labels: ['s', 'b', 'n', 'd'], shape: [4, 2, 2, 2], heads: [0, 2, 4] }

  it('of parts below each other says where each row is in the tensor', () => {
    const picture = pictureOf(frame('tiles', below, cut))
    expect([0, 1, 2, 3].map(picture.rowLabel)).toEqual([
      's 0–1 n 0–1',
      's 2–3 n 0–1',
      's 0–1 n 2–3',
      's 2 b 0 n 2 …',
    ])
  })

  it('has a line where a part begins with the first token anew', () => {
    const picture = pictureOf(frame('tiles', below, cut))
    expect(edgesOf(picture)).toEqual([{ axis: 'row', at: 1.5, label: 'another part', kind: 'edge' }])
    expect(edgesOf(pictureOf(tiles))).toEqual([])
  })

  it('goes by the two dimensions that were asked for', () => {
    const two = { ...tiles, meta: { ...tiles.meta, dims: ['s', 'h'] } }
    const picture = pictureOf(two)
    expect([picture.rowTitle, picture.columnTitle, picture.rowLabel(1)]).toEqual([
      'token (s)',
      'hidden (h)',
      's 4–6',
    ])
  })

  it('has the texts of tokens, where a frame carries them', () => {
    const texts = new TextEncoder().encode('["a"," b\\n"]')
    const values: [Values, number[]] = [new Float32Array(4), [2, 2]]
    const told = frame(
      'tiles',
      { values, extent: longs(2, 2, 1, 1), texts: [texts, [texts.length]] },
      tiles.meta,
    )
    expect(pictureOf(told).rowLabel(1)).toBe('s 1 ␣b⏎ b 0')
  })
})

describe('pictures of values', () => {
  it('of rows are labelled by where those are', () => {
    const values: [Values, number[]] = [Float32Array.of(1, -2, 3, 4), [2, 2]]
    const meta = { labels: ['s', 'b', 'h'], shape: [9, 2, 2] }
    const picture = pictureOf(frame('rows', { values, index: longs(3, 8), rank: longs(0, 1) }, meta))
    expect([0, 1].map(picture.rowLabel)).toEqual(['s 1 b 1, rank 0', 's 4 b 0, rank 1'])
    expect(picture.cells).toMatchObject({ rows: 2, columns: 2 })
    expect(picture.signed).toBe(true)
  })

  it('of rows on ranks with other heads say which heads those are', () => {
    const values: [Values, number[]] = [new Float32Array(4), [2, 2]]
    const meta = { labels: ['s', 'n', 'd'], shape: [9, 2, 2], heads: [0, 2, 4] }
    const places: [Values, number[]] = [BigInt64Array.from([1, 1, 1, 1, 1, 3, 1, 3].map(BigInt)), [2, 2, 2]]
    const picture = pictureOf(frame('rows', { values, index: longs(3, 3), rank: longs(0, 1), places }, meta))
    expect([0, 1].map(picture.rowLabel)).toEqual(['s 1 n 1, rank 0', 's 1 n 3, rank 1'])
  })

  it('of tokens by their positions', () => {
    const values: [Values, number[]] = [new Float32Array(8), [2, 2, 2]]
    const picture = pictureOf(frame('tokens', { values, index: longs(3, 12) }, { labels: ['s', 'b', 'h'] }))
    expect([0, 1, 2, 3].map(picture.rowLabel)).toEqual(['s 3 b 0', 's 3 b 1', 's 12 b 0', 's 12 b 1'])
  })

  it('of the beginning of a tensor say how much of it that is', () => {
    const values: [Values, number[]] = [Uint16Array.of(0x3f80, 0x4000, 0xc040), [3]]
    const meta = { labels: ['out', 'in'], dtypes: { values: 'bfloat16' } }
    const picture = pictureOf(frame('raw', { values, shape: longs(4, 2) }, meta))
    const { cells } = picture
    expect('values' in cells && [...cells.values]).toEqual([1, 2, -3, 0])
    expect('values' in cells && cells.missing && [...cells.missing]).toEqual([0, 0, 0, 1])
    expect(picture.about).toBe('the first 3 of 8 elements')
    expect(picture.rowTitle).toBe('output (out)')
  })

  it.each([
    ['parts apart', frame('raw', { 'values@1': [new Float32Array(1), [1]] }), /choose one rank/],
    ['another kind', frame('toString', {}), /no picture of toString/],
  ])('are refused of %s', (_, given, message) => expect(() => pictureOf(given)).toThrow(message))
})

describe('numbers of a tensor', () => {
  /** As trimtab.scope.vector has them, about a shift. */
  function vector(values: number[], shift: number): Frame {
    const finite = values.filter(Number.isFinite)
    const sum = (of: (x: number) => number): number => finite.reduce((all, x) => all + of(x), 0)
    const nan = values.filter(Number.isNaN).length
    const about = [1, 2, 3, 4].map((power) => sum((x) => (x - shift) ** power))
    const all = [
      ...[values.length, nan, values.length - nan - finite.length, finite.filter((x) => !x).length],
      ...[about[0], sum(Math.abs), about[1], about[2], about[3], Math.min(...finite), Math.max(...finite)],
    ] as number[]
    return frame('statistics', {
      vector: [Float64Array.from(all), [11]],
      shift: [Float64Array.of(shift), [1]],
    })
  }

  it('are those of all parts together, whatever they were shifted by', () => {
    const found = numbersOfAll([vector([1, -2, NaN], 0), vector([5, 6, Infinity], 4)])
    expect(found).toMatchObject({ elements: 6, nan: 1, inf: 1, absmax: 6 })
    expect(found?.rms).toBeCloseTo(Math.sqrt((1 + 4 + 25 + 36) / 4))
  })

  it('of nothing finite are NaN, and of no frames none', () => {
    expect(numbersOfAll([vector([NaN], 0)])).toMatchObject({ elements: 1, nan: 1, rms: NaN, absmax: NaN })
    expect(numbersOfAll([])).toBeNull()
  })
})

describe('tensors of a layer', () => {
  it('are named', () => {
    const queries = PARTS.find((part) => part.title === 'Queries')!
    expect(tapName(3, queries, true)).toBe('layers.3.attention.q.grad')
    expect(titleOf('layers.3.attention.q.grad')).toBe('Queries, gradient')
    expect(titleOf('parameters.layers.3.output')).toBe('parameters.layers.3.output')
    expect(layerPattern('*', false)).toContain('layers.*.{input,attention.q,')
    expect(layersOf(['layers.10.output', 'layers.2.output', 'logits'])).toEqual([2, 10])
  })
})

describe('the frame that is shown', () => {
  const of = (microbatch: number, dp: number, subscription = 's') =>
    frame('tiles', {}, {}, { microbatch, subscription, shard: [['dp', dp, 2]] })
  const frames = [of(1, 0), of(0, 1), of(0, 0), of(0, 0, 'a')]
  const none = { microbatch: null, data: null, subscription: '' }

  it('is the first of what there is', () => {
    const found = choicesOf(frames, none)
    expect(found.frame).toBe(frames[3])
    expect(found.subscriptions).toEqual(['a', 's'])
  })

  it('is the one that was chosen, as far as it is there', () => {
    expect(choicesOf(frames, { microbatch: 0, data: 1, subscription: 's' }).frame).toBe(frames[1])
    const other = choicesOf(frames, { microbatch: 7, data: 0, subscription: 's' })
    expect([other.frame, other.microbatches]).toEqual([frames[0], [0, 1]])
    expect(choicesOf([], none).frame).toBeNull()
  })
})

describe('bars', () => {
  it('have 0 on their scale, and pass over what is not there', () => {
    expect(rangeOf(Float32Array.of(2, 5, NaN))).toEqual({ low: 0, high: 5 })
    expect(rangeOf(Float32Array.of(-2, 9), Uint8Array.of(0, 1))).toEqual({ low: -2, high: 0 })
    expect(rangeOf(new Float32Array(2))).toEqual({ low: 0, high: 1 })
  })
  it('are found below the pointer', () => {
    expect([placeAt(0, 100, 4), placeAt(99, 100, 4), placeAt(100, 100, 4), placeAt(-1, 100, 4)]).toEqual([
      0,
      3,
      null,
      null,
    ])
  })
})
