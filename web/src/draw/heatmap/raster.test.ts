import { describe, expect, it } from 'vitest'
import { FLOATS, TILES } from './coding'
import { encode, tablesOf } from './encode'
import { Pyramid } from './pyramid'
import { random, whole } from './random.testing'
import { rasterise, type Tables } from './raster'

/** Colours that say which byte they are of. */
const TABLES: Tables = {
  colours: Uint8Array.from({ length: 1024 }, (_, at) => (at % 4 === 0 ? at >> 2 : at % 4 === 3 ? 255 : 0)),
  inks: new Uint8Array(1024).fill(9),
}

function drawn(bytes: Uint8Array, rows: number, columns: number, width: number, height: number, window = {}) {
  const pixels = new Uint32Array(width * height)
  const all = { left: 0, top: 0, width: columns, height: rows, ...window }
  const pyramid = new Pyramid({ bytes, rows, columns, stride: columns }, null)
  rasterise(pyramid, TILES, TABLES, all, width, height, pixels)
  return new Uint8Array(pixels.buffer).filter((_, at) => at % 4 === 0)
}

describe('drawing on the CPU', () => {
  it('puts each cell where it belongs', () => {
    expect([...drawn(Uint8Array.of(1, 2, 3, 4), 2, 2, 4, 2)]).toEqual([1, 1, 2, 2, 3, 3, 4, 4])
  })

  it('leaves clear what is beside the grid', () => {
    const pixels = drawn(Uint8Array.of(7), 1, 1, 3, 3, { left: -1, top: -1, width: 3, height: 3 })
    expect([...pixels]).toEqual([0, 0, 0, 0, 7, 0, 0, 0, 0])
    expect([...drawn(Uint8Array.of(7), 1, 1, 2, 1, { left: 5 })]).toEqual([0, 0])
  })

  it('loses no NaN, wherever it is and however small cells are (150 random windows)', () => {
    const next = random(6)
    for (let trial = 0; trial < 150; trial++) {
      const [rows, columns] = [1 + whole(next, 90), 1 + whole(next, 900)]
      const bytes = Uint8Array.from({ length: rows * columns }, () => whole(next, 254))
      bytes[whole(next, bytes.length)] = TILES.nan!
      const pixels = drawn(bytes, rows, columns, 20 + whole(next, 60), 20 + whole(next, 60))
      // Where cells are large enough the pattern's ink is there too.
      expect(pixels.some((byte) => byte === TILES.nan)).toBe(true)
    }
  })

  it('hatches large special cells, and others never', () => {
    const pixels = drawn(Uint8Array.of(5, 255, 254), 1, 3, 90, 30)
    const inked = (column: number) =>
      pixels.filter((byte, at) => byte === 9 && Math.floor((at % 90) / 30) === column)
    expect(inked(0)).toHaveLength(0)
    expect(inked(1).length).toBeGreaterThan(200)
    expect(inked(2).length).toBeGreaterThan(200)
    expect(drawn(Uint8Array.of(255, 255), 1, 2, 8, 4)).not.toContain(9)
  })
})

it('special bytes have colours that no value has', () => {
  const values = Float32Array.from({ length: 300 }, (_, at) => at)
  values[3] = NaN
  values[4] = Infinity
  for (const colours of ['sequential', 'diverging'] as const) {
    const encoded = encode({ rows: 1, columns: 300, values }, { scale: 'linear', range: 'extremes', colours })
    const table = new Uint32Array(tablesOf(encoded, colours, 'dark').colours.buffer)
    const special = [FLOATS.missing!, FLOATS.infinite!, FLOATS.nan!]
    const valued = table.filter((_, byte) => !special.includes(byte))
    for (const byte of special) expect(valued).not.toContain(table[byte])
  }
})
