/** What is drawn of a grid: its bytes, what they stand for, and their colours. Pure. */
import {
  colourTable,
  specialColour,
  specialInk,
  SPECIALS,
  type ColourMap,
  type Special,
  type Theme,
} from '../colours'
import { FLOATS, specialOf, TILES, WHOLE, type Coding, type Pooling } from './coding'
import { extremes, quantise, spanOf, type Area, type Floats, type Range } from './quantise'
import type { Grid } from './pyramid'
import type { Tables } from './raster'
import { curveOf, type Scale, type Span } from './scale'

/** Numbers, row by row. */
export interface FloatCells {
  readonly rows: number
  readonly columns: number
  readonly values: Floats
  /** 1 where there is no value (yet), which is something else than NaN. */
  readonly missing?: Uint8Array
  /**
   * Only this area differs from what the values were (another array, perhaps of fewer cells), and need be drawn anew, if
   * those are what is drawn.
   */
  readonly changed?: { readonly area: Area; readonly before: Floats }
}

/**
 * Bytes, row by row: low + (high - low) * (byte / levels) ** power. With `reserved`, as in tiles, levels are 253, 254 is
 * infinite and 255 NaN; without it, as in attention, levels are 255.
 */
export interface ByteCells {
  readonly rows: number
  readonly columns: number
  readonly bytes: Uint8Array
  readonly low: number
  readonly high: number
  readonly power?: number
  readonly reserved: boolean
}

export type HeatCells = FloatCells | ByteCells

export interface Look {
  readonly scale: Scale
  readonly range: Range
  readonly colours: ColourMap
  readonly pooling?: Pooling
}

export interface Encoded {
  /** The bytes to draw; it may grow while it is drawn. */
  readonly grid: Grid
  readonly coding: Coding
  readonly pooling: Pooling
  /** Of the colours; null where no value is finite. */
  readonly span: Span | null
  /** Where in the colours each byte lies, 0 to 1. */
  readonly positions: Float64Array
  /** How often each byte is there. */
  readonly counts: Uint32Array
}

export function encode(cells: HeatCells, look: Look): Encoded {
  const pooling = look.pooling ?? (look.colours === 'diverging' ? 'away' : 'high')
  const centred = look.colours === 'diverging'
  if ('bytes' in cells) return { ...ofBytes(cells, look, centred), pooling }
  const span = spanOf(present(cells), look.range, look.scale, centred)
  const whole = { row: 0, column: 0, rows: cells.rows, columns: cells.columns }
  const bytes = quantise(cells.values, cells.columns, whole, look.scale, span, cells.missing)
  const positions = Float64Array.from({ length: 256 }, (_, byte) => share(byte, FLOATS))
  return { grid: gridOf(cells, bytes), coding: FLOATS, pooling, span, positions, counts: countsOf(bytes) }
}

/**
 * Bytes of the changed area of such cells, or null where all have to be encoded: it is not said what has changed since
 * those that are drawn, or the new values lie outside the span that the old ones set.
 */
export function encodeChanged(
  cells: HeatCells,
  look: Look,
  before: { readonly cells: HeatCells; readonly encoded: Encoded },
): { area: Area; bytes: Uint8Array } | null {
  const { span } = before.encoded
  if ('bytes' in cells || 'bytes' in before.cells || span === null) return null
  if (cells.changed === undefined || cells.changed.before !== before.cells.values) return null
  const { area } = cells.changed
  for (let row = area.row; typeof look.range === 'string' && row < area.row + area.rows; row++) {
    const from = row * cells.columns + area.column
    const found = extremes(cells.values.subarray(from, from + area.columns))
    if (found !== null && (found.low < span.low || found.high > span.high)) return null
  }
  return { area, bytes: quantise(cells.values, cells.columns, area, look.scale, span, cells.missing) }
}

/** Missing values set no range, whatever number stands in their place. */
function present(cells: FloatCells): Floats {
  const { missing, values } = cells
  return missing === undefined ? values : values.map((value, at) => (missing[at] ? NaN : value))
}

