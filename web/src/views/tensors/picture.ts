/** A frame of a tensor as a grid that can be drawn and read. Pure. */

import { numbersOf, type Frame } from '../../api/frames'
import type { HeatCells } from '../../draw/heatmap/encode'
import type { HeatMarker } from '../../parts/heatmap'
import { axesOf, placesOf, product, shapeOf } from './axes'

/** Kinds of frames that can be shown as a grid; the first that there is is shown. */
export const KINDS = ['tiles', 'raw', 'rows', 'tokens'] as const

export type Kind = (typeof KINDS)[number]

export const KIND_NAMES: Readonly<Record<Kind, string>> = {
  tiles: 'tiles of the whole',
  raw: 'its values',
  rows: 'some of its rows',
  tokens: 'some of its tokens',
}

export interface Picture {
  readonly cells: HeatCells
  readonly rowTitle: string
  readonly columnTitle: string
  rowLabel(row: number): string
  columnLabel(column: number): string
  /** What a cell is, where it is no single value: `64 × 2 elements a tile`. */
  readonly about: string
  /** There are values on both sides of 0. */
  readonly signed: boolean
  /** Rows with which another part of the tensor begins, which does not go on where the one above ends. */
  readonly breaks: readonly number[]
}

/** Lines between such parts. */
export function edgesOf({ breaks }: Picture): HeatMarker[] {
  return breaks.map((row) => ({ axis: 'row', at: row - 0.5, label: 'another part', kind: 'edge' }))
}

/** RangeError, in a line, for a frame of which no picture can be made. */
export function pictureOf(frame: Frame): Picture {
  if (Object.keys(frame.arrays).some((name) => name.includes('@')))
    throw new RangeError('The parts of the ranks do not fit together: choose one rank')
  const make = MAKERS[frame.what as Kind] as ((frame: Frame) => Picture) | undefined
  if (!make || !Object.hasOwn(MAKERS, frame.what))
    throw new RangeError(`There is no picture of ${frame.what}`)
  return make(frame)
}

const MAKERS: Readonly<Record<Kind, (frame: Frame) => Picture>> = {
  tiles: tilePicture,
  rows: rowPicture,
  tokens: tokenPicture,
  raw: rawPicture,
}

function tilePicture(frame: Frame): Picture {
  const shape = (frame.arrays['tiles'] ?? frame.arrays['values'])?.shape ?? [0, 0]
  const [rows = 0, columns = 0] = shape
  const [high = rows, wide = columns, tall = 1, broad = 1] = frame.arrays['extent']
    ? numbersOf(frame, 'extent')
    : []
  const axes = axesOf(frame)
  const places = placesOf(frame)
  const cells = tileCells(frame, rows, columns)
  const last = (at: number, size: number, whole: number): number => Math.min(whole, (at + 1) * size) - 1
  const rowLabel = (row: number): string => {
    const first = places?.first[row]
    return places && first
      ? axes.block(first, places.last[row] ?? null, places.sides)
      : axes.span(row * tall, last(row, tall, high))
  }
  return {
    cells,
    rowTitle: axes.rows,
    columnTitle: axes.columns,
    rowLabel,
    columnLabel: (column) => {
      const [from, to] = [column * broad, last(column, broad, wide)]
      return from === to ? String(from) : `${from}–${to}`
    },
    about: tall * broad > 1 ? `${tall} × ${broad} elements a tile` : '',
    signed: isSigned(cells),
    breaks: places?.breaks ?? [],
  }
}

function tileCells(frame: Frame, rows: number, columns: number): HeatCells {
  const bytes = frame.arrays['tiles']?.values
  if (!(bytes instanceof Uint8Array)) return { rows, columns, values: numbersOf(frame, 'values') }
  const [low = 0, high = 0] = numbersOf(frame, 'scale')
  return { rows, columns, bytes, low, high, reserved: true }
}

function rowPicture(frame: Frame): Picture {
  const values = numbersOf(frame, 'values')
  const index = numbersOf(frame, 'index')
  const ranks = frame.arrays['rank'] ? numbersOf(frame, 'rank') : null
  const axes = axesOf(frame)
  const places = placesOf(frame)
  const of = (row: number): string => (ranks ? `, rank ${ranks[row]}` : '')
  return {
    ...plain(values, index.length, values.length / Math.max(1, index.length)),
    rowTitle: axes.rows,
    columnTitle: axes.columns,
    rowLabel: (row) => {
      const place = places?.first[row]
      return (place ? axes.block(place, place, []) : axes.row(index[row] ?? row)) + of(row)
    },
  }
}

function tokenPicture(frame: Frame): Picture {
  const values = numbersOf(frame, 'values')
  const index = numbersOf(frame, 'index')
  const shape = frame.arrays['values']?.shape ?? []
  const columns = shape.at(-1) ?? 1
  const rows = values.length / Math.max(1, columns)
  const labels = Array.isArray(frame.meta['labels']) ? frame.meta['labels'].map(String) : []
  const axes = axesOf(frame, shape)
  const first = labels[0] === 's' || !labels.includes('s')
  const each = first ? rows / Math.max(1, index.length) : 1
  return {
    ...plain(values, rows, columns),
    rowTitle: axes.rows,
    columnTitle: axes.columns,
    // Places count the chosen tokens; what is told is where those are in the sequence.
    rowLabel: (row) =>
      first
        ? axes.row((index[Math.floor(row / each)] ?? 0) * axes.inner + (row % each))
        : `${axes.row(row)} of tokens ${Array.from(index).join(', ')}`,
  }
}

function rawPicture(frame: Frame): Picture {
  const values = numbersOf(frame, 'values')
  const shape = frame.arrays['shape'] ? Array.from(numbersOf(frame, 'shape')) : shapeOf(frame)
  const columns = Math.max(1, shape.at(-1) ?? 1)
  const rows = Math.ceil(values.length / columns)
  const axes = axesOf(frame, shape)
  const left = product(shape) - values.length
  return {
    ...plain(values, rows, columns),
    rowTitle: axes.rows,
    columnTitle: axes.columns,
    rowLabel: axes.row,
    about: left > 0 ? `the first ${values.length} of ${product(shape)} elements` : '',
  }
}

/** Values, row by row; what the last row lacks is missing. */
function plain(
  values: Float32Array | Float64Array,
  rows: number,
  columns: number,
): Omit<Picture, 'rowLabel' | 'rowTitle' | 'columnTitle'> {
  const size = Math.floor(rows) * Math.floor(columns)
  const cells = { rows: Math.floor(rows), columns: Math.floor(columns), ...padded(values, size) }
  return { cells, columnLabel: String, about: '', signed: isSigned(cells), breaks: [] }
}

function padded(values: Float32Array | Float64Array, size: number) {
  if (values.length >= size) return { values: values.subarray(0, size) }
  const all = new Float64Array(size)
  all.set(values)
  return { values: all, missing: new Uint8Array(size).fill(1, values.length) }
}

function isSigned(cells: HeatCells): boolean {
  if ('bytes' in cells) return cells.low < 0 && cells.high > 0
  let [below, above] = [false, false]
  for (const value of cells.values) {
    below ||= value < 0 && value > -Infinity
    above ||= value > 0 && value < Infinity
    if (below && above) return true
  }
  return false
}

/** Values of a row of a picture, for bars; NaN where there is none. */
export function rowValues(
  cells: HeatCells,
  row: number,
  value: (row: number, column: number) => number,
): Float64Array {
  return Float64Array.from({ length: cells.columns }, (_, column) => value(row, column))
}
