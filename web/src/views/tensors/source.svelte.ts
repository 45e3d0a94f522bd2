/** Tensors at the step shown, from the server: which there are, and what was recorded of each. */

import type { Api } from '../../api/client'
import type { Frame } from '../../api/frames'
import { ApiError } from '../../api/client'
import { resource } from '../../state/resource.svelte'
import type { Services } from '../../state/services'
import { KINDS, type Kind } from './picture'
import { layersOf, PARTS, tapName } from './parts'

/** Cards shown at once, of a pattern that means more. */
export const MOST_CARDS = 24
/** Each turn asks for two things of each card: a session may ask a hundred times a second. */
const PAUSE_MS = 250
/** The tensors of a job that runs are listed anew so often at most. */
const LIST_MS = 1000
const NUMBERS = ['statistics', 'histogram'] as const
type What = Kind | (typeof NUMBERS)[number]

export interface Known {
  readonly name: string
  readonly what: readonly string[]
  readonly ranks: readonly number[]
}

/** A card, and what is on it; null: nothing of this kind. */
export interface Loaded {
  readonly tap: string
  readonly kind: Kind | null
  readonly picture: Taken
  readonly numbers: Taken
}

export interface Taken {
  readonly step: number | null
  readonly frames: readonly Frame[]
  /** Why there are none. */
  readonly error: string
}

interface Asked {
  readonly run: string
  readonly step: number
  readonly rank: number | null
}

/** What a tensor may be refused for that the others are not: its name, its size, that it is not there, that it is damaged. */
const OWN = [400, 404, 413, 422]
const NOTHING: Taken = { step: null, frames: [], error: '' }

/** To be called while a component is set up. */
export function tensorSource({ api, address, time }: Services) {
  const rank = $derived(address.whole('rank'))
  const pattern = $derived(address.text('tensors.pattern'))
  const gradient = $derived(address.flag('tensors.grad'))
  /** What is recorded of a job that runs may become more. */
  const age = (): number | null => (time.isLive ? time.last : null)
  const taps = resource(
    () => (time.run ? { run: time.run, age: age() } : null),
    ({ run }, signal) => api.get('/runs/{run}/taps', { run }, signal),
    { pause: LIST_MS },
  )
  const found = resource(
    () => (time.run && pattern ? { run: time.run, pattern } : null),
    ({ run, pattern: wanted }, signal) => api.get('/runs/{run}/taps', { run, pattern: wanted }, signal),
  )
  const recorded = $derived(taps.of?.run === time.run ? (taps.value?.taps ?? []).filter(canBeShown) : [])
  const here = $derived(recorded.filter((tap) => rank === null || tap.ranks.includes(rank)))
  const layers = $derived(layersOf(recorded.map((tap) => tap.name)))
  const layer = $derived(address.whole('layer') ?? layersOf(here.map((tap) => tap.name))[0] ?? layers[0] ?? 0)
  const wanted = $derived.by((): Known[] => {
    if (pattern) return (found.value?.taps ?? []).filter(canBeShown).slice(0, MOST_CARDS)
    const names = PARTS.map((part) => tapName(layer, part, gradient))
    return names.map((name) => recorded.find((tap) => tap.name === name) ?? { name, what: [], ranks: [] })
  })
  const cards = resource(
    () =>
      time.run && time.step !== null && taps.of?.run === time.run
        ? {
            run: time.run,
            step: time.step,
            rank,
            taps: wanted.map((tap) => tap.name),
            kinds: wanted.map((tap) => kindsOf(tap)[0] ?? null),
            numbers: wanted.map((tap) => NUMBERS.find((one) => tap.what.includes(one)) ?? null),
          }
        : null,
    (asked, signal) =>
      Promise.all(
        asked.taps.map(async (tap, at): Promise<Loaded> => {
          const [kind, numbers] = [asked.kinds[at] ?? null, asked.numbers[at] ?? null]
          const [picture, statistics] = await Promise.all([
            kind ? framesOf(api, asked, tap, kind, signal) : NOTHING,
            numbers ? framesOf(api, asked, tap, numbers, signal) : NOTHING,
          ])
          return { tap, kind, picture, numbers: statistics }
        }),
      ),
    { pause: PAUSE_MS },
  )
  return {
    taps,
    found,
    cards,
    get layer() {
      return layer
    },
    get layers() {
      return layers.includes(layer) ? layers : [...layers, layer].sort((a, b) => a - b)
    },
    /** Those that the chosen rank has something of. */
    get layersHere() {
      return layersOf(here.map((tap) => tap.name))
    },
    get recorded() {
      return recorded
    },
    get ranks() {
      return [...new Set(recorded.flatMap((tap) => tap.ranks))].sort((a, b) => a - b)
    },
    /** Of the pattern, how many there are. */
    get matching() {
      return (found.value?.taps ?? []).filter(canBeShown).length
    },
  }
}

function canBeShown(tap: Known): boolean {
  return [...KINDS, ...NUMBERS].some((kind) => tap.what.includes(kind))
}

/** The kinds of frames of a tap that are pictures. */
export function kindsOf(tap: Known | undefined): Kind[] {
  return KINDS.filter((kind) => tap?.what.includes(kind))
}

/** Frames of a tensor; that there are none, or no readable ones, is no failure of the others. */
export async function framesOf(
  api: Api,
  { run, step, rank }: Asked,
  tap: string,
  what: What,
  signal: AbortSignal,
): Promise<Taken> {
  const ranks = rank === null ? undefined : String(rank)
  try {
    const got = await api.frames(
      '/runs/{run}/frames',
      { run, tap, what, step, ranks, whole: rank === null },
      signal,
    )
    const error = got.frames.length || rank === null ? '' : `Rank ${rank} has nothing of it at this step`
    return { ...got, error }
  } catch (error) {
    if (error instanceof ApiError && OWN.includes(error.status)) return { ...NOTHING, error: error.message }
    throw error
  }
}
