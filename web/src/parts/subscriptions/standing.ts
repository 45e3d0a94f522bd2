/** How a subscription stands with the job, from what the server says once a second. */

import { shown } from '../numbers'
import type { Status } from '../../state/server.svelte'
import type { Wish } from './wish'

export interface Standing {
  id: string
  pattern: string
  what: string
  every: number
  /** From which on. */
  step: number
  ranks: number[]
  matched: string[]
  state: 'active' | 'paused' | 'failed' | 'ended'
  /** By rank, why it is not active there. */
  states: Record<string, string>
  orphaned: boolean
  parameters: Record<string, unknown>
}

/** What is known of one; nothing that a job says is taken to be of the type that it should be. */
export function standingOf(id: string, about: Readonly<Record<string, unknown>>): Standing {
  const when = objectOf(about['when'])
  const state = about['state']
  return {
    id,
    pattern: String(about['pattern'] ?? ''),
    what: String(about['what'] ?? 'statistics'),
    every: Number(when['every'] ?? 1),
    step: Number(about['step'] ?? -1),
    ranks: arrayOf(about['ranks']).map(Number),
    matched: arrayOf(about['matched']).map(String),
    state: state === 'paused' || state === 'failed' || state === 'ended' ? state : 'active',
    states: Object.fromEntries(
      Object.entries(objectOf(about['states'])).map(([rank, why]) => [rank, String(why)]),
    ),
    orphaned: about['orphaned'] === true,
    parameters: objectOf(about['parameters']),
  }
}

/** A subscription that is there already and gives what is wanted. */
export function alreadyThere(status: Status | null, wish: Omit<Wish, 'every'>): Standing | null {
  for (const [id, about] of Object.entries(status?.subscriptions ?? {})) {
    const found = standingOf(id, about)
    const gives = found.pattern === wish.pattern && found.what === wish.what && found.state !== 'ended'
    const same = Object.entries(wish.parameters ?? {}).every(
      ([name, value]) => JSON.stringify(value) === JSON.stringify(found.parameters[name]),
    )
    if (gives && same) return found
  }
  return null
}

const WHY: Readonly<Record<string, string>> = {
  budget: 'over the budget (scope.budget)',
  lease: 'the collector is away',
  error: 'it failed',
}

/** "active", or what is wrong on which ranks. */
export function stateText(standing: Standing): string {
  if (standing.state === 'active') return 'active'
  if (standing.state === 'ended') return 'ended'
  const byReason = new Map<string, string[]>()
  for (const [rank, why] of Object.entries(standing.states)) {
    byReason.set(why, [...(byReason.get(why) ?? []), rank])
  }
  const reasons = [...byReason].map(
    ([why, ranks]) => `${WHY[why] ?? why} on rank${ranks.length === 1 ? '' : 's'} ${listed(ranks)}`,
  )
  return `${standing.state}: ${reasons.join('; ')}`
}

/** Share of the training time that scope takes, on the rank where it is most; null: unknown. */
export function overheadOf(status: Status | null): number | null {
  const shares = Object.values(status?.ranks ?? {}).map((rank) => Number(rank['overhead']))
  const known = shares.filter(Number.isFinite)
  return known.length ? Math.max(...known) : null
}

export function overheadText(status: Status | null): string {
  const share = overheadOf(status)
  return share === null ? '' : `scope takes ${shown(share * 100, 2)} % of the training time now`
}

function listed(ranks: readonly string[], most = 8): string {
  const more = ranks.length > most ? ` and ${ranks.length - most} more` : ''
  return ranks.slice(0, most).join(', ') + more
}

function objectOf(value: unknown): Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
    ? (value as Record<string, unknown>)
    : {}
}

function arrayOf(value: unknown): unknown[] {
  return Array.isArray(value) ? value : []
}
