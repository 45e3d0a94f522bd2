/** A subscription as the page asks for it: its kinds, what they take, the command that asks for the same. */

import { bytes as shownBytes } from '../numbers'
import { several } from '../words'

export const WHATS = [
  'statistics',
  'histogram',
  'tiles',
  'rows',
  'tokens',
  'raw',
  'attention',
  'pca',
] as const
export type What = (typeof WHATS)[number]

export interface Wish {
  pattern: string
  what: What
  every: number
  parameters?: Readonly<Record<string, unknown>> | undefined
  heads?: readonly number[] | undefined
  layers?: readonly number[] | undefined
  ranks?: readonly number[] | undefined
  keep?: boolean
}

/** What a kind gives, for people, and how often it is asked for unless said otherwise. */
export const KINDS: Readonly<Record<What, { label: string; about: string; every: number }>> = {
  statistics: { label: 'statistics', about: 'mean, deviation, extremes, NaN and infinities', every: 1 },
  histogram: { label: 'a histogram', about: 'statistics, and how the magnitudes are distributed', every: 5 },
  tiles: { label: 'tiles', about: 'the tensor as a picture of at most grid tiles', every: 10 },
  rows: { label: 'rows', about: 'some rows, exactly', every: 10 },
  tokens: { label: 'tokens', about: 'what some positions of the sequence hold, exactly', every: 10 },
  raw: { label: 'raw values', about: 'the begin of the tensor, element by element', every: 100 },
  attention: { label: 'attention maps', about: 'which token looks at which, of each head', every: 10 },
  pca: { label: 'principal components', about: 'tokens along the axes of largest variance', every: 5 },
}

/** That there is nothing of a kind. */
export function lackText(what: What, pattern: string): string {
  const { label } = KINDS[what]
  const one = label.startsWith('a ')
  return `There ${one ? 'is' : 'are'} no ${one ? label.slice(2) : label} of ${pattern} here`
}

/** Body of POST /subscriptions. */
export function bodyOf(wish: Wish) {
  const body: Record<string, unknown> = {
    pattern: wish.pattern,
    what: wish.what,
    when: { every: wish.every },
    parameters: { ...wish.parameters },
    keep: wish.keep ?? false,
  }
  for (const name of ['layers', 'heads', 'ranks'] as const) {
    const chosen = wish[name]
    if (chosen?.length) body[name] = [...chosen]
  }
  return body
}

/** The command line that asks for the same, and records it. */
export function commandOf(wish: Wish, directory = 'RUN_DIR'): string {
  const words = ['trimtab scope stream', quoted(directory), '--tap', quoted(wish.pattern)]
  words.push('--what', wish.what)
  if (wish.every !== 1) words.push('--every', String(wish.every))
  for (const name of ['layers', 'heads', 'ranks'] as const) {
    const chosen = wish[name]
    if (chosen?.length) words.push(`--${name}`, chosen.join(','))
  }
  for (const [name, value] of Object.entries(wish.parameters ?? {})) {
    const text = optionOf(name, value)
    if (text !== null) words.push(`--${name}=${quoted(text)}`) // it may begin with a minus
  }
  return [...words, '--record'].join(' ')
}

/** What `trimtab scope stream` takes of the parameters. */
const OPTIONS = ['rows', 'tokens', 'grid', 'reduction', 'dims', 'bytes', 'components']

function optionOf(name: string, value: unknown): string | null {
  if (!OPTIONS.includes(name) || value === null || value === undefined) return null
  return Array.isArray(value) ? value.join(name === 'grid' ? 'x' : ',') : String(value)
}

/** As one word of a POSIX shell. */
export function quoted(text: string): string {
  return /^[\w./:=@%+,-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`
}

/** A tap, as far as it says how much is sent of it. */
export interface Sized {
  shape: readonly number[] | null
  dtype: string
  labels: readonly string[]
  heads: readonly number[] | null
}

const ITEM: Readonly<Record<string, number>> = {
  float64: 8,
  float32: 4,
  int64: 8,
  int32: 4,
  bfloat16: 2,
  float16: 2,
}
const STATISTICS_BYTES = 12 * 8
const HISTOGRAM_BYTES = 256 * 8
const RAW_BYTES = 1 << 20
const PCA_TOKENS = 2048

/** Bytes of one frame of a tensor on one rank, about; null: its shape is not known yet. */
export function frameBytes(
  what: What,
  parameters: Readonly<Record<string, unknown>>,
  tap: Sized,
): number | null {
  if (what === 'statistics') return STATISTICS_BYTES
  if (what === 'histogram') return STATISTICS_BYTES + HISTOGRAM_BYTES
  const grid = numbersOf(parameters['grid']) ?? [64, 64]
  const tiles = grid[0]! * grid[1]!
  if (what === 'tiles') return tiles
  if (!tap.shape) return null
  const elements = tap.shape.reduce((size, length) => size * length, 1)
  const item = ITEM[tap.dtype] ?? 1
  const last = tap.shape.at(-1) ?? 1
  const count = (name: string): number => numbersOf(parameters[name])?.length ?? 1
  if (what === 'rows') return count('rows') * last * item
  if (what === 'tokens') {
    const at = tap.labels.findIndex((label) => label === 's' || label === 't')
    return (count('tokens') * elements * item) / (tap.shape[at] ?? elements / last)
  }
  if (what === 'raw') return Math.min(Number(parameters['bytes'] ?? RAW_BYTES), elements * item)
  if (what === 'pca') {
    return Math.min(elements / last, PCA_TOKENS) * Number(parameters['components'] ?? 3) * 4
  }
  const rows = numbersOf(parameters['rows'])
  return (tap.heads?.[1] ?? 1) * (rows ? rows.length * last * 4 : tiles)
}

function numbersOf(value: unknown): number[] | null {
  return Array.isArray(value) && value.length ? value.map(Number) : null
}

/** "12 tensors on 4 ranks, about 4.1 kB each time" of the taps that match; "" for none. */
export function costOf(
  what: What,
  parameters: Readonly<Record<string, unknown>>,
  taps: readonly (Sized & { ranks: readonly number[] })[],
): string {
  if (!taps.length) return ''
  const ranks = new Set(taps.flatMap((tap) => tap.ranks)).size
  let total: number | null = 0
  for (const tap of taps) {
    const one = frameBytes(what, parameters, tap)
    total = one === null || total === null ? null : total + one * tap.ranks.length
  }
  const size = total === null ? '' : `, about ${shownBytes(Math.round(total))} a microbatch`
  return `${several(taps.length, 'tensor')} on ${several(ranks, 'rank')}${size}`
}
