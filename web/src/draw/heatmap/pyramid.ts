/**
 * A grid of bytes, and coarser ones in which a cell shows the most notable of the cells that it stands for: however far
 * one zooms out, a single NaN among millions is drawn. Rows and columns are made coarser apart, by powers of two, so that
 * 8 x 100,000 cells keep their rows.
 *
 * A level is made when it is first drawn, in one pass over all cells (4096 x 4096: about 25 ms), and takes 1 / (2^across
 * 2^down) of their bytes. New cells are pooled into the levels that exist, alone.
 */
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

  /** The bytes are taken over; how notable each is says `ranks` (256 entries; null: the larger, the more). */
  constructor(
    readonly base: Grid,
    private readonly ranks: Uint8Array | null,
  ) {}

  grid(level: Level): Grid {
    if (level.across === 0 && level.down === 0) return this.base
    const key = `${level.across} ${level.down}`
    let made = this.coarser.get(key)
    if (made === undefined) {
      const [rows, columns] = [halved(this.base.rows, level.down), halved(this.base.columns, level.across)]
      const grid = { bytes: new Uint8Array(rows * columns), rows, columns, stride: columns }
      pool(this.base, grid, level, { row: 0, column: 0, rows, columns }, this.ranks)
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
      pool(this.base, grid, level, coarse(area, level), this.ranks)
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

/** The finest level of which each cell is at least as large as a pixel: none of them falls between two pixels. */
export function levelFor(cellsPerPixel: { across: number; down: number }): Level {
  // A rounding error must not cost half of the resolution.
  const times = (cells: number) => Math.max(0, Math.ceil(Math.log2(cells) - 1e-6))
  return { across: times(cellsPerPixel.across), down: times(cellsPerPixel.down) }
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

/** Makes an area of `target` anew: the most notable of the cells that each of its cells stands for. */
function pool(source: Grid, target: Grid, level: Level, area: Area, ranks: Uint8Array | null): void {
  const first = area.column << level.across
  const end = Math.min(source.columns, (area.column + area.columns) << level.across)
  const line = new Uint8Array(end - first)
  for (let row = area.row; row < area.row + area.rows; row++) {
    const lines = Math.min(source.rows, (row + 1) << level.down) - (row << level.down)
    const from = (row << level.down) * source.stride + first
    line.set(source.bytes.subarray(from, from + line.length))
    for (let next = 1; next < lines; next++) most(line, source.bytes, from + next * source.stride, ranks)
    shorten(line, 1 << level.across, target.bytes, row * target.stride + area.column, ranks)
  }
}

/** The more notable of each byte of the line and of those that begin at `from`, into the line. */
function most(line: Uint8Array, bytes: Uint8Array, from: number, ranks: Uint8Array | null): void {
  if (ranks === null) {
    for (let at = 0; at < line.length; at++) {
      const byte = bytes[from + at]!
      if (byte > line[at]!) line[at] = byte
    }
    return
  }
  for (let at = 0; at < line.length; at++) {
    const byte = bytes[from + at]!
    if (ranks[byte]! > ranks[line[at]!]!) line[at] = byte
  }
}

/** The most notable of each `width` bytes of the line, into `target` from `to` on. */
function shorten(
  line: Uint8Array,
  width: number,
  target: Uint8Array,
  to: number,
  ranks: Uint8Array | null,
): void {
  for (let at = 0; at < line.length; to++) {
    const end = Math.min(line.length, at + width)
    let kept = line[at++]!
    for (; at < end; at++) {
      const byte = line[at]!
      if (ranks === null ? byte > kept : ranks[byte]! > ranks[kept]!) kept = byte
    }
    target[to] = kept
  }
}
