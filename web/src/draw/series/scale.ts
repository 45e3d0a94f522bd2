/** The axis of values: its range, kind and ticks. */

import { shown } from '../../parts/numbers'
import { placeUpTo } from './series'
import type { Columns } from './table'

/** `symlog`: logarithmic on either side of zero, linear within the threshold. */
export type Kind = 'linear' | 'log' | 'symlog'

export interface Scale {
  kind: Kind
  low: number
  high: number
  /** Of symlog: where it turns linear. */
  threshold: number
  /** All values are whole. */
  counts?: boolean
}

/** Of the room, below the least and above the greatest. */
const MARGIN = 0.06
/** Decades on each side that symlog shows. */
const DECADES = 6

/** So that all values of the columns at steps from `first` to `last` are seen; logarithmic if wanted and possible. */
export function scaleOf(
  steps: Float64Array,
  columns: readonly Columns[],
  [first, last]: readonly [number, number],
  log: boolean,
  counts = false,
): Scale {
  // The lines to the next steps outside are seen, too.
  const from = Math.max(placeUpTo(steps, first), 0)
  const to = Math.min(placeUpTo(steps, last) + 1, steps.length - 1)
  const found = { low: Infinity, high: -Infinity, least: Infinity }
  for (const { min, max, mean } of columns) {
    for (const column of [min, max, mean]) {
      for (let at = from; at <= to; at++) {
        const value = column[at]
        if (value === null || value === undefined || !Number.isFinite(value)) continue
        if (value < found.low) found.low = value
        if (value > found.high) found.high = value
        if (value !== 0 && Math.abs(value) < found.least) found.least = Math.abs(value)
      }
    }
  }
  if (found.low > found.high) return { kind: 'linear', low: 0, high: 1, threshold: 1 }
  // Counts of what never happened: nothing can be below.
  if (counts && found.low === 0 && found.high === 0)
    return { kind: 'linear', low: -MARGIN, high: 1 + MARGIN, threshold: 1, counts }
  if (!log || found.least === Infinity) return { ...linear(found.low, found.high), counts }
  return found.low > 0 ? logarithmic(found.low, found.high) : symlog(found.low, found.high, found.least)
}

function linear(low: number, high: number): Scale {
  const room = high > low ? (high - low) * MARGIN : Math.abs(high) * 0.1 || 1
  return { kind: 'linear', low: low - room, high: high + room, threshold: 1 }
}

function logarithmic(low: number, high: number): Scale {
  const room = high > low ? (high / low) ** MARGIN : 1.1
  return { kind: 'log', low: low / room, high: high * room, threshold: 1 }
}

function symlog(low: number, high: number, least: number): Scale {
  const most = Math.max(Math.abs(low), Math.abs(high))
  const threshold = 10 ** Math.floor(Math.log10(Math.max(least, most * 10 ** -DECADES)))
  const [below, above] = [Math.asinh(low / threshold), Math.asinh(high / threshold)]
  const room = (above - below) * MARGIN || 0.5
  return {
    kind: 'symlog',
    low: Math.sinh(below - room) * threshold,
    high: Math.sinh(above + room) * threshold,
    threshold,
  }
}

/** Where a value lies on the axis: 0 at its low end, 1 at its high one. */
export function placing({ kind, low, high, threshold }: Scale): (value: number) => number {
  const bend: (value: number) => number =
    kind === 'log'
      ? Math.log
      : kind === 'symlog'
        ? (value) => Math.asinh(value / threshold)
        : (value) => value / 2
  const [begin, end] = [bend(low), bend(high)]
  return (value) => (bend(value) - begin) / (end - begin)
}

/** Values to put ticks at: at most about so many. */
export function ticksOf({ kind, low, high, threshold, counts }: Scale, most: number): number[] {
  if (kind === 'symlog') return symlogTicks(low, high, threshold, most)
  if (kind === 'log') {
    const ticks = logTicks(low, high, most)
    if (ticks.length >= 3) return ticks
  }
  const ticks = linearTicks(low, high, most)
  return counts ? ticks.filter(Number.isInteger) : ticks
}

export function linearTicks(low: number, high: number, most: number): number[] {
  const rough = (high - low) / Math.max(most, 1)
  const power = 10 ** Math.floor(Math.log10(rough))
  const step = ([1, 2, 5, 10].find((nice) => nice * power >= rough) ?? 10) * power
  const found: number[] = []
  for (let at = Math.ceil(low / step); at * step <= high; at++) found.push(tidy(at * step))
  return found
}

function logTicks(low: number, high: number, most: number): number[] {
  const first = Math.floor(Math.log10(low))
  const last = Math.ceil(Math.log10(high))
  const dense = last - first <= most / 3
  const stride = Math.max(Math.ceil((last - first) / Math.max(most, 1)), 1)
  const found: number[] = []
  for (let power = first; power <= last; power += stride)
    for (const nice of dense ? [1, 2, 5] : [1]) found.push(tidy(nice * 10 ** power))
  return found.filter((tick) => tick >= low && tick <= high)
}

function symlogTicks(low: number, high: number, threshold: number, most: number): number[] {
  const first = Math.round(Math.log10(threshold))
  const last = Math.floor(Math.log10(Math.max(-low, high, threshold)) + 1e-9)
  const sides = low < 0 && high > 0 ? 2 : 1
  const stride = Math.max(Math.ceil(((last - first + 1) * sides) / Math.max(most - 1, 1)), 1)
  const found = [0]
  for (let power = last; power >= first; power -= stride) found.push(tidy(10 ** power), tidy(-(10 ** power)))
  return found.filter((tick) => tick >= low && tick <= high).sort((a, b) => a - b)
}

/** Without the crumbs of binary fractions. */
function tidy(value: number): number {
  return Number(value.toPrecision(12))
}

/** Texts of ticks, with as many digits as tell them apart. */
export function tickTexts(ticks: readonly number[]): string[] {
  for (const digits of [3, 4, 5, 6, 8]) {
    const texts = ticks.map((tick) => shown(tick, digits))
    if (new Set(texts).size === new Set(ticks).size) return texts
  }
  return ticks.map((tick) => shown(tick, 12))
}
