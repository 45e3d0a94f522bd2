/** Which part of a grid is seen, and where its cells lie on the screen. Pure; lengths in pixels are CSS pixels. */

/** A part of a grid, in cells, which may be cut: cell 3 goes from 3 to 4. */
export interface HeatWindow {
  readonly left: number
  readonly top: number
  readonly width: number
  readonly height: number
}

export interface Size {
  readonly width: number
  readonly height: number
}

export interface Cell {
  readonly row: number
  readonly column: number
}

export interface Point {
  readonly x: number
  readonly y: number
}

/** Which way zooming goes. */
export type Axes = 'both' | 'columns' | 'rows'

/** No part smaller than a cell. */
const SMALLEST = 1

/** Everything; with `square`, cells are as wide as high, and the grid lies beside its labels, below and on the left. */
export function fit(grid: Size, screen: Size, square = false): HeatWindow {
  if (!square || grid.width === 0 || grid.height === 0 || screen.width <= 0 || screen.height <= 0) {
    return { left: 0, top: 0, width: grid.width, height: grid.height }
  }
  const cell = Math.min(screen.width / grid.width, screen.height / grid.height)
  const [width, height] = [screen.width / cell, screen.height / cell]
  return { left: 0, top: grid.height - height, width, height }
}

/** The nearest window that lies within `whole`, the fitted one, and is no smaller than a cell. */
export function clamp(window: HeatWindow, whole: HeatWindow): HeatWindow {
  const [left, width] = clampSide(window.left, window.width, whole.left, whole.width)
  const [top, height] = clampSide(window.top, window.height, whole.top, whole.height)
  return { left, top, width, height }
}

function clampSide(start: number, length: number, wholeStart: number, whole: number): [number, number] {
  const wanted = Number.isFinite(length) ? length : whole
  const kept = Math.min(whole, Math.max(Math.min(SMALLEST, whole), wanted))
  const from = Number.isFinite(start) ? start : wholeStart
  return [Math.min(wholeStart + whole - kept, Math.max(wholeStart, from)), kept]
}

/** Moved by so many pixels: what lay under the pointer stays under it. */
export function pan(window: HeatWindow, by: Point, screen: Size, whole: HeatWindow): HeatWindow {
  const left = window.left - (by.x * window.width) / screen.width
  const top = window.top - (by.y * window.height) / screen.height
  return clamp({ ...window, left, top }, whole)
}

/** Enlarged by a factor (below 1: made smaller) about a point, which stays where it is as far as the edges let it. */
export function zoom(
  window: HeatWindow,
  factor: number,
  about: Point,
  screen: Size,
  whole: HeatWindow,
  axes: Axes = 'both',
): HeatWindow {
  const across = axes === 'rows' ? 1 : factor
  const down = axes === 'columns' ? 1 : factor
  const width = Math.max(window.width / across, Math.min(SMALLEST, whole.width))
  const height = Math.max(window.height / down, Math.min(SMALLEST, whole.height))
  const left = window.left + (about.x / screen.width) * (window.width - width)
  const top = window.top + (about.y / screen.height) * (window.height - height)
  return clamp({ left, top, width, height }, whole)
}

/** Cells that are so many pixels high (or wide) are told apart without zooming. */
const CLEAR = 12

/** Which way to zoom: where all rows are told apart at once anyhow they are left as they are, and so are columns. */
export function zoomAxes(grid: Size, screen: Size, square: boolean): Axes {
  const rows = screen.height >= grid.height * CLEAR
  const columns = screen.width >= grid.width * CLEAR
  if (square || rows === columns) return 'both'
  return rows ? 'columns' : 'rows'
}

/** The part between two points, whole cells; of the screen's shape with `square`. */
export function box(
  from: Point,
  to: Point,
  window: HeatWindow,
  screen: Size,
  whole: HeatWindow,
  square = false,
): HeatWindow {
  const across = window.width / screen.width
  const down = window.height / screen.height
  const left = Math.floor(window.left + Math.min(from.x, to.x) * across)
  const top = Math.floor(window.top + Math.min(from.y, to.y) * down)
  const right = Math.ceil(window.left + Math.max(from.x, to.x) * across)
  const bottom = Math.ceil(window.top + Math.max(from.y, to.y) * down)
  const part = { left, top, width: Math.max(1, right - left), height: Math.max(1, bottom - top) }
  return clamp(square ? shaped(part, screen) : part, whole)
}

/** Widened about its centre to the screen's shape. */
function shaped(part: HeatWindow, screen: Size): HeatWindow {
  const cell = Math.min(screen.width / part.width, screen.height / part.height)
  const [width, height] = [screen.width / cell, screen.height / cell]
  return {
    left: part.left + (part.width - width) / 2,
    top: part.top + (part.height - height) / 2,
    width,
    height,
  }
}

/** The cell under a point, or null beside the grid. */
export function cellAt(point: Point, window: HeatWindow, screen: Size, grid: Size): Cell | null {
  const column = Math.floor(window.left + (point.x / screen.width) * window.width)
  const row = Math.floor(window.top + (point.y / screen.height) * window.height)
  const inside = column >= 0 && row >= 0 && column < grid.width && row < grid.height
  return inside ? { row, column } : null
}

/** Where a cell lies on the screen. */
export function rectangle(cell: Cell, window: HeatWindow, screen: Size): Point & Size {
  const width = screen.width / window.width
  const height = screen.height / window.height
  return { x: (cell.column - window.left) * width, y: (cell.row - window.top) * height, width, height }
}

/** Moved no farther than needed to have all of a cell within. */
export function reveal(cell: Cell, window: HeatWindow, whole: HeatWindow): HeatWindow {
  const left = nearest(window.left, window.width, cell.column)
  const top = nearest(window.top, window.height, cell.row)
  return left === window.left && top === window.top ? window : clamp({ ...window, left, top }, whole)
}

function nearest(start: number, length: number, index: number): number {
  if (index < start || length <= 1) return index
  return index + 1 > start + length ? index + 1 - length : start
}

export function same(one: HeatWindow, other: HeatWindow): boolean {
  const near = (a: number, b: number) => Math.abs(a - b) < 1e-6
  return (
    near(one.left, other.left) &&
    near(one.top, other.top) &&
    near(one.width, other.width) &&
    near(one.height, other.height)
  )
}
