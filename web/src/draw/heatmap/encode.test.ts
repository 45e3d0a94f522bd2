import { describe, expect, it } from 'vitest'
import { FLOATS, TILES, WHOLE } from './coding'
import {
  encode,
  encodeChanged,
  read,
  specialsOf,
  tablesOf,
  type ByteCells,
  type FloatCells,
  type Look,
} from './encode'
import { nextRare, rareCells } from './rare'

const LOOK: Look = { scale: 'linear', range: 'extremes', colours: 'sequential' }

function floats(rows: number, columns: number, values: number[], more: Partial<FloatCells> = {}): FloatCells {
  return { rows, columns, values: Float32Array.from(values), ...more }
}

describe('numbers', () => {
  it('are read as they are, with what is missing apart', () => {
    const cells = floats(1, 4, [0.5, NaN, -Infinity, 9], { missing: Uint8Array.of(0, 0, 0, 1) })
    expect(read(cells, 0, 0)).toEqual({ value: 0.5, exact: true })
    expect(read(cells, 0, 1)).toEqual({ value: NaN, exact: true })
    expect(read(cells, 0, 2)).toEqual({ value: -Infinity, exact: true })
    expect(read(cells, 0, 3)).toBe('missing')
  })

  it('that are missing set no range', () => {
    const encoded = encode(floats(1, 3, [1, 2, 99], { missing: Uint8Array.of(0, 0, 1) }), LOOK)
    expect(encoded.span).toEqual({ low: 1, high: 2 })
    expect([...encoded.grid.bytes]).toEqual([FLOATS.first, FLOATS.last, FLOATS.missing])
    expect(specialsOf(encoded)).toEqual(['missing'])
  })

  it('of differences have 0 in the middle of the colours', () => {
    const encoded = encode(floats(1, 3, [-1, 0, 4]), { ...LOOK, colours: 'diverging' })
    expect(encoded.span).toEqual({ low: -4, high: 4 })
    expect(encoded.positions[encoded.grid.bytes[1]!]).toBeCloseTo(0.5, 2)
    expect(encoded.pooling).toBe('away')
  })

  it('of an empty grid are none', () => {
    const encoded = encode(floats(0, 0, []), LOOK)
    expect(encoded.span).toBeNull()
    expect(specialsOf(encoded)).toEqual([])
    expect(rareCells(encoded)).toEqual([])
    expect(nextRare(encoded, null)).toBeNull()
  })
})

describe('what has changed', () => {
  const before = floats(2, 2, [0, 1, 2, 3])
  const changed = { area: { row: 0, column: 2, rows: 2, columns: 1 }, before: before.values }
  const drawn = { cells: before, encoded: encode(before, LOOK) }

  it('is encoded alone where it fits in', () => {
    const after = floats(2, 3, [0, 1, 3, 2, 3, NaN], { changed })
    const bytes = Uint8Array.of(FLOATS.last, FLOATS.nan!)
    expect(encodeChanged(after, LOOK, drawn)).toEqual({ area: changed.area, bytes })
  })

  it('has all encoded where it goes beyond the range, or is not told', () => {
    expect(encodeChanged(floats(2, 3, [0, 1, 3.5, 2, 3, 0], { changed }), LOOK, drawn)).toBeNull()
    expect(encodeChanged(floats(2, 3, [0, 1, 3, 2, 3, 0]), LOOK, drawn)).toBeNull()
  })

  it('has all encoded where something else is drawn', () => {
    const other = floats(2, 2, [0, 1, 2, 3])
    const after = floats(2, 3, [0, 1, 3, 2, 3, 0], { changed })
    expect(encodeChanged(after, LOOK, { cells: other, encoded: encode(other, LOOK) })).toBeNull()
  })

  it('stays in a range that was given', () => {
    const look: Look = { ...LOOK, range: [0, 1] }
    const after = floats(2, 3, [0, 1, 9, 2, 3, 0], { changed })
    const found = encodeChanged(after, look, { cells: before, encoded: encode(before, look) })
    expect([...found!.bytes]).toEqual([FLOATS.last, FLOATS.first])
  })
})