function ofBytes(cells: ByteCells, look: Look, centred: boolean): Omit<Encoded, 'pooling'> {
  const coding = cells.reserved ? TILES : WHOLE
  const values = Float64Array.from({ length: 256 }, (_, byte) => valueOf(cells, coding, byte))
  const counts = countsOf(cells.bytes)
  const some = values.map((value, byte) => (counts[byte]! > 0 ? value : NaN))
  const span = spanOf(look.range === 'robust' ? spread(some, counts) : some, look.range, look.scale, centred)
  const curve = curveOf(look.scale, span ?? { low: 0, high: 0 })
  const positions = values.map((value) => Math.min(1, Math.max(0, curve.position(value))))
  return { grid: gridOf(cells, cells.bytes), coding, span, positions, counts }
}

function gridOf({ rows, columns }: HeatCells, bytes: Uint8Array): Grid {
  return { bytes, rows, columns, stride: columns }
}

/** How often each byte is there; four counters, as one would have to wait for itself where neighbours are alike. */
export function countsOf(bytes: Uint8Array): Uint32Array {
  const found = new Uint32Array(4 * 256)
  const whole = bytes.length - (bytes.length % 4)
  for (let at = 0; at < whole; at += 4) {
    found[bytes[at]!]!++
    found[256 + bytes[at + 1]!]!++
    found[512 + bytes[at + 2]!]!++
    found[768 + bytes[at + 3]!]!++
  }
  for (let at = whole; at < bytes.length; at++) found[bytes[at]!]!++
  return Uint32Array.from({ length: 256 }, (_, byte) =>
    [0, 256, 512, 768].reduce((sum, from) => sum + found[from + byte]!, 0),
  )
}

/** A sample in which each value is as frequent as it is in the grid. */
function spread(values: Float64Array, counts: Uint32Array): Float64Array {
  const total = counts.reduce((sum, count) => sum + count, 0)
  const each = Math.max(1, total / 20_000)
  const out: number[] = []
  values.forEach((value, byte) => {
    for (let left = counts[byte]!; left > 0; left -= each) out.push(value)
  })
  return Float64Array.from(out)
}

function valueOf(cells: ByteCells, coding: Coding, byte: number): number {
  if (specialOf(byte, coding) !== null) return NaN
  // Two parts, as the span of the largest numbers overflows.
  const of = share(byte, coding) ** (cells.power ?? 1)
  return cells.low * (1 - of) + cells.high * of
}

function share(byte: number, { first, last }: Coding): number {
  return Math.min(1, Math.max(0, (byte - first) / (last - first)))
}

/** Colours of the bytes on such a page. */
export function tablesOf(encoded: Encoded, colours: ColourMap, theme: Theme): Tables {
  const map = colourTable(colours, theme)
  const table = new Uint8Array(256 * 4)
  encoded.positions.forEach((position, byte) => {
    const entry = Math.round(position * 255) * 4
    table.set(map.subarray(entry, entry + 4), byte * 4)
  })
  const inks = table.slice()
  for (const special of SPECIALS) {
    const byte = encoded.coding[special]
    if (byte === null) continue
    table.set(pixel(specialColour(special, theme)), byte * 4)
    inks.set(pixel(specialInk(special, theme)), byte * 4)
  }
  return { colours: table, inks }
}

function pixel(rgb: readonly number[]): number[] {
  return [...rgb.map((channel) => Math.round(channel * 255)), 255]
}

/** A cell's value: a number, which may be NaN or infinite, or a word where only that much is known. */
export type Reading = { readonly value: number; readonly exact: boolean } | Special

export function read(cells: HeatCells, row: number, column: number): Reading {
  const at = row * cells.columns + column
  if ('values' in cells) {
    return cells.missing?.[at] ? 'missing' : { value: cells.values[at] ?? NaN, exact: true }
  }
  const coding = cells.reserved ? TILES : WHOLE
  const byte = cells.bytes[at] ?? 0
  return specialOf(byte, coding) ?? { value: valueOf(cells, coding, byte), exact: false }
}

/** Which special values there are, for the legend. */
export function specialsOf({ coding, counts }: Encoded): Special[] {
  return SPECIALS.filter((special) => {
    const byte = coding[special]
    return byte !== null && counts[byte]! > 0
  })
}
