/** How far a disturbance spreads: of each tensor of a paired run the difference over its steps. Pure. */

import type { Series } from '../../draw/series/series'
import type { PairResult } from '../disturb/pairs'

/** A series for each tensor that differs at any step, in the order of the model; those that do not would be at 0. */
export function spread(result: Pick<PairResult, 'rows'>): Series[] {
  const found = new Map<string, { step: number[]; l2: (number | null)[] }>()
  for (const { tap, step, l2 } of result.rows) {
    const one = found.get(tap) ?? { step: [], l2: [] }
    one.step.push(step)
    one.l2.push(l2)
    found.set(tap, one)
  }
  return [...found].flatMap(([label, { step, l2 }]) =>
    l2.some((value) => value !== 0) ? [{ label, step, min: l2, max: l2, mean: l2 }] : [],
  )
}
