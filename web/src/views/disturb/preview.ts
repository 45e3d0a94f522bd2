/** What a preview says, in the order in which it is shown. */

import { counted } from '../../parts/numbers'

/** A tensor that would be disturbed on a rank. */
interface Touched {
  tap: string
  kind: string
  shape: number[] | null
  dtype: string
  /** At each moment; null: the shape is not known yet. */
  elements: number | null
  /** The rank holds a part of the tensor: the elements may be another rank's. */
  at_most: boolean
  note: string
}

export interface Preview {
  text: string
  taps: string[]
  ranks: number[]
  touched: Record<string, Touched[]>
  /** The earliest at which it could begin. */
  step: number
  problems: string[]
}

/** The ranks on which the same is touched in one tensor. */
export interface Row extends Touched {
  ranks: number[]
}

export function rowsOf(preview: Preview): Row[] {
  const rows = new Map<string, Row>()
  for (const [rank, touched] of Object.entries(preview.touched)) {
    for (const one of touched) {
      const key = JSON.stringify([one.tap, one.shape, one.dtype, one.elements, one.at_most, one.note])
      const row = rows.get(key)
      if (row) row.ranks.push(Number(rank))
      else rows.set(key, { ...one, ranks: [Number(rank)] })
    }
  }
  return [...rows.values()]
}

/** How many elements are disturbed on each of the ranks. */
export function onEach({ elements, at_most }: Row): string {
  return elements === null ? '' : `${at_most ? 'at most ' : ''}${counted(elements)}`
}

/** How many elements are disturbed at each moment. Drawn and listed ones are of the whole tensor, over its ranks. */
export function elementsText(rows: readonly Row[], asked: unknown): string {
  const part = (asked ?? {}) as Readonly<Record<string, unknown>>
  const listed = part['indices']
  const drawn = Array.isArray(listed) ? listed.length : part['elements']
  if (typeof drawn === 'number') return `${counted(drawn)} of each tensor, on the ranks that hold them`
  let total = 0
  for (const row of rows) {
    if (row.elements === null) return 'known when the tensors have been seen'
    total += row.elements * row.ranks.length
  }
  return rows.length ? `${counted(total)}, those of replicas counted each` : 'known when it is communicated'
}
