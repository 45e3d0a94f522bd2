/** What was recorded of next tokens in the run that is shown: the steps there are, and answers as far as they are needed. */

import { ApiError, type Frames } from '../../api/client'
import type { Frame } from '../../api/frames'
import { resource } from '../../state/resource.svelte'
import type { Services } from '../../state/services'
import { answersOf, sourceOf, type Answer, type Source } from './answers'
import type { Written } from './sequence'

const WHAT = 'nexttoken'
/** Steps of a film: every token of a generation, and of training enough to see a course. */
const TOKENS = 4096
/** The next fewer columns, where so many would be too large an answer. */
const FEWER = [256, 64, 16, 4]

/** To be called while a component is set up. */
export function nextTokens({ api, time, server }: Services) {
  const written = resource(
    () => (time.run ? { run: time.run, bytes: time.isLive ? 0 : (time.about?.bytes ?? 0) } : null),
    ({ run }, signal) => api.get('/runs/{run}/text', { run }, signal),
  )
  const taps = resource(
    () => (time.run ? { run: time.run, last: tap() ? null : time.last } : null),
    ({ run }, signal) => api.get('/runs/{run}/taps', { run }, signal),
  )
  const steps = resource(
    () => (tap() ? { run: time.run, tap: tap(), last: time.last } : null),
    ({ run, tap: of }, signal) => api.get('/runs/{run}/steps', { run, tap: of, what: WHAT }, signal),
  )
  const film = resource(
    () => {
      const newest = steps.of?.run === time.run ? steps.value?.steps.at(-1) : undefined
      return newest === undefined ? null : { run: time.run, tap: tap(), newest }
    },
    ({ run, tap: of }, signal) => filmed(run, of, signal),
  )
  /** The step that is to be shown, where the film has left it out. */
  const exact = resource(
    () => {
      const step = upTo(steps.value?.steps ?? [], time.step)
      const missing = step !== null && film.value !== null && !film.value.some((frame) => frame.step === step)
      return missing ? { run: time.run, tap: tap(), step } : null
    },
    ({ run, tap: of, step }, signal) =>
      api.frames('/runs/{run}/nexttoken', { run, tap: of, step, whole: true }, signal),
  )

  /** The tensor of which there are next tokens; empty: of none. */
  function tap(): string {
    if (taps.of?.run !== time.run) return ''
    const found = (taps.value?.taps ?? []).filter((one) => one.what.includes(WHAT)).map((one) => one.name)
    return found.includes('logits') ? 'logits' : (found[0] ?? '')
  }

  async function filmed(run: string, of: string, signal: AbortSignal): Promise<Frame[]> {
    for (const buckets of [TOKENS, ...FEWER]) {
      try {
        const query = { run, tap: of, what: WHAT, whole: true, buckets } as const
        const found: Frames = await api.frames('/runs/{run}/film', query, signal)
        return found.frames
      } catch (error) {
        if (!(error instanceof ApiError) || error.status !== 413 || buckets === FEWER.at(-1)) throw error
      }
    }
    return []
  }

  // Frames announce their step, so that what comes is seen at once.
  $effect(() =>
    time.isLive && Object.keys(server.status?.probes ?? {}).length
      ? server.live.want({ pattern: 'logits', what: WHAT })
      : undefined,
  )

  const frames = $derived([...(film.value ?? []), ...(exact.value?.frames ?? [])])
  const answers: Answer[] = $derived(answersOf(frames))
  const sources: Source[] = $derived([
    ...new Map(frames.map((frame) => [frame.subscription, sourceOf(frame)])).values(),
  ])
  const text: Written = $derived(written.value ?? { prompt_tokens: 0, tokens: [] })

  return {
    taps,
    film,
    tap,
    get answers(): Answer[] {
      return answers
    },
    get sources(): Source[] {
      return sources
    },
    get written(): Written {
      return text
    },
  }
}

function upTo(steps: readonly number[], wanted: number | null): number | null {
  return wanted === null ? null : (steps.findLast((step) => step <= wanted) ?? null)
}
