/** A statistic of every rank at a step, of one tensor or of one for each stage. */

import type { Api } from '../../api/client'
import type { Statistic } from '../../parts/statistics'
import type { RankValue } from './deviation'

export interface Asked {
  run: string
  taps: readonly string[]
  statistic: Statistic
  step: number
}

export interface RankValues {
  ranks: RankValue[]
  /** Of which steps: not later than the one asked for. */
  steps: number[]
  /** All of these steps is there; else some microbatches or ranks are not. */
  complete: boolean
  taps: string[]
}

/** As far as there is anything of the tensors at that step; raises what was said of the first where there is nothing. */
export async function loadRanks(api: Api, asked: Asked, signal: AbortSignal): Promise<RankValues> {
  const { run, taps, statistic, step } = asked
  const answers = await Promise.allSettled(
    taps.map((tap) => api.get('/runs/{run}/grid', { run, tap, statistic, step }, signal)),
  )
  const found = answers.flatMap((answer) => (answer.status === 'fulfilled' ? [answer.value] : []))
  const refused = answers.find((answer) => answer.status === 'rejected')
  if (!found.length && refused) throw refused.reason
  const ranks = new Map<number, RankValue>()
  for (const { tap, ranks: cells } of found)
    for (const cell of cells)
      if (!ranks.has(cell.rank)) ranks.set(cell.rank, { ...cell, coordinates: cell.coordinates, tap })
  return {
    ranks: [...ranks.values()].sort((a, b) => a.rank - b.rank),
    steps: [...new Set(found.map((answer) => answer.step))],
    complete: found.every((answer) => answer.complete),
    taps: found.map((answer) => answer.tap),
  }
}
