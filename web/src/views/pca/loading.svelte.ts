/** What was recorded of principal components in the run that is shown, as far as it is needed. */

import type { Frame } from '../../api/frames'
import { follow } from '../../parts/follow.svelte'
import { ShownSteps } from '../../parts/shownSteps.svelte'
import { resource } from '../../state/resource.svelte'
import type { Services } from '../../state/services'
import { familyOf } from './clouds'

const WHAT = 'pca'
/** Steps of a trajectory. */
const COLUMNS = 64
/** Layers that are asked for at a time. */
const TOGETHER = 6

export type Over = 'nothing' | 'layers' | 'steps'

/** To be called while a component is set up. */
export function components(services: Services) {
  const { api, address, time } = services
  const shown = new ShownSteps(services, COLUMNS)
  const over = $derived(address.word<Over>('pca.over', ['nothing', 'layers', 'steps'], 'nothing'))
  const texts = resource(
    () => (time.run ? { run: time.run, bytes: time.isLive ? 0 : (time.about?.bytes ?? 0) } : null),
    ({ run }, signal) => api.get('/runs/{run}/text', { run }, signal),
  )
  const taps = resource(
    () => (time.run ? { run: time.run, last: names().length ? null : time.last } : null),
    ({ run }, signal) => api.get('/runs/{run}/taps', { run }, signal),
  )
  const tap = $derived(address.text('tap') || usual(names()))
  const family = $derived(familyOf(tap, names()))
  const known = $derived(names().includes(tap))
  const steps = resource(
    () => (known ? { run: time.run, tap, last: time.last } : null),
    ({ run, tap: of }, signal) => api.get('/runs/{run}/steps', { run, tap: of, what: WHAT }, signal),
  )
  const step = $derived.by(() => {
    const { value, of } = steps
    if (!value || of?.run !== time.run || of.tap !== tap || time.step === null) return null
    return value.steps.findLast((one) => one <= time.step!) ?? null
  })
  const first = $derived(steps.of?.run === time.run ? steps.value?.steps[0] : undefined)
  /** A list of frames for each cloud. */
  const frames = resource(
    () => {
      if (!known || step === null) return null
      const of = { run: time.run, over, taps: over === 'layers' ? family : [tap] }
      return over === 'steps'
        ? { ...of, step: -1, first: shown.first, last: shown.last, filled: shown.filled }
        : { ...of, step, first: undefined, last: undefined, filled: -1 }
    },
    async (wanted, signal) => {
      const { run, taps: of } = wanted
      if (wanted.over === 'steps') {
        const query = { run, tap: of[0]!, what: WHAT, whole: true, buckets: COLUMNS } as const
        const range = { first: wanted.first, last: wanted.last }
        return byStep((await api.frames('/runs/{run}/film', { ...query, ...range }, signal)).frames)
      }
      const found: Frame[][] = []
      for (let at = 0; at < of.length; at += TOGETHER) {
        const some = of.slice(at, at + TOGETHER).map((name) => atStep(run, name, wanted.step, signal))
        found.push(...(await Promise.all(some)))
      }
      return found
    },
  )

  function names(): string[] {
    if (taps.of?.run !== time.run) return []
    return (taps.value?.taps ?? []).filter((one) => one.what.includes(WHAT)).map((one) => one.name)
  }

  async function atStep(run: string, of: string, at: number, signal: AbortSignal): Promise<Frame[]> {
    return (await api.frames('/runs/{run}/pca', { run, tap: of, step: at, whole: true }, signal)).frames
  }

  follow(services, () => (known ? { pattern: tap, what: WHAT, rank: undefined } : null))

  return {
    taps,
    frames,
    shown,
    get over(): Over {
      return over
    },
    get tap(): string {
      return tap
    },
    get family(): string[] {
      return family
    },
    /** There are components of the tensor. */
    get known(): boolean {
      return known
    },
    /** The last step up to the one to be shown; null: they begin later, or are not loaded. */
    get step(): number | null {
      return step
    },
    get first(): number | undefined {
      return first
    },
    /** Texts of the tokens by position, of a generation. */
    get texts(): readonly string[] {
      return texts.of?.run === time.run ? (texts.value?.tokens ?? []) : []
    },
  }
}

function byStep(frames: readonly Frame[]): Frame[][] {
  const found = new Map<number, Frame[]>()
  for (const frame of frames) found.set(frame.step, [...(found.get(frame.step) ?? []), frame])
  return [...found].toSorted(([a], [b]) => a - b).map(([, of]) => of)
}

/** An output of a layer in the middle, if there is one. */
function usual(names: readonly string[]): string {
  const outputs = names.filter((name) => /^layers\.\d+\.output$/.test(name))
  return outputs[outputs.length >> 1] ?? names[0] ?? ''
}
