/** Paired runs: how they stand, and what came of one, in words. */

import { shown } from '../../parts/numbers'

const MOST_DIGITS = 15

export interface PairStanding {
  id: string
  /** The first of its steps. */
  step: number
  steps: number
  state: 'running' | 'done' | 'failed'
}

interface Difference {
  step: number
  tap: string
  /** Norm of the difference over that of the clean tensor; null: NaN or infinite. */
  l2: number | null
  maximum: number | null
  relative_maximum: number | null
  microbatch: number
}

interface Scalar {
  step: number
  clean: number | null
  disturbed: number | null
  difference: number | null
}

export interface PairResult {
  pair: string
  first_step: number
  steps: number
  tolerance: number
  perturbations: string[]
  parts_at: Difference | null
  alike_after: number | null
  rows: Difference[]
  loss: Scalar[]
  gradient_norm: Scalar[]
  missing: number[]
}

/** As the status has them, the newest first. */
export function pairsOf(found: unknown): PairStanding[] {
  const all = Object.entries((found ?? {}) as Record<string, Record<string, unknown>>)
  return all
    .map(([id, about]) => ({
      id,
      step: Number(about['step'] ?? -1),
      steps: Number(about['steps'] ?? 0),
      state: stateOf(about),
    }))
    .sort((a, b) => b.step - a.step)
}

function stateOf(about: Readonly<Record<string, unknown>>): PairStanding['state'] {
  const states = Object.values((about['states'] ?? {}) as Record<string, string>)
  if (states.includes('error')) return 'failed'
  return about['ended'] === true ? 'done' : 'running'
}

/** Both values, with as many digits as tell them apart. */
export function apart(clean: number | null, disturbed: number | null): [string, string] {
  const texts = (digits: number) =>
    [clean, disturbed].map((value) => (value === null ? 'not finite' : shown(value, digits))) as [
      string,
      string,
    ]
  for (let digits = 4; digits < MOST_DIGITS; digits++) {
    const [one, other] = texts(digits)
    if (one !== other || clean === disturbed) return [one, other]
  }
  return texts(MOST_DIGITS)
}

/** Where the two part, and how long they stay apart. */
export function summaryOf(result: PairResult): string {
  const parted = result.parts_at
  if (!parted) return `No tensor differs in the ${result.steps} steps from step ${result.first_step} on.`
  const where = `They part in step ${parted.step}, microbatch ${parted.microbatch}, at ${parted.tap}`
  if (result.alike_after === null) {
    return `${where}, and are not within ${result.tolerance} again in the ${result.steps} steps that were run.`
  }
  if (result.alike_after === 0) return `${where}, and stay within ${result.tolerance}.`
  const steps = `${result.alike_after} step${result.alike_after === 1 ? '' : 's'}`
  return `${where}, and are within ${result.tolerance} again after ${steps}.`
}