describe('bytes', () => {
  const tiles: ByteCells = {
    rows: 1,
    columns: 4,
    bytes: Uint8Array.of(0, 253, 254, 255),
    low: -2,
    high: 6,
    reserved: true,
  }

  it('of tiles are between their ends, infinite, or NaN', () => {
    expect([0, 1, 2, 3].map((column) => read(tiles, 0, column))).toEqual([
      { value: -2, exact: false },
      { value: 6, exact: false },
      'infinite',
      'nan',
    ])
    const encoded = encode(tiles, LOOK)
    expect([encoded.coding, encoded.span]).toEqual([TILES, { low: -2, high: 6 }])
    expect(specialsOf(encoded)).toEqual(['nan', 'infinite'])
  })

  it('of attention are squares, and none of them is reserved', () => {
    const cells = {
      ...tiles,
      bytes: Uint8Array.of(0, 51, 254, 255),
      low: 0,
      high: 0.5,
      power: 2,
      reserved: false,
    }
    const values = [0, 1, 2, 3].map((column) => read(cells, 0, column))
    expect(values).toEqual(
      [0, 51, 254, 255].map((byte) => ({ value: expect.closeTo(0.5 * (byte / 255) ** 2, 12), exact: false })),
    )
    expect(encode(cells, LOOK).coding).toBe(WHOLE)
    expect(specialsOf(encode(cells, LOOK))).toEqual([])
  })

  it('are coloured by a scale without being touched', () => {
    const bytes = Uint8Array.from({ length: 254 }, (_, at) => at)
    const cells = { ...tiles, columns: 254, bytes, low: 0, high: 253 }
    const linear = encode(cells, LOOK)
    const root = encode(cells, { ...LOOK, scale: 'sqrt' })
    expect(root.grid.bytes).toBe(bytes)
    expect(linear.positions[63]).toBeCloseTo(63 / 253)
    expect(root.positions[63]).toBeCloseTo(Math.sqrt(63 / 253))
    expect(tablesOf(root, 'sequential', 'dark').colours).not.toEqual(
      tablesOf(linear, 'sequential', 'dark').colours,
    )
  })

  it('have a robust range by how frequent they are', () => {
    const bytes = Uint8Array.from({ length: 10_000 }, (_, at) => (at === 5 ? 253 : 10 + (at % 3)))
    const cells = { ...tiles, rows: 100, columns: 100, bytes, low: 0, high: 253 }
    expect(encode(cells, { ...LOOK, range: 'robust' }).span).toEqual({ low: 10, high: 12 })
    expect(encode(cells, LOOK).span).toEqual({ low: 10, high: 253 })
  })
})

describe('rare cells', () => {
  it('are found, in the order of reading, and again from the start', () => {
    const encoded = encode(floats(2, 3, [1, NaN, 2, Infinity, 3, 4]), LOOK)
    expect(rareCells(encoded)).toEqual([
      { row: 0, column: 1, special: 'nan' },
      { row: 1, column: 0, special: 'infinite' },
    ])
    expect(nextRare(encoded, null)).toEqual({ row: 0, column: 1 })
    expect(nextRare(encoded, { row: 0, column: 1 })).toEqual({ row: 1, column: 0 })
    expect(nextRare(encoded, { row: 1, column: 0 })).toEqual({ row: 0, column: 1 })
  })

  it('are not pointed out where they are many', () => {
    const encoded = encode(floats(20, 20, Array<number>(400).fill(NaN)), LOOK)
    expect(rareCells(encoded)).toEqual([])
    expect(nextRare(encoded, { row: 3, column: 19 })).toEqual({ row: 4, column: 0 })
  })
})
