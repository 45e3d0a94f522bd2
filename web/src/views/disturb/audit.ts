/** The log of what was disturbed: what ranks have written down, to be read, filtered and exported. */

import { csvOf, type CsvCell } from '../../parts/csv'

export interface Entry {
  unixNs: number
  rank: number
  event: string
  perturbation: string
  step: number
  microbatch: number
  tap: string
  kind: string
  elements: number
  size: number
  indices: unknown[]
  old: unknown[]
  new: unknown[]
  oldBits: string[]
  newBits: string[]
  text: string
}

/** Ranks write what they like: nothing is taken to be of the type that it should be. */
export function entryOf(said: Readonly<Record<string, unknown>>): Entry {
  const number = (name: string): number => (typeof said[name] === 'number' ? said[name] : -1)
  const text = (name: string): string => String(said[name] ?? '')
  const list = (name: string): unknown[] => (Array.isArray(said[name]) ? said[name] : [])
  return {
    unixNs: number('unix_ns'),
    rank: number('rank'),
    event: text('event'),
    perturbation: text('perturbation'),
    step: number('step'),
    microbatch: number('microbatch'),
    tap: text('tap'),
    kind: text('kind'),
    elements: number('elements'),
    size: number('size'),
    indices: list('indices'),
    old: list('old'),
    new: list('new'),
    oldBits: list('old_bits').map(String),
    newBits: list('new_bits').map(String),
    text: text('text'),
  }
}

/** The newest first. */
export function entriesOf(said: readonly unknown[]): Entry[] {
  const known = said.filter((one): one is Record<string, unknown> => typeof one === 'object' && one !== null)
  return known.map(entryOf).reverse()
}

/** Those in which all words occur; `rank:2` and `step:40` name a number exactly. */
export function filtered(entries: readonly Entry[], typed: string): Entry[] {
  const words = typed.toLowerCase().split(/\s+/).filter(Boolean)
  if (!words.length) return [...entries]
  return entries.filter((entry) => {
    const text = `${entry.event} ${entry.perturbation} ${entry.tap} ${entry.kind} ${entry.text}`.toLowerCase()
    return words.every((word) => {
      const exact = /^(rank|step|microbatch):(\d+)$/.exec(word)
      return exact ? entry[exact[1] as 'rank'] === Number(exact[2]) : text.includes(word)
    })
  })
}

/** What the first elements were and became: `0.0376 → 1.28e37 (0x3d1a → 0x7d1a)`. */
export function changesOf(entry: Entry, show: (value: unknown) => string): string[] {
  return entry.old.map((before, index) => {
    const bits = entry.oldBits[index] ? ` (${entry.oldBits[index]} → ${entry.newBits[index] ?? ''})` : ''
    return `[${String(entry.indices[index] ?? '')}] ${show(before)} → ${show(entry.new[index])}${bits}`
  })
}

/** ISO 8601, in UTC. */
export function timeOf(entry: Entry): string {
  const time = new Date(entry.unixNs / 1e6)
  return Number.isNaN(time.getTime()) ? '' : time.toISOString()
}

const COLUMNS = [
  'time',
  'rank',
  'event',
  'perturbation',
  'step',
  'microbatch',
  'tap',
  'kind',
  'elements',
  'size',
  'indices',
  'old',
  'new',
  'old_bits',
  'new_bits',
  'text',
]

/** One number stays a number, which a text that begins with a minus would not. */
function cellOf(list: readonly unknown[]): CsvCell {
  return list.length === 1 && typeof list[0] === 'number' ? list[0] : list.map(String).join(' ')
}

/** A table for spreadsheets, in the order that is shown; lists are separated by spaces. */
export function auditCsv(entries: readonly Entry[]): string {
  const whole = (value: number): CsvCell => (value < 0 ? null : value)
  const rows = entries.map((entry): CsvCell[] => [
    timeOf(entry),
    whole(entry.rank),
    entry.event,
    entry.perturbation,
    whole(entry.step),
    whole(entry.microbatch),
    entry.tap,
    entry.kind,
    whole(entry.elements),
    whole(entry.size),
    ...[entry.indices, entry.old, entry.new, entry.oldBits, entry.newBits].map(cellOf),
    entry.text,
  ])
  return csvOf(COLUMNS, rows)
}
