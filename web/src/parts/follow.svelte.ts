/** Frames of a tensor from one of its ranks, so that the live edge advances as soon as there is a new step. */

import type { Services } from '../state/services'

/** To be called while a component is set up. `tap` empty: nothing to follow. */
export function follow(
  { server, time }: Pick<Services, 'server' | 'time'>,
  tap: () => { pattern: string; what: string; rank: number | undefined } | null,
): void {
  const wanted = $derived(time.isLive ? JSON.stringify(tap()) : 'null')
  $effect(() => {
    const found = JSON.parse(wanted) as ReturnType<typeof tap>
    if (!found?.pattern) return
    const { rank, ...wish } = found
    return server.live.want({ ...wish, ...(rank === undefined ? {} : { ranks: [rank] }) })
  })
}
