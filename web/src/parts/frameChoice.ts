/** Which of the frames of a tensor at a step is shown: of which microbatch, part of the data and subscription. Pure. */

import type { Frame } from '../api/frames'

/** What was chosen; null: the first. */
export interface Wanted {
  readonly microbatch: number | null
  readonly data: number | null
  readonly subscription: string
}

export interface Choices {
  readonly frame: Frame | null
  readonly microbatches: readonly number[]
  /** Indices along the data parallel axis. */
  readonly data: readonly number[]
  readonly subscriptions: readonly string[]
}

const DATA_AXIS = 'dp'

/** The frame that is meant, and what else could be chosen; of what was chosen, as much counts as there is. */
export function choicesOf(frames: readonly Frame[], wanted: Wanted): Choices {
  const subscriptions = distinct(frames.map((frame) => frame.subscription)).sort()
  const ofSubscription = narrowed(
    frames,
    (frame) => frame.subscription === (wanted.subscription || subscriptions[0]),
  )
  const microbatches = distinct(ofSubscription.map((frame) => frame.microbatch)).sort((a, b) => a - b)
  const ofMicrobatch = narrowed(
    ofSubscription,
    (frame) => frame.microbatch === (wanted.microbatch ?? microbatches[0]),
  )
  const data = distinct(ofMicrobatch.flatMap((frame) => dataOf(frame) ?? [])).sort((a, b) => a - b)
  const found = narrowed(ofMicrobatch, (frame) => dataOf(frame) === (wanted.data ?? data[0] ?? null))
  return { frame: found[0] ?? null, microbatches, data, subscriptions }
}

/** Which part of the data a frame is of; null: it has all, or nothing is said. */
export function dataOf(frame: Frame): number | null {
  return frame.shard.find(([axis]) => axis === DATA_AXIS)?.[1] ?? null
}

/** Those that fit, or all where none does. */
function narrowed(frames: readonly Frame[], fits: (frame: Frame) => boolean): readonly Frame[] {
  const found = frames.filter(fits)
  return found.length ? found : frames
}

function distinct<T>(values: readonly T[]): T[] {
  return [...new Set(values)]
}
