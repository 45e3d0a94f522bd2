/** What a chart over steps shows. */

/** A statistic over steps, in buckets of one step or more, as the server thins it out. */
export interface Series {
  label: string
  /** First step of each bucket that holds any, ascending. */
  step: readonly number[]
  min: readonly (number | null)[]
  max: readonly (number | null)[]
  mean: readonly (number | null)[]
  /** Most NaN in a step of the bucket. */
  nan?: readonly number[]
  inf?: readonly number[]
  /** `main`: in a colour of its own, however many others there are. */
  kind?: 'main' | 'other'
}

/** Something that happened at a step. */
export interface Mark {
  step: number
  label: string
  kind: 'perturbation' | 'finding' | 'note'
}

/** First and last step. */
export type Span = readonly [first: number, last: number]

/** From the first step of any to the last; null: there is none. */
export function spanOf(all: readonly Series[]): Span | null {
  let first = Infinity
  let last = -Infinity
  for (const { step } of all) {
    if (!step.length) continue
    first = Math.min(first, step[0]!)
    last = Math.max(last, step.at(-1)!)
  }
  return first <= last ? [first, last] : null
}

/** The place of the last number that is not above `value`, of ascending ones; -1: none. */
export function placeUpTo(ascending: readonly number[] | Float64Array, value: number): number {
  let low = 0
  let high = ascending.length
  while (low < high) {
    const middle = (low + high) >> 1
    if (ascending[middle]! <= value) low = middle + 1
    else high = middle
  }
  return low - 1
}

/** The place of the number that is nearest; -1: there is none. */
export function nearest(ascending: readonly number[] | Float64Array, value: number): number {
  const before = placeUpTo(ascending, value)
  if (before < 0) return ascending.length ? 0 : -1
  const after = before + 1
  return after < ascending.length && ascending[after]! - value < value - ascending[before]! ? after : before
}
