/**
 * A grid of bytes, and coarser ones in which a cell shows the most notable of the cells that it stands for: however far
 * one zooms out, a single NaN among millions is drawn. Rows and columns are made coarser apart, by powers of two, so that
 * 8 x 100,000 cells keep their rows.
 *
 * A level is made when it is first drawn, in one pass over all cells (see pool.ts), and takes 1 / 2^(across + down) of their
 * bytes. New cells are pooled into the levels that exist, alone.
 */
import { pool, type Order } from './pool'
import type { Area } from './quantise'

/** Bytes row by row, `stride` from one row to the next; there may be room for more rows and columns than there are. */
export interface Grid {
  bytes: Uint8Array
  rows: number
  columns: number
  stride: number
}

/** Columns are halved `across` times, rows `down` times. */
export interface Level {
  readonly across: number
  readonly down: number
}

export class Pyramid {
  private readonly coarser = new Map<string, { level: Level; grid: Grid }>()

  /** The bytes are taken over; `order` says how notable each is. */
  constructor(
    readonly base: Grid,
    private readonly order: Order | null,
  ) {}

  grid(level: Level): Grid {
    if (level.across === 0 && level.down === 0) return this.base
    const key = `${level.across} ${level.down}`
    let made = this.coarser.get(key)
    if (made === undefined) {
      const [rows, columns] = [halved(this.base.rows, level.down), halved(this.base.columns, level.across)]
      const grid = { bytes: new Uint8Array(rows * columns), rows, columns, stride: columns }
      pool(this.base, grid, level, { row: 0, column: 0, rows, columns }, this.order)
      made = { level, grid }
      this.coarser.set(key, made)
    }
    return made.grid
  }

  /** Puts in bytes of an area, row by row; the grid grows where the area lies outside, filled up with `blank`. */
  update(area: Area, bytes: Uint8Array, blank: number): void {
    const [rows, columns] = [area.row + area.rows, area.column + area.columns]
    grow(this.base, rows, columns, blank)
    for (let row = 0; row < area.rows; row++) {
      const part = bytes.subarray(row * area.columns, (row + 1) * area.columns)
      this.base.bytes.set(part, (area.row + row) * this.base.stride + area.column)
    }
    for (const { level, grid } of this.coarser.values()) {
      grow(grid, halved(rows, level.down), halved(columns, level.across), blank)
      pool(this.base, grid, level, coarse(area, level), this.order)
    }
  }
}

/** How many cells are left of so many. */
export function halved(count: number, times: number): number {
  return Math.ceil(count / 2 ** times)
}

/** The cells of a level that an area touches. */
export function coarse(area: Area, level: Level): Area {
  const [column, row] = [area.column >> level.across, area.row >> level.down]
  const columns = halved(area.column + area.columns, level.across) - column
  return { row, column, rows: halved(area.row + area.rows, level.down) - row, columns }
}

/**
 * The finest level of which each cell is at least as large as a pixel, so that none falls between two pixels. All cells of
 * a level are drawn equally large, though the last one may stand for fewer cells: it would get lost otherwise. By that a
 * cell lies beside its true place by less than one of the level.
 */
export function levelFor(window: Seen, pixels: Seen, grid: Pick<Grid, 'rows' | 'columns'>): Level {
  const times = (cells: number, on: number, count: number) => {
    let halvings = 0
    // A rounding error must not cost half of the resolution.
    while (halved(count, halvings) > 1 && (cells * halved(count, halvings)) / count > on * (1 + 1e-6))
      halvings++
    return halvings
  }
  const across = times(window.width, pixels.width, grid.columns)
  return { across, down: times(window.height, pixels.height, grid.rows) }
}

interface Seen {
  readonly width: number
  readonly height: number
}

/** Rows and columns that were not there are `blank`; room is made for half as many again, so that growing is seldom. */
function grow(grid: Grid, rows: number, columns: number, blank: number): void {
  const before = { ...grid }
  grid.rows = Math.max(grid.rows, rows)
  grid.columns = Math.max(grid.columns, columns)
  if (grid.columns > grid.stride || grid.rows * grid.stride > grid.bytes.length) {
    if (grid.columns > grid.stride) grid.stride = Math.ceil(grid.columns * 1.5)
    const room = grid.rows * grid.stride > before.rows * grid.stride ? Math.ceil(grid.rows * 1.5) : grid.rows
    grid.bytes = new Uint8Array(room * grid.stride).fill(blank)
    for (let row = 0; row < before.rows; row++) {
      const from = row * before.stride
      grid.bytes.set(before.bytes.subarray(from, from + before.columns), row * grid.stride)
    }
    return
  }
  for (let row = 0; row < grid.rows; row++) {
    const from = row < before.rows ? before.columns : 0
    grid.bytes.fill(blank, row * grid.stride + from, row * grid.stride + grid.columns)
  }
}
