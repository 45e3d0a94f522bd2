/** What has happened at which step: perturbations, alarms of watch, findings of scan, what ranks had to say. Pure. */

import type { Notice } from '../../state/server.svelte'
import { placeOf, type Span } from './axis'

export type MarkKind = 'perturbation' | 'alarm' | 'finding' | 'notice'

export interface Mark {
  readonly kind: MarkKind
  readonly step: number
  /** The last step that it concerns; `step` for a moment. */
  readonly last: number
  readonly text: string
}

export const KIND_NAMES: Readonly<Record<MarkKind, string>> = {
  perturbation: 'Disturbed',
  alarm: 'Alarm',
  finding: 'Finding of scan',
  notice: 'Notice',
}

type Json = Readonly<Record<string, unknown>>

export interface Happened {
  /** Lines of the audit log, of all recordings in the directory. */
  readonly audit: readonly Json[]
  readonly notices: readonly Notice[]
  /** Events of watch. */
  readonly events: readonly Json[]
  /** Scan's findings. */
  readonly findings: readonly Json[]
}

/** Notices that are worth a mark: what goes well, or is in the audit log, is not. */
const TOLD: readonly string[] = ['error', 'paused', 'dropped', 'reverted']
const MOST_TEXT = 300

/** All of them within the steps of a recording, in order of their steps. */
export function marksOf(happened: Happened, whole: Span): Mark[] {
  const found = [
    ...perturbations(happened.audit),
    ...happened.events.flatMap(alarm),
    ...happened.findings.flatMap(finding),
    ...notices(happened.notices),
  ]
  return found
    .filter((mark) => mark.last >= whole.first && mark.step <= whole.last)
    .toSorted((a, b) => a.step - b.step || a.text.localeCompare(b.text))
}

/** One for each perturbation, from its first activation to its last. */
function perturbations(audit: readonly Json[]): Mark[] {
  const found = new Map<string, Mark>()
  for (const entry of audit) {
    const step = whole(entry['step'])
    if (step === null || entry['event'] !== 'activated') continue
    const name = text(entry['perturbation'])
    const before = found.get(name)
    found.set(name, {
      kind: 'perturbation',
      step: Math.min(before?.step ?? step, step),
      last: Math.max(before?.last ?? step, step),
      text: before?.text ?? (text(entry['text']) || `${text(entry['kind'])} ${text(entry['tap'])}`.trim()),
    })
  }
  return [...found.values()]
}

function alarm(event: Json): Mark[] {
  const about = typeof event['alarm'] === 'object' ? (event['alarm'] as Json | null) : null
  const step = whole(about?.['since']) ?? whole(event['step'])
  if (step === null || !['alarm', 'hang'].includes(text(event['event']))) return []
  return [{ kind: 'alarm', step, last: step, text: text(event['says']) }]
}

function finding(about: Json): Mark[] {
  const step = whole(about['onset'])
  if (step === null) return []
  const ranks = Array.isArray(about['ranks']) ? about['ranks'].map(Number).filter(Number.isFinite) : []
  const kind = text(about['kind']).replaceAll('_', ' ')
  return [{ kind: 'finding', step, last: step, text: `${onRanks(kind, ranks)} begins` }]
}

/** `slow rank 3`, `slow link, ranks 2, 3`. */
function onRanks(kind: string, ranks: readonly number[]): string {
  if (!ranks.length) return kind
  const listed = `${ranks.slice(0, 8).join(', ')}${ranks.length > 8 ? ', ...' : ''}`
  if (kind.endsWith(' rank')) return `${kind}${ranks.length > 1 ? 's' : ''} ${listed}`
  return `${kind}, rank${ranks.length > 1 ? 's' : ''} ${listed}`
}

/** Of what several ranks say at a step, once. */
function notices(said: readonly Notice[]): Mark[] {
  const found = new Map<string, Mark>()
  for (const notice of said) {
    const step = whole(notice.step)
    if (step === null || !TOLD.includes(notice.kind)) continue
    const words = text(`${notice.kind}: ${notice.text}`)
    found.set(`${step} ${words}`, { kind: 'notice', step, last: step, text: words })
  }
  return [...found.values()]
}

/**
 * Entries of the log that belong to one of several recordings in a directory: those of perturbations of which it has a
 * notice. Of a single recording, all.
 */
export function auditOf(audit: readonly Json[], notices: readonly Notice[], alone: boolean): readonly Json[] {
  if (alone) return audit
  const mine = new Set(notices.map((notice) => text((notice as unknown as Json)['perturbation'])))
  return audit.filter((entry) => mine.has(text(entry['perturbation'])))
}

/** Marks that lie too close together on the axis to be told apart are drawn as one: [share of the axis, marks]. */
export function clusters(marks: readonly Mark[], span: Span, apart: number): [number, Mark[]][] {
  const found: [number, Mark[]][] = []
  for (const mark of marks) {
    const place = placeOf(Math.max(mark.step, span.first), span)
    if (mark.last < span.first || mark.step > span.last) continue
    const before = found.at(-1)
    if (before && place - before[0] < apart) before[1].push(mark)
    else found.push([place, [mark]])
  }
  return found
}

/** The mark before or after a step; null: there is none. */
export function neighbour(marks: readonly Mark[], step: number, direction: 1 | -1): Mark | null {
  const found =
    direction > 0 ? marks.find((mark) => mark.step > step) : marks.findLast((mark) => mark.step < step)
  return found ?? null
}

function whole(value: unknown): number | null {
  return typeof value === 'number' && Number.isSafeInteger(value) && value >= 0 ? value : null
}

/** On one line, of a length that can be read, and without signs that turn or hide what follows. */
function text(value: unknown): string {
  const said = typeof value === 'string' ? value.replace(/[\s\p{Cc}\p{Cf}]+/gu, ' ').trim() : ''
  return said.length > MOST_TEXT ? `${said.slice(0, MOST_TEXT)}…` : said
}
