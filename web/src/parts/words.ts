/** What is counted or numbered, in words. */

import { counted } from './numbers'

/** `1 tensor`, `12 tensors`. */
export function several(count: number, what: string): string {
  return `${counted(count)} ${what}${count === 1 ? '' : 's'}`
}

/** Numbers as short text: `0-3, 8`. */
export function spansOf(numbers: readonly number[], most = 6): string {
  const spans: [number, number][] = []
  for (const number of numbers.toSorted((a, b) => a - b)) {
    const last = spans.at(-1)
    if (last && number === last[1] + 1) last[1] = number
    else if (!last || number > last[1]) spans.push([number, number])
  }
  const words = spans.slice(0, most).map(([low, high]) => (low === high ? `${low}` : `${low}-${high}`))
  return words.join(', ') + (spans.length > most ? ', ...' : '')
}

/** `rank 3`, `ranks 0-3, 8`, `no rank`. */
export function ranksText(ranks: readonly number[], most = 6): string {
  const different = new Set(ranks).size
  return different ? `rank${different === 1 ? '' : 's'} ${spansOf(ranks, most)}` : 'no rank'
}
