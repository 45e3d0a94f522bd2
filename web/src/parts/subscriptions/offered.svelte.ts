/** What the running job's model offers, to choose from. To be called while a component is set up. */

import type { Answer } from '../../api/client'
import { resource, type Resource } from '../../state/resource.svelte'
import type { Services } from '../../state/services'
import { ranksText } from '../words'
import { matcherOf } from './pattern'

export type Tap = Answer<'/taps'>['taps'][number]

/** All taps; nothing while no job runs, or its ranks have not shown their model yet: they do in their first step. */
export function offered(
  { api, server }: Pick<Services, 'api' | 'server'>,
  wanted: () => boolean = () => true,
): Resource<Tap[], string> {
  // The status comes once a second: only what follows from it for the taps counts.
  const job = $derived(
    wanted() && server.status?.state === 'live' && Number(server.status.step ?? -1) >= 1
      ? String(server.status['run'])
      : null,
  )
  return resource(
    () => job,
    async (_, signal) => (await api.get('/taps', {}, signal)).taps,
  )
}

/** Those that a pattern means; `problem` says why there are none. */
export function chosenOf(pattern: string, taps: readonly Tap[]): { taps: Tap[]; problem: string } {
  const matches = matcherOf(pattern)
  if (typeof matches === 'string') return { taps: [], problem: matches }
  const found = taps.filter((tap) => matches(tap.name))
  return { taps: found, problem: found.length || !taps.length ? '' : 'No tensor of this job matches' }
}

/** Those whose names hold all words that were typed; of a pattern, the text between its signs counts. */
export function proposalsOf(typed: string, taps: readonly Tap[]): Tap[] {
  const words = typed
    .toLowerCase()
    .split(/[\s*{},[\]]+/)
    .filter(Boolean)
  return taps.filter((tap) => words.every((word) => tap.name.toLowerCase().includes(word)))
}

/** `activation, float32, (32, 1, 64), ranks 0-3`: one tap in words. */
export function tapText(tap: Pick<Tap, 'kind' | 'dtype' | 'shape' | 'ranks'>): string {
  const shape = tap.shape ? `(${tap.shape.join(', ')})` : 'shape not seen yet'
  const ranks = tap.ranks.length > 4 ? `${tap.ranks.length} ranks` : ranksText(tap.ranks)
  return [tap.kind, tap.dtype, shape, ranks].filter(Boolean).join(' · ')
}
