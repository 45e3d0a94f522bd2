/** What this page may do to the job, and what stands in the way. */

import type { Session, Status } from '../../state/server.svelte'

export type Access =
  | 'unknown'
  /** The server belongs to no job. */
  | 'recordings'
  | 'readonly'
  | 'waiting'
  | 'away'
  | 'ended'
  /** The control token has to be shown. */
  | 'locked'
  | 'granted'

export function accessOf(session: Session | null, status: Status | null): Access {
  if (!session || !status) return 'unknown'
  if (!session.attached || status.state === 'recordings') return 'recordings'
  if (!session.allow_perturb) return 'readonly'
  if (status.state !== 'live') return status.state
  return session.control ? 'granted' : 'locked'
}

/** `59 min`, `40 s`. */
export function leftText(seconds: number): string {
  return seconds >= 90 ? `${Math.round(seconds / 60)} min` : `${Math.max(0, Math.round(seconds))} s`
}
