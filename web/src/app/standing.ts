/** How the connection, the job and scope in it stand, in words. Pure. */

import type { Connection } from '../api/live'
import { bytes, counted, seconds } from '../parts/numbers'
import { quoted } from '../parts/subscriptions/wish'
import type { Beat, Status } from '../state/server.svelte'

export type Tone = 'good' | 'plain' | 'warning' | 'danger'

export interface Words {
  readonly text: string
  /** What it means, and what to do. */
  readonly more: string
  readonly tone: Tone
}

/** `directory`: where the server is found. */
export function connectionWords(connection: Connection, directory: string): Words {
  const words: Record<Connection, Words> = {
    connecting: { text: 'connecting', more: 'The server is asked.', tone: 'plain' },
    open: { text: 'connected', more: 'What the server says is here within a second.', tone: 'good' },
    lost: {
      text: 'not connected',
      more: `It is tried again by itself. If the server was stopped, open a link of another: trimtab scope open ${quoted(directory)}.`,
      tone: 'danger',
    },
    expired: {
      text: 'session over',
      more: `Open a link that is good now: trimtab scope open ${quoted(directory)}.`,
      tone: 'danger',
    },
  }
  return words[connection]
}

/** While the server is not heard of. */
export const UNHEARD: Words = {
  text: 'job unknown',
  more: 'Nothing is heard of the server, which is all that knows it..',
  tone: 'plain',
}

export function jobWords(status: Status | null): Words {
  switch (status?.state) {
    case undefined:
      return { text: 'job unknown', more: 'The server has not said yet.', tone: 'plain' }
    case 'recordings':
      return {
        text: 'recordings only',
        more: 'No job belongs to this server. trimtab scope serve RUN_DIR joins a running one.',
        tone: 'plain',
      }
    case 'waiting':
      return {
        text: 'waiting for the job',
        more: 'No rank has come yet. Once the job begins in this run directory it is joined by itself.',
        tone: 'plain',
      }
    case 'live':
      return missing(status)
    case 'ended':
      return {
        text: 'job ended',
        more: 'Its recording stays, and can be scrubbed and played.',
        tone: 'plain',
      }
    case 'away':
      return {
        text: 'job away',
        more: `${status.error || 'Its collector does not answer'}. It is tried again by itself.`,
        tone: 'warning',
      }
  }
}

function missing(status: Status): Words {
  const gone = status.missing?.length ?? 0
  if (!gone) return { text: 'job runs', more: 'All ranks are there.', tone: 'good' }
  const which = status.missing?.slice(0, 8).join(', ')
  return {
    text: `${counted(gone)} ${gone === 1 ? 'rank' : 'ranks'} missing`,
    more: `Nothing is heard of rank ${which}${gone > 8 ? ', ...' : ''}. The others are shown.`,
    tone: 'warning',
  }
}

/** What scope costs: the largest share of the training time on any rank; null: nobody has said. */
export function overheadOf(status: Status | null): { readonly share: number; readonly rank: number } | null {
  let worst: { share: number; rank: number } | null = null
  for (const [rank, beat] of Object.entries(status?.ranks ?? {}) as [string, Beat][])
    if (!worst || beat.overhead > worst.share) worst = { share: beat.overhead, rank: Number(rank) }
  return worst
}

export function percent(share: number): string {
  if (share === 0) return '0 %'
  return share < 0.0005 ? '< 0.1 %' : `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`
}

const REASONS: Readonly<Record<string, string>> = {
  budget: 'over the budget',
  lease: 'the collector was away',
  error: 'it failed',
}

export interface Paused {
  readonly id: string
  readonly pattern: string
  readonly why: string
}

/** Subscriptions that some rank does not serve now, and why. */
export function pausedOf(status: Status | null): Paused[] {
  return Object.entries(status?.subscriptions ?? {}).flatMap(([id, about]) => {
    if (about['state'] !== 'paused' && about['state'] !== 'failed') return []
    const states = Object.values((about['states'] ?? {}) as Record<string, string>)
    const why = [...new Set(states.filter((state) => state !== 'active'))].map(
      (state) => REASONS[state] ?? state,
    )
    return [{ id, pattern: String(about['pattern']), why: why.join(', ') || String(about['state']) }]
  })
}

/** Frames that did not come through, by where they were lost. */
export interface Dropped {
  readonly ranks: number
  readonly server: number
  readonly recording: number
  readonly page: number
}

export function droppedOf(status: Status | null, overflowed: number, page: number): Dropped {
  const beats = Object.values(status?.ranks ?? {})
  const recording = (status?.['recording'] as { dropped?: number } | null | undefined)?.dropped ?? 0
  return { ranks: beats.reduce((sum, beat) => sum + beat.dropped, 0), server: overflowed, recording, page }
}

export function total({ ranks, server, recording, page }: Dropped): number {
  return ranks + server + recording + page
}

/** What is being recorded; null: nothing. */
export function recordingWords(status: Status | null): string | null {
  const about = status?.['recording'] as
    { name: string; frames: number; bytes: number; failed: unknown } | null | undefined
  if (!about) return null
  if (about.failed) return `it has failed: ${String(about.failed)}`
  return `${counted(about.frames)} frames, ${bytes(about.bytes)}`
}

/** How long a session lasts yet; null: long. */
export function endsSoon(left: number | null): string | null {
  if (left === null || left >= 900) return null
  return `session ends in ${left < 1 ? '0 s' : seconds(left)}`
}
