/** What is asked of a model that trains, see trimtab/scope/probe/spec.py. Pure. */

export interface Prompt {
  text: string
  tokens: readonly number[]
  target: number | null
}

/** A probe as the job knows it, or as it was recorded. */
export interface Probe {
  id: string
  prompts: readonly Prompt[]
  tokenizer: string
  every: number
  last: number | null
  state: string
}

/** What is typed into the form. */
export interface Draft {
  text: string
  as: 'text' | 'ids'
  tokenizer: 'auto' | 'job' | 'bytes'
  target: string
  every: number
  top: number
  all: boolean
}

export const MOST_TOP = 256
const LONGEST_TEXT = 65_536
const HIGHEST_TOKEN = 2 ** 31 - 1

/** Ids of tokens, separated by commas or spaces; null for anything else. */
export function idsOf(text: string): number[] | null {
  const parts = text.trim().split(/[\s,]+/)
  if (!parts.every((part) => /^\d{1,10}$/.test(part))) return null
  const ids = parts.map(Number)
  return ids.every((id) => id <= HIGHEST_TOKEN) ? ids : null
}

/** What is wrong with it, in a line; empty: nothing that can be seen here. */
export function problemOf(draft: Draft): string {
  if (!draft.text.trim() && draft.as === 'ids') return 'Give the ids of some tokens, such as 464, 3139.'
  if (!draft.text) return 'Give a text that the model is to go on from.'
  if (draft.text.length > LONGEST_TEXT) return `A text of at most ${LONGEST_TEXT} characters.`
  if (draft.as === 'ids' && !idsOf(draft.text)) return 'Ids are whole numbers, separated by commas.'
  if (draft.target.trim() && (idsOf(draft.target)?.length ?? 0) !== 1) return 'The expected token is one id.'
  if (!Number.isSafeInteger(draft.every) || draft.every < 1)
    return 'Every so many steps: a whole number from 1 on.'
  if (!Number.isSafeInteger(draft.top) || draft.top < 1 || draft.top > MOST_TOP)
    return `From 1 to ${MOST_TOP} candidates.`
  return ''
}

/** What is posted to `/probes`. */
export function bodyOf(draft: Draft): Record<string, unknown> {
  const target = draft.target.trim() ? (idsOf(draft.target)?.[0] ?? null) : null
  const prompt =
    draft.as === 'ids' ? { text: '', tokens: idsOf(draft.text) ?? [] } : { text: draft.text, tokens: [] }
  return {
    prompts: [{ ...prompt, target }],
    every: draft.every,
    top: draft.top,
    positions: draft.all ? 'all' : 'last',
    tokenizer: draft.tokenizer,
  }
}

/** The same for a terminal; what is typed is quoted for a shell. */
export function commandOf(draft: Draft, directory: string): string {
  const parts = ['trimtab scope probe', quoted(directory)]
  parts.push(
    draft.as === 'ids'
      ? `--ids ${quoted(draft.text || '464,3139')}`
      : `--prompt ${quoted(draft.text || 'TEXT')}`,
  )
  if (draft.as === 'text' && draft.tokenizer !== 'auto') parts.push(`--tokenizer ${draft.tokenizer}`)
  if (draft.target.trim()) parts.push(`--target ${quoted(draft.target.trim())}`)
  if (draft.all) parts.push('--all')
  return [...parts, `--top ${draft.top} --every ${draft.every} --record`].join(' ')
}

function quoted(text: string): string {
  return /^[\w./,-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`
}

/** Probes that are or were there, by id: as the status has them, and as a recording's notices tell of them. */
export function probesOf(
  status: Readonly<Record<string, Record<string, unknown>>> | undefined,
  notices: readonly { kind: string; details?: unknown }[],
): Map<string, Probe> {
  const found = new Map<string, Probe>()
  for (const notice of notices) {
    const details = notice.details as { kind?: unknown; body?: unknown } | null | undefined
    if (notice.kind === 'agreed' && details?.kind === 'probe') add(found, details.body, 'recorded')
  }
  for (const [id, body] of Object.entries(status ?? {}))
    add(found, { ...body, id }, String(body['state'] ?? ''))
  return found
}

function add(found: Map<string, Probe>, body: unknown, state: string): void {
  if (typeof body !== 'object' || body === null) return
  const said = body as Record<string, unknown>
  if (typeof said['id'] !== 'string' || !Array.isArray(said['prompts'])) return
  found.set(said['id'], {
    id: said['id'],
    prompts: said['prompts'].map(promptOf),
    tokenizer: String(said['tokenizer'] ?? 'auto'),
    every: typeof said['every'] === 'number' ? said['every'] : 1,
    last: typeof said['last'] === 'number' ? said['last'] : null,
    state,
  })
}

function promptOf(value: unknown): Prompt {
  const said = (typeof value === 'object' && value !== null ? value : {}) as Record<string, unknown>
  const tokens = Array.isArray(said['tokens']) ? said['tokens'].filter((id) => Number.isSafeInteger(id)) : []
  return {
    text: typeof said['text'] === 'string' ? said['text'] : '',
    tokens: tokens as number[],
    target: typeof said['target'] === 'number' ? said['target'] : null,
  }
}
