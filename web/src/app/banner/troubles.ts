/** What of scope does not run as it was asked to, each in a few words. */

import type { Status } from '../../state/server.svelte'

const MOST_NAMES = 4

export function troublesOf(status: Status | null): string[] {
  if (status?.state !== 'live') return []
  const found: string[] = []
  const wishes = Object.entries(status.subscriptions ?? {})
  for (const [state, words] of [
    ['paused', 'paused'],
    ['failed', 'failed on a rank'],
  ] as const) {
    const names = wishes.filter(([, about]) => about['state'] === state).map(([id]) => id)
    if (names.length) found.push(`${counted(names.length, 'subscription')} ${words}: ${listed(names)}`)
  }
  const missing = status.missing ?? []
  if (missing.length) found.push(`nothing is heard of rank ${listed(missing.map(String))}`)
  const recording = (status['recording'] ?? null) as { failed?: unknown } | null
  if (recording?.failed) found.push(`nothing is recorded any more: ${String(recording.failed)}`)
  return found
}

function counted(count: number, what: string): string {
  return `${count} ${what}${count === 1 ? '' : 's'}`
}

function listed(names: readonly string[]): string {
  const more = names.length > MOST_NAMES ? ` and ${names.length - MOST_NAMES} more` : ''
  return names.slice(0, MOST_NAMES).join(', ') + more
}
