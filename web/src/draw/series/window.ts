/** Which steps of all are seen: zooming and moving. null: all of them. */

import type { Span } from './series'

/** Steps between the first and the last that are seen, at least. */
const LEAST = 2

/** `around` stays where it is; `factor` below 1 shows less. */
export function zoomed(seen: Span, around: number, factor: number, all: Span): Span | null {
  const [first, last] = seen
  const length = Math.max((last - first) * factor, LEAST)
  const share = last > first ? Math.min(Math.max((around - first) / (last - first), 0), 1) : 0.5
  return within(around - share * length, around + (1 - share) * length, all)
}

/** Later, or earlier, by so many steps, as far as there are any. */
export function moved(seen: Span, by: number, all: Span): Span | null {
  const [first, last] = seen
  const allowed = Math.min(Math.max(by, all[0] - first), all[1] - last)
  return within(first + allowed, last + allowed, all)
}

/** Moved as little as shows `step`. */
export function showing(seen: Span, step: number, all: Span): Span | null {
  if (step < seen[0]) return moved(seen, step - seen[0], all)
  return step > seen[1] ? moved(seen, step - seen[1], all) : seen
}

/** Whole steps within all; null for all. */
export function within(first: number, last: number, all: Span): Span | null {
  const from = Math.max(Math.round(first), all[0])
  const to = Math.min(Math.max(Math.round(last), from + LEAST), all[1])
  const begin = Math.max(Math.min(from, to - LEAST), all[0])
  return begin <= all[0] && to >= all[1] ? null : [begin, to]
}
