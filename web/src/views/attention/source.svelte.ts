/** Attention at the step shown, from the server: what was recorded, the frame that is meant, and its map. */

import { choicesOf } from '../../parts/frameChoice'
import { resource } from '../../state/resource.svelte'
import type { Services } from '../../state/services'
import { probesOf } from '../text/probes'
import type { Look } from './look'
import { mapOf, type AttentionMap } from './map'
import { probeOf, withPrompt } from './probe'
import { isOneRow, stacked } from './stack'

export const PATTERN = 'layers.*.attention.map'
const WHAT = 'attention'
/** The tensors of a job that runs are listed anew so often at most. */
const LIST_MS = 1000
/** Rows of earlier steps of a generated text; with more of them, the newest are shown. */
const MOST_ROWS = 512

export function tapOf(layer: number): string {
  return `layers.${layer}.attention.map`
}

export type Read = { map: AttentionMap; error: null } | { map: null; error: string }

/** To be called while a component is set up. */
export function attentionSource({ api, address, server, time }: Services, look: Look) {
  /** What is recorded of a job that runs may become more. */
  const age = (): number | null => (time.isLive ? time.last : null)
  const taps = resource(
    () => (time.run ? { run: time.run, age: age() } : null),
    ({ run }, signal) => api.get('/runs/{run}/taps', { run, pattern: PATTERN }, signal),
    { pause: LIST_MS },
  )
  const recorded = $derived(
    (taps.of?.run === time.run ? (taps.value?.taps ?? []) : [])
      .filter((tap) => tap.what.includes(WHAT))
      .map((tap) => ({ ...tap, layer: layerOf(tap.name) })),
  )
  const rank = $derived(address.whole('rank'))
  const layer = $derived.by(() => {
    const here = recorded.find((tap) => rank === null || tap.ranks.includes(rank)) ?? recorded[0]
    return address.whole('layer') ?? here?.layer ?? (taps.value ? 0 : null)
  })
  const layers = $derived(
    [...new Set([...recorded.map((tap) => tap.layer), layer ?? 0])].sort((a, b) => a - b),
  )
  const isRecorded = $derived(recorded.some((tap) => tap.layer === layer))
  const ranks = $derived(recorded.find((tap) => tap.layer === layer)?.ranks ?? [])

  const frames = resource(
    () =>
      time.run && isRecorded && layer !== null && time.step !== null
        ? { run: time.run, layer, step: time.step, rank }
        : null,
    ({ run, layer: of, step, rank: only }, signal) =>
      api.frames(
        '/runs/{run}/attention',
        { run, tap: tapOf(of), step, whole: only === null, ranks: only === null ? undefined : String(only) },
        signal,
      ),
  )
  // Each by itself: what else changes in the address must not have maps made anew.
  const microbatch = $derived(address.whole('mb'))
  const data = $derived(address.whole('attention.data'))
  const subscription = $derived(address.text('attention.sub'))
  const single = $derived(look.single)
  const choices = $derived(choicesOf(frames.value?.frames ?? [], { microbatch, data, subscription }))
  const probe = $derived(probeOf(choices.frame))
  /** What a recording says of probes that are over. */
  const notices = resource(
    () => (time.run && probe && !server.status?.probes?.[probe] ? { run: time.run, probe } : null),
    ({ run }, signal) => api.get('/runs/{run}/notices', { run }, signal),
  )
  const own = $derived.by((): Read | null => {
    const { frame } = choices
    if (!frame) return null
    const asked = probe ? probesOf(server.status?.probes, notices.value?.notices ?? []).get(probe) : undefined
    return read(() => withPrompt(mapOf(frame), asked))
  })
  const oneRow = $derived(own?.map ? isOneRow(own.map) : false)

  const earlier = resource(
    () =>
      oneRow && !single && frames.of && frames.value?.step
        ? { run: frames.of.run, layer: frames.of.layer, last: frames.value.step, first: time.first ?? 0 }
        : null,
    async ({ run, layer: of, last, first }, signal) => {
      const from = Math.max(first, last - MOST_ROWS)
      const range = { first: from, last: last - 1, buckets: MOST_ROWS }
      const film = await api.frames(
        '/runs/{run}/film',
        { run, tap: tapOf(of), what: WHAT, whole: true, ...range },
        signal,
      )
      return film.frames.map(mapOf)
    },
    { pause: 200 },
  )
  const shown = $derived.by((): Read | null => {
    const before = earlier.value
    if (!own?.map || !oneRow || single || !before || earlier.of?.layer !== frames.of?.layer) return own
    return { map: stacked([...before, own.map]) ?? own.map, error: null }
  })

  return {
    frames,
    taps,
    earlier,
    get layer() {
      return layer
    },
    /** Of any layer, at whatever step. */
    get isAny() {
      return recorded.length > 0
    },
    get layers() {
      return layers
    },
    get ranks() {
      return ranks
    },
    get choices() {
      return choices
    },
    /** A generated text, whose rows are in a step each. */
    get oneRow() {
      return oneRow
    },
    get shown() {
      return shown
    },
  }
}

function layerOf(tap: string): number {
  return Number(tap.split('.')[1])
}

function read(make: () => AttentionMap): Read {
  try {
    return { map: make(), error: null }
  } catch (error) {
    return { map: null, error: error instanceof RangeError ? error.message : String(error) }
  }
}
