/** What ranks say when something is put back. */

export interface Reverted {
  ranks: { rank: number; text: string; failed: boolean }[]
  /** Ranks that have not said anything in time. */
  silent: number[]
}

/** From the answer of POST /perturbations/{id}/revert: a notice by rank. */
export function revertedOf(answer: { ranks?: unknown; silent?: number[] }): Reverted {
  const said = Object.entries((answer.ranks ?? {}) as Record<string, Record<string, unknown>>)
  const ranks = said.map(([rank, notice]) => ({
    rank: Number(rank),
    text: String(notice['text'] || notice['kind'] || ''),
    failed: notice['kind'] === 'error',
  }))
  return { ranks: ranks.sort((a, b) => a.rank - b.rank), silent: answer.silent ?? [] }
}
