/** The candidates of all places as a table. Pure. */

import { csvOf } from '../../parts/csv'
import type { Slot } from './sequence'

const HEAD = [
  'step',
  'place',
  'token id',
  'token',
  'entropy (nats)',
  'rank',
  'candidate id',
  'candidate',
  'probability',
]

export function csvOfSlots(
  slots: readonly Slot[],
  text: (id: number, text: string | null) => string,
): string {
  const rows = slots.flatMap(({ index, id, text: own, answer }) =>
    (answer?.candidates ?? []).map((candidate, rank) => [
      answer?.step ?? null,
      index,
      id,
      own,
      answer?.entropy ?? null,
      rank,
      candidate.id,
      text(candidate.id, candidate.text),
      candidate.probability,
    ]),
  )
  return csvOf(HEAD, rows)
}
