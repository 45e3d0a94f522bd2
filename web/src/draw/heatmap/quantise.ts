/** Numbers to bytes and back. Pure. */
import { FLOATS } from './coding'
import { curveOf, type Scale, type Span } from './scale'

export type Floats = Float32Array | Float64Array

/**
 * `extremes`: all finite values; `robust`: without the outermost half percent on either side; `symmetric`: the same
 * distance on both sides of 0; or the ends themselves.
 */
export type Range = 'extremes' | 'robust' | 'symmetric' | readonly [low: number, high: number]

/** Quantiles are those of at most so many values, taken evenly; an exact sort of 16 million would take a second. */
const SAMPLE = 65_536
const OUTERMOST = 0.005

/**
 * The span of a range; null where no value is finite. On a logarithmic scale only what is above 0 counts, if anything is.
 * `centred` makes it symmetric about 0, whatever the range, as diverging colours need it.
 */
export function spanOf(values: Floats, range: Range, scale: Scale = 'linear', centred = false): Span | null {
  let span = typeof range === 'string' ? measured(values, range, scale) : given(range)
  if (span === null || !(centred || range === 'symmetric')) return span
  const most = Math.max(Math.abs(span.low), Math.abs(span.high))
  span = { low: -most, high: most }
  return span
}

function given([low, high]: readonly [number, number]): Span | null {
  if (!Number.isFinite(low) || !Number.isFinite(high)) return null
  return low <= high ? { low, high } : { low: high, high: low }
}

function measured(values: Floats, range: 'extremes' | 'robust' | 'symmetric', scale: Scale): Span | null {
  const above = scale === 'log' ? 0 : -Infinity
  const all = extremes(values, above) ?? extremes(values, -Infinity)
  if (all === null || range !== 'robust') return all
  const most = quantiles(values, Math.max(above, all.low > 0 ? 0 : -Infinity))
  // Where nearly all values are the same, the few others are what there is to see.
  return most !== null && most.low < most.high ? most : all
}

/** Of finite values above a bound. */
export function extremes(values: Floats, above = -Infinity): Span | null {
  let [low, high] = [Infinity, -Infinity]
  for (let at = 0; at < values.length; at++) {
    const value = values[at]!
    // A NaN or an infinity passes neither of the comparisons.
    if (value < low && value > above) low = value
    if (value > high && value < Infinity && value > above) high = value
  }
  if (low === Infinity) return null
  return high === -Infinity ? { low, high: low } : { low, high }
}

function quantiles(values: Floats, above: number): Span | null {
  const step = Math.max(1, Math.floor(values.length / SAMPLE))
  const sample = new Float64Array(Math.ceil(values.length / step))
  let count = 0
  for (let at = 0; at < values.length; at += step) {
    const value = values[at]!
    if (value > above && value < Infinity) sample[count++] = value
  }
  if (count === 0) return null
  const sorted = sample.subarray(0, count).sort()
  const cut = Math.floor(OUTERMOST * (count - 1))
  return { low: sorted[cut]!, high: sorted[count - 1 - cut]! }
}

/** A part of numbers that lie row by row. */
export interface Area {
  readonly row: number
  readonly column: number
  readonly rows: number
  readonly columns: number
}

/**
 * Bytes (see {@link FLOATS}) of an area of the values, row by row. `missing` is 1 where there is no value; values outside
 * the span get the byte at its end. Without a span no value is finite.
 */
export function quantise(
  values: Floats,
  columns: number,
  area: Area,
  scale: Scale,
  span: Span | null,
  missing?: Uint8Array,
): Uint8Array {
  const bytes = new Uint8Array(area.rows * area.columns)
  const put = quantiser(scale, span ?? { low: 0, high: 0 })
  for (let row = 0; row < area.rows; row++) {
    const from = (area.row + row) * columns + area.column
    const to = row * area.columns
    put(values, from, bytes, to, area.columns)
    if (missing === undefined) continue
    for (let at = 0; at < area.columns; at++) if (missing[from + at] !== 0) bytes[to + at] = FLOATS.missing!
  }
  return bytes
}

/** Puts bytes of so many values. */
type Put = (values: Floats, from: number, bytes: Uint8Array, to: number, count: number) => void

function quantiser(scale: Scale, span: Span): Put {
  const { first, last } = FLOATS
  const { low, high } = span
  const factor = (last - first) / (high - low)
  if (scale !== 'linear' || !(factor > 0 && factor < Infinity)) return bent(scale, span)
  return (values, from, bytes, to, count) => {
    for (let at = 0; at < count; at++) {
      const value = values[from + at]!
      // Within the span, as nearly all are, a multiplication is enough.
      const within = value >= low && value <= high
      bytes[to + at] = within
        ? Math.min(last, ((value - low) * factor + first + 0.5) | 0)
        : outside(value, low)
    }
  }
}

function bent(scale: Scale, span: Span): Put {
  const { first, last } = FLOATS
  const curve = curveOf(scale, span)
  return (values, from, bytes, to, count) => {
    for (let at = 0; at < count; at++) {
      const value = values[from + at]!
      const level = first + Math.round(Math.min(1, Math.max(0, curve.position(value))) * (last - first))
      bytes[to + at] = Number.isFinite(value) ? level : outside(value, span.low)
    }
  }
}

/** Of a value that is beside the span, or not finite. */
function outside(value: number, low: number): number {
  if (Number.isNaN(value)) return FLOATS.nan!
  if (!Number.isFinite(value)) return FLOATS.infinite!
  return value < low ? FLOATS.first : FLOATS.last
}
