/** What is typed into the form, as it is typed, and its way into the address and back. */

import { KIND_NAMES, type KindName } from './kinds'

export const PARTS = ['all', 'elements', 'fraction', 'indices', 'slices'] as const
export const WHERES = ['copy', 'master', 'both'] as const
export const MODES = ['disturb', 'pair'] as const

export interface Draft {
  /** Disturb the job, or run the same steps clean and disturbed. */
  mode: (typeof MODES)[number]
  pattern: string
  kind: KindName
  std: string
  low: string
  high: string
  offset: string
  factor: string
  value: string
  ms: string
  relative: boolean
  bits: string
  /** '': as is usual for the kind. */
  part: (typeof PARTS)[number] | ''
  elements: string
  fraction: string
  indices: string
  tokens: string
  heads: string
  channels: string
  /** Of tokens, heads, channels. */
  share: string
  where: (typeof WHERES)[number]
  revert: boolean
  when: 'next' | 'steps'
  count: string
  steps: string
  microbatches: string
  probability: string
  seed: string
  ranks: string
  layers: string
  /** Of a paired run: steps of each pass, those that are disturbed (from 0), and what is compared. */
  pairSteps: string
  pairSpan: string
  pairPattern: string
  tolerance: string
}

export const EMPTY: Draft = {
  mode: 'disturb',
  pattern: '',
  kind: 'bit-flip',
  std: '0.1',
  low: '0.9',
  high: '1.1',
  offset: '1',
  factor: '2',
  value: '0',
  ms: '100',
  relative: false,
  bits: 'exponent',
  part: '',
  elements: '1',
  fraction: '0.01',
  indices: '0',
  tokens: '',
  heads: '',
  channels: '',
  share: '1',
  where: 'copy',
  revert: false,
  when: 'next',
  count: '1',
  steps: '',
  microbatches: '',
  probability: '1',
  seed: '0',
  ranks: '',
  layers: '',
  pairSteps: '5',
  pairSpan: '0',
  pairPattern: 'layers.*.output',
  tolerance: '0.001',
}

const WORDS: Partial<Record<keyof Draft, readonly string[]>> = {
  mode: MODES,
  kind: KIND_NAMES,
  part: PARTS,
  where: WHERES,
  when: ['next', 'steps'],
}
const LONGEST = 4096

/** What of a draft differs from an empty one; '': nothing. The tap has its own place in the address. */
export function writeDraft(draft: Draft): string {
  const changed = Object.entries(draft).filter(
    ([name, value]) => name !== 'pattern' && value !== EMPTY[name as keyof Draft],
  )
  return changed.length ? JSON.stringify(Object.fromEntries(changed)) : ''
}

/** The way back, from an address that somebody else may have written: what makes no sense is as in an empty one. */
export function readDraft(text: string, pattern: string): Draft {
  const draft: Record<string, unknown> = { ...EMPTY, pattern: pattern.slice(0, LONGEST) }
  for (const [name, value] of Object.entries(objectOf(text))) {
    const usual = EMPTY[name as keyof Draft]
    const words = WORDS[name as keyof Draft]
    if (!Object.hasOwn(EMPTY, name) || typeof value !== typeof usual) continue
    if (words && !words.includes(String(value))) continue
    draft[name] = typeof value === 'string' ? value.slice(0, LONGEST) : value
  }
  return draft as unknown as Draft
}

function objectOf(text: string): object {
  try {
    const found: unknown = JSON.parse(text || '{}')
    return typeof found === 'object' && found !== null ? found : {}
  } catch {
    return {}
  }
}
