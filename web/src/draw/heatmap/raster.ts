/** Drawing on the CPU: the fallback's frames, and exported pictures. Pure. */
import type { Special } from '../colours'
import { specialOf, type Coding } from './coding'
import { inked, LEAST_CELL } from './patterns'
import { levelFor, type Grid, type Pyramid } from './pyramid'
import type { HeatWindow } from './viewport'

/** RGBA of each byte, and the second colours of patterns; both 256 x 4 bytes. */
export interface Tables {
  readonly colours: Uint8Array
  readonly inks: Uint8Array
}

/** Whether cells are large enough for patterns. */
export function hatched(window: HeatWindow, width: number, height: number): boolean {
  return Math.min(width / window.width, height / window.height) >= LEAST_CELL
}

/** A window in cells of a coarser grid. */
export function scaled(window: HeatWindow, base: Grid, grid: Grid): HeatWindow {
  const [across, down] = [grid.columns / base.columns, grid.rows / base.rows]
  return {
    left: window.left * across,
    top: window.top * down,
    width: window.width * across,
    height: window.height * down,
  }
}

/** Draws a window of the grid into width x height pixels (RGBA, as they lie in memory); beside the grid stays as it was. */
export function rasterise(
  pyramid: Pyramid,
  coding: Coding,
  tables: Tables,
  window: HeatWindow,
  width: number,
  height: number,
  pixels: Uint32Array,
): void {
  const level = levelFor(window, { width, height }, pyramid.base)
  const grid = pyramid.grid(level)
  const colours = words(tables.colours)
  const seen = scaled(window, pyramid.base, grid)
  const columns = indices(seen.left, seen.width, width, grid.columns)
  const rows = indices(seen.top, seen.height, height, grid.rows)
  const [first, end] = inside(columns)
  const patterns = hatched(window, width, height) ? specials(coding) : null
  for (let y = 0, drawn = -1; y < height; y++) {
    const row = rows[y]!
    if (row < 0) continue
    const to = y * width
    if (row === drawn) {
      pixels.copyWithin(to + first, to - width + first, to - width + end)
    } else {
      const from = row * grid.stride
      for (let x = first; x < end; x++) pixels[to + x] = colours[grid.bytes[from + columns[x]!]!]!
    }
    drawn = row
  }
  if (patterns !== null) hatch(grid.bytes, grid.stride, rows, columns, patterns, words(tables.inks), pixels)
}

/** The cell of each pixel, or -1 beside the grid. */
function indices(start: number, length: number, pixels: number, cells: number): Int32Array {
  const step = length / pixels
  return Int32Array.from({ length: pixels }, (_, pixel) => {
    const cell = Math.floor(start + (pixel + 0.5) * step)
    return cell >= 0 && cell < cells ? cell : -1
  })
}

/** The pixels whose index is none beside the grid. */
function inside(indices: Int32Array): [first: number, end: number] {
  const first = indices.findIndex((index) => index >= 0)
  return first < 0 ? [0, 0] : [first, indices.findLastIndex((index) => index >= 0) + 1]
}

type OfByte = readonly (Special | null)[]

function specials(coding: Coding): OfByte {
  return Array.from({ length: 256 }, (_, byte) => specialOf(byte, coding))
}

function hatch(
  bytes: Uint8Array,
  stride: number,
  rows: Int32Array,
  columns: Int32Array,
  patterns: OfByte,
  inks: Uint32Array,
  pixels: Uint32Array,
): void {
  for (let y = 0; y < rows.length; y++) {
    if (rows[y]! < 0) continue
    for (let x = 0; x < columns.length; x++) {
      if (columns[x]! < 0) continue
      const byte = bytes[rows[y]! * stride + columns[x]!]!
      const pattern = patterns[byte]
      if (pattern !== undefined && pattern !== null && inked(pattern, x, y))
        pixels[y * columns.length + x] = inks[byte]!
    }
  }
}

/** Colours as whole pixels. */
function words(table: Uint8Array): Uint32Array {
  return new Uint32Array(table.slice().buffer)
}
