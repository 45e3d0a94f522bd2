/** The axis of steps: places on it, what of it is shown, and where something was recorded. Pure. */

/** From one step to another; both belong to it. */
export interface Span {
  readonly first: number
  readonly last: number
}

/** Steps that are shown at least. */
const FEWEST = 10

/** Where a step lies, as a share of the axis: 0 to 1 within it. A span of one step has it in the middle. */
export function placeOf(step: number, { first, last }: Span): number {
  return last > first ? (step - first) / (last - first) : 0.5
}

/** The step at a share of the axis. */
export function stepAt(share: number, { first, last }: Span): number {
  return Math.round(first + Math.min(Math.max(share, 0), 1) * (last - first))
}

/** The part of `whole` that is asked for, as far as there is one. */
export function shownOf(whole: Span, first: number | null, last: number | null): Span {
  const low = Math.max(first ?? whole.first, whole.first)
  const high = Math.min(last ?? whole.last, whole.last)
  return low < high ? { first: low, last: high } : whole
}

/** `span` made so many times as long about a step, which stays where it is, within `whole`. */
export function zoomed(span: Span, whole: Span, factor: number, about: number): Span {
  const fewest = Math.min(FEWEST, whole.last - whole.first)
  const length = Math.min(Math.max((span.last - span.first) * factor, fewest), whole.last - whole.first)
  const center = Math.min(Math.max(about, span.first), span.last)
  return within(Math.round(center - placeOf(center, span) * length), Math.round(length), whole)
}

/** `span` moved so that it holds a step, which is then in its middle; as it is if it holds it already. */
export function holding(span: Span, whole: Span, step: number): Span {
  if (step >= span.first && step <= span.last) return span
  const length = span.last - span.first
  return within(step - Math.round(length / 2), length, whole)
}

function within(first: number, length: number, whole: Span): Span {
  const begin = Math.min(Math.max(first, whole.first), whole.last - length)
  return { first: begin, last: begin + length }
}

/** Steps to be written below the axis: round ones, at most so many. */
export function ticks({ first, last }: Span, most: number): number[] {
  const bare = Math.max((last - first) / Math.max(most, 1), 1)
  const power = 10 ** Math.floor(Math.log10(bare))
  const width = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= bare) ?? 10 * power
  const found: number[] = []
  for (let step = Math.ceil(first / width) * width; step <= last; step += width) found.push(step)
  return found
}

/** In which of so many columns of the axis lies one of `steps` (in order)? As runs: [first column, columns]. */
export function filled(steps: readonly number[], span: Span, columns: number): [number, number][] {
  const width = (span.last - span.first + 1) / columns
  const found: [number, number][] = []
  for (let at = lowerBound(steps, span.first); at < steps.length; at++) {
    const step = steps[at] as number
    if (step > span.last) break
    const from = Math.floor((step - span.first) / width)
    const to = Math.max(Math.ceil((step + 1 - span.first) / width), from + 1)
    const before = found.at(-1)
    if (before && from <= before[0] + before[1]) before[1] = Math.max(before[1], to - before[0])
    else found.push([from, to - from])
  }
  return found
}

/** Place of the first of `steps` (in order) that is not before `step`. */
export function lowerBound(steps: readonly number[], step: number): number {
  let low = 0
  let high = steps.length
  while (low < high) {
    const middle = (low + high) >> 1
    if ((steps[middle] as number) < step) low = middle + 1
    else high = middle
  }
  return low
}
