/** The form of a subscription: from what is typed to what is asked of the job. */

import type { What, Wish } from '../../parts/subscriptions/wish'
import { readNumbers, readWhole, type Read } from './lists'

export const REDUCTIONS = ['mean', 'absmax', 'rms'] as const

export interface WishDraft {
  pattern: string
  what: What
  every: string
  grid: string
  reduction: (typeof REDUCTIONS)[number]
  rows: string
  tokens: string
  bytes: string
  components: string
  heads: string
  layers: string
  ranks: string
  keep: boolean
}

export const EMPTY_WISH: WishDraft = {
  pattern: 'layers.*.output',
  what: 'statistics',
  every: '1',
  grid: '64x64',
  reduction: 'mean',
  rows: '',
  tokens: '0-7',
  bytes: '1048576',
  components: '3',
  heads: '',
  layers: '',
  ranks: '',
  keep: false,
}

export type WishField = keyof WishDraft
export type WishProblems = Partial<Record<WishField, string>>

/** What each kind takes beside the pattern. */
export const TAKES: Readonly<Record<What, readonly WishField[]>> = {
  statistics: [],
  histogram: [],
  tiles: ['grid', 'reduction'],
  rows: ['rows'],
  tokens: ['tokens'],
  raw: ['bytes'],
  attention: ['grid', 'rows', 'heads'],
  pca: ['components'],
}
const MOST_TILES = 1024
const MOST_RAW_BYTES = 16 << 20
const MOST_COMPONENTS = 16

export function readWish(draft: WishDraft): { wish: Wish | null; problems: WishProblems } {
  const problems: WishProblems = {}
  const take = <T>(field: WishField, read: Read<T>): T | undefined => {
    if (read.problem === undefined) return read.value
    problems[field] = read.problem
    return undefined
  }
  const list = (field: 'heads' | 'layers' | 'ranks'): number[] | undefined =>
    draft[field].trim() ? take(field, readNumbers(draft[field])) : undefined
  if (!draft.pattern.trim()) problems.pattern = 'Say which tensors, for example layers.*.output'
  const parameters: Record<string, unknown> = {}
  for (const field of TAKES[draft.what]) {
    const value = parameter(field, draft, take)
    if (value !== undefined) parameters[field] = value
  }
  const wish: Wish = {
    pattern: draft.pattern.trim(),
    what: draft.what,
    every: take('every', readWhole(draft.every, { low: 1 })) ?? 1,
    parameters,
    heads: list('heads'),
    layers: list('layers'),
    ranks: list('ranks'),
    keep: draft.keep,
  }
  return { wish: Object.keys(problems).length ? null : wish, problems }
}

type Take = <T>(field: WishField, read: Read<T>) => T | undefined

function parameter(field: WishField, draft: WishDraft, take: Take): unknown {
  switch (field) {
    case 'grid':
      return take('grid', readGrid(draft.grid))
    case 'reduction':
      return draft.reduction
    case 'rows':
      if (draft.what === 'attention' && !draft.rows.trim()) return undefined // all of them, as tiles
      return take('rows', readNumbers(draft.rows || '0', { negative: draft.what === 'rows' }))
    case 'tokens':
      return take('tokens', readNumbers(draft.tokens, { negative: true }))
    case 'bytes':
      return take('bytes', readWhole(draft.bytes, { low: 1, high: MOST_RAW_BYTES }))
    case 'components':
      return take('components', readWhole(draft.components, { low: 1, high: MOST_COMPONENTS }))
    default:
      return undefined // heads are no parameter
  }
}

function readGrid(text: string): Read<number[]> {
  const found = /^\s*(\d{1,4})\s*[x×,]\s*(\d{1,4})\s*$/.exec(text)
  const grid = [Number(found?.[1]), Number(found?.[2])]
  if (!grid.every((side) => side >= 1 && side <= MOST_TILES)) {
    return { problem: `Rows x columns, each from 1 to ${MOST_TILES}, such as 64x64` }
  }
  return { value: grid }
}
