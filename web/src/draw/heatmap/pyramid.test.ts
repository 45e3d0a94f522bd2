import { describe, expect, it } from 'vitest'
import { FLOATS, notability, specialOf, TILES, WHOLE, type Coding, type Pooling } from './coding'
import { levelFor, Pyramid, type Grid, type Level } from './pyramid'
import { random, whole } from './random.testing'

const POOLINGS: readonly Pooling[] = ['high', 'low', 'away']

function gridOf(rows: number, columns: number, byte: (at: number) => number): Grid {
  const bytes = Uint8Array.from({ length: rows * columns }, (_, at) => byte(at))
  return { bytes, rows, columns, stride: columns }
}

/** What a reader would write: every cell of the group, one after the other. */
function expected(
  grid: Grid,
  level: Level,
  row: number,
  column: number,
  pooling: Pooling,
  coding: Coding,
): number {
  const middle = (coding.first + coding.last) / 2
  const weight = (byte: number): number => {
    const special = specialOf(byte, coding)
    if (special !== null) return { missing: -1e6, infinite: 1e6, nan: 2e6 }[special]
    return pooling === 'high' ? byte : pooling === 'low' ? -byte : Math.abs(byte - middle) + byte / 1e4
  }
  let kept: number | null = null
  for (let r = row << level.down; r < Math.min(grid.rows, (row + 1) << level.down); r++) {
    for (let c = column << level.across; c < Math.min(grid.columns, (column + 1) << level.across); c++) {
      const byte = grid.bytes[r * grid.stride + c]!
      if (kept === null || weight(byte) > weight(kept)) kept = byte
    }
  }
  return kept!
}

function check(pyramid: Pyramid, level: Level, pooling: Pooling, coding: Coding): void {
  const made = pyramid.grid(level)
  for (let row = 0; row < made.rows; row++) {
    for (let column = 0; column < made.columns; column++) {
      const wanted = expected(pyramid.base, level, row, column, pooling, coding)
      if (made.bytes[row * made.stride + column] !== wanted) {
        expect.fail(`row ${row}, column ${column} of ${JSON.stringify(level)}`)
      }
    }
  }
}

describe('coarser grids', () => {
  it.each(POOLINGS)('%s: keep the most notable cell of each group (60 random grids)', (pooling) => {
    const next = random(4)
    for (let trial = 0; trial < 60; trial++) {
      const coding = [FLOATS, TILES, WHOLE][trial % 3]!
      const grid = gridOf(1 + whole(next, 40), 1 + whole(next, 40), () => whole(next, 256))
      const pyramid = new Pyramid(grid, notability(pooling, coding))
      const level = { across: whole(next, 5), down: whole(next, 5) }
      expect(pyramid.grid(level).rows).toBe(Math.ceil(grid.rows / 2 ** level.down))
      check(pyramid, level, pooling, coding)
    }
  })

  it('show a single NaN among a million cells, whatever is pooled', () => {
    for (const pooling of POOLINGS) {
      const grid = gridOf(1024, 1024, (at) => (at === 777_777 ? TILES.nan! : at % 254))
      const pyramid = new Pyramid(grid, notability(pooling, TILES))
      const level = { across: 7, down: 6 }
      expect(pyramid.grid(level).bytes.filter((byte) => byte === TILES.nan)).toHaveLength(1)
    }
  })

  it('show missing cells only where all are missing', () => {
    const grid = gridOf(2, 4, (at) => [0, 0, 0, 9, 0, 0, 0, 0][at]!)
    const level = { across: 1, down: 1 }
    expect([...new Pyramid(grid, null).grid(level).bytes]).toEqual([0, 9])
    expect([...new Pyramid(grid, notability('low', FLOATS)).grid(level).bytes]).toEqual([0, 9])
  })

  it('follow new cells, and cells beyond the edges (40 random series of changes)', () => {
    const next = random(5)
    for (let trial = 0; trial < 40; trial++) {
      const pooling = POOLINGS[trial % 3]!
      const pyramid = new Pyramid(
        gridOf(1 + whole(next, 20), 1 + whole(next, 20), () => 1 + whole(next, 255)),
        notability(pooling, FLOATS),
      )
      const levels = [0, 1, 2, 3].map(() => ({ across: whole(next, 4), down: whole(next, 4) }))
      levels.forEach((level) => pyramid.grid(level))
      for (let change = 0; change < 4; change++) {
        const [rows, columns] = [1 + whole(next, 9), 1 + whole(next, 9)]
        const { base } = pyramid
        const area = { row: whole(next, base.rows + 3), column: whole(next, base.columns + 3), rows, columns }
        pyramid.update(
          area,
          Uint8Array.from({ length: rows * columns }, () => whole(next, 256)),
          0,
        )
        levels.forEach((level) => check(pyramid, level, pooling, FLOATS))
      }
    }
  })

  it('grow by what was not there: missing', () => {
    const pyramid = new Pyramid(
      gridOf(1, 2, () => 5),
      null,
    )
    pyramid.update({ row: 1, column: 3, rows: 1, columns: 1 }, Uint8Array.of(7), 0)
    const { bytes, stride, rows, columns } = pyramid.base
    expect([rows, columns]).toEqual([2, 4])
    expect([...bytes.subarray(0, 4), ...bytes.subarray(stride, stride + 4)]).toEqual([5, 5, 0, 0, 0, 0, 0, 7])
  })
})

it('the level is the finest whose cells are no smaller than pixels', () => {
  const screen = { width: 1000, height: 500 }
  const level = (width: number, height: number) =>
    levelFor({ width, height }, screen, { rows: 1e5, columns: 1e5 })
  expect(level(200, 500)).toEqual({ across: 0, down: 0 })
  expect(level(1010, 1000)).toEqual({ across: 1, down: 1 })
  expect(level(4000 * (1 + 1e-9), 2560)).toEqual({ across: 2, down: 3 })
  expect(levelFor({ width: 9, height: 1 }, { width: 2, height: 0.1 }, { rows: 1, columns: 9 })).toEqual({
    across: 3,
    down: 0,
  })
})
