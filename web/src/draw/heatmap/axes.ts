/** Labelled axes: which labels there are, and how much room they need. */
import { widest } from './measure'
import { sampled, shortened, ticks, type Tick } from './ticks'

/** Of labels of rows; the whole of a longer one is in the read-out. */
const LONGEST = 28

/** Rows of labels are so far apart at least, and columns so much farther than the widest label. */
const LINE = 15
const GAP = 14

/** Of a label. */
const HIGH = 12

export interface Axis {
  readonly count: number
  label(index: number): string
  readonly title: string
  /** What it counts, where that is not its places: the label of a round one is shown. */
  number?(index: number): number | null
}

export interface LabelledTick extends Tick {
  readonly text: string
}

export interface RowTick extends LabelledTick {
  /** Where the label's middle is: at the ends it does not stick out of the map. */
  readonly y: number
}

/** CSS pixels that the labels of an axis take; the same wherever one is in it. */
export function roomOf(axis: Axis): number {
  return Math.ceil(widest(sampled(axis.count).map((index) => shortened(axis.label(index), LONGEST))))
}

export function rowTicks(axis: Axis, start: number, length: number, pixels: number): RowTick[] {
  const found: RowTick[] = []
  for (const tick of labelled(axis, ticks(start, length, pixels, axis.count, LINE))) {
    const y = Math.max(HIGH / 2, Math.min(pixels - HIGH / 2, tick.at))
    const before = found.at(-1)
    if (before === undefined || y - before.y >= HIGH) found.push({ ...tick, y })
  }
  return found
}

/** `room` is what {@link roomOf} says. */
export function columnTicks(
  axis: Axis,
  room: number,
  start: number,
  length: number,
  pixels: number,
): LabelledTick[] {
  return labelled(axis, ticks(start, length, pixels, axis.count, room + GAP, axis.number))
}

function labelled(axis: Axis, at: readonly Tick[]): LabelledTick[] {
  return at.map((tick) => ({ ...tick, text: shortened(axis.label(tick.index), LONGEST) }))
}
