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
  const level = levels(scale, span ?? { low: 0, high: 0 })
  let to = 0
  for (let row = area.row; row < area.row + area.rows; row++) {
    const from = row * columns + area.column
    for (let at = from; at < from + area.columns; at++) {
      bytes[to++] = missing !== undefined && missing[at] !== 0 ? FLOATS.missing! : level(values[at]!)
    }
  }
  return bytes
}

/** The byte of a value. */
function levels(scale: Scale, span: Span): (value: number) => number {
  const { first, last } = FLOATS
  const [infinite, nan] = [FLOATS.infinite!, FLOATS.nan!]
  const steps = last - first
  const other = (value: number) => (Number.isNaN(value) ? nan : infinite)
  const factor = steps / (span.high - span.low)
  if (scale === 'linear' && factor > 0 && factor < Infinity) {
    return (value) => {
      // One multiplication a value: 16 million are quantised in a tenth of a second.
      if (value >= span.low && value <= span.high)
        return Math.min(last, ((value - span.low) * factor + first + 0.5) | 0)
      return value < span.low && value > -Infinity
        ? first
        : value > span.high && value < Infinity
          ? last
          : other(value)
    }
  }
  const curve = curveOf(scale, span)
  return (value) => {
    if (!Number.isFinite(value)) return other(value)
    return first + Math.round(Math.min(1, Math.max(0, curve.position(value))) * steps)
  }
}

/** What a byte of {@link quantise} stands for; NaN where it has no finite value. */
export function valueOfByte(byte: number, scale: Scale, span: Span): number {
  const { first, last } = FLOATS
  if (byte < first || byte > last) return NaN
  return curveOf(scale, span).value((byte - first) / (last - first))
}
