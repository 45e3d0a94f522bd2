/** Two runs side by side: which go together, where they part, and by how much. Pure. */

import type { Answer } from '../../api/client'
import { numbersOf, type Frame } from '../../api/frames'
import type { FloatCells } from '../../draw/heatmap/encode'
import type { Run } from '../../state/server.svelte'

export type Compared = Answer<'/compare'>
export type Parted = Answer<'/compare/taps'>['taps'][number]

const LABELS = ['clean', 'disturbed']

/** Runs that another can be compared with, the newest first. */
export function others(runs: readonly Run[], shown: string): Run[] {
  return runs
    .filter((run) => run.name !== shown && !run.error && run.last_step !== null)
    .toSorted((a, b) => b.unix_ns - a.unix_ns)
}

/** The one that is compared unless another is chosen: clean with disturbed, else of the same directory, else the newest. */
export function proposed(runs: readonly Run[], shown: Run | null): Run | null {
  const listed = others(runs, shown?.name ?? '')
  const beside = listed.filter((run) => run.directory === shown?.directory)
  const counterpart = LABELS.find((label) => label !== shown?.label)
  const paired =
    shown && LABELS.includes(shown.label) ? beside.find((run) => run.label === counterpart) : undefined
  return paired ?? beside[0] ?? listed[0] ?? null
}

/**
 * Those that part, in the order in which they do; then those that do not. Of one step in the order of the model, and
 * gradients behind what goes forward: they follow from it.
 */
export function inOrder(taps: readonly Parted[]): Parted[] {
  const forward = (one: Parted): number => Number(one.tap.endsWith('.grad'))
  return taps
    .filter((one) => one.steps > 0)
    .toSorted((a, b) => (a.parts_at ?? Infinity) - (b.parts_at ?? Infinity) || forward(a) - forward(b))
}

/** Of these the tensor whose name begins most like another's. */
export function closest(names: readonly string[], tap: string): string {
  const common = (name: string): number => {
    let length = 0
    while (length < tap.length && name[length] === tap[length]) length++
    return length
  }
  return names.reduce((best, name) => (common(name) > common(best) ? name : best), names[0] ?? '')
}

/** A tolerance as it is typed; null: none that the server takes. */
export function toleranceOf(text: string): string | null {
  const typed = text.trim() || '0'
  const value = Number(typed)
  return /^[0-9.eE+-]{1,24}$/.test(typed) && Number.isFinite(value) && value >= 0 ? typed : null
}

/** What a comparison of one tensor comes to, in a sentence. */
export function summary(found: Compared): string {
  const steps = `${found.steps} ${found.steps === 1 ? 'step' : 'steps'} that both have`
  const left = leftOut(found.unfinished)
  if (found.parts_at === null) return `Alike in all of the ${steps}.${left}`
  return `They part at step ${found.parts_at}, and differ in ${found.steps_apart} of the ${steps}.${left}`
}

/** That the last steps are not compared; empty where all are. */
export function leftOut(unfinished: number): string {
  if (!unfinished) return ''
  return unfinished === 1
    ? ' The last step is left out: one of the runs lacks a part of it.'
    : ` The last ${unfinished} steps are left out: one of the runs lacks a part of them.`
}

const LEVELS = 253
const INFINITE = 254

/** What the tiles of a frame stand for, and how far apart two neighbouring levels are. */
export function valuesOf(frame: Frame): { values: Float32Array | Float64Array; level: number } {
  const [low = 0, high = 0] = frame.arrays['scale'] ? numbersOf(frame, 'scale') : []
  const level = (high - low) / LEVELS
  if (frame.arrays['values']) return { values: numbersOf(frame, 'values'), level }
  const values = Float32Array.from(numbersOf(frame, 'tiles'), (byte) => {
    if (byte > INFINITE) return NaN
    return byte === INFINITE ? Infinity : low + level * byte
  })
  return { values, level }
}

export interface Between {
  readonly cells: FloatCells
  /** Differences that are not above it cannot be told from none, and are 0 in the cells: tiles are rounded. */
  readonly resolution: number
}

/** The cells of the second minus those of the first; RangeError, in a line, where they do not fit together. */
export function difference(a: Frame, b: Frame): Between {
  const [shape, other] = [gridOf(a), gridOf(b)]
  if (shape.join() !== other.join())
    throw new RangeError(`They are of other shapes: ${shape.join(' × ')} and ${other.join(' × ')}`)
  const [of, from] = [valuesOf(a), valuesOf(b)]
  const resolution = (of.level + from.level) / 2
  const values = Float64Array.from(from.values, (value, at) => {
    const between = minus(value, of.values[at] as number)
    return Math.abs(between) <= resolution ? 0 : between
  })
  return { cells: { rows: shape[0], columns: shape[1], values }, resolution }
}

/** NaN and infinities differ from anything but themselves. */
function minus(value: number, from: number): number {
  return Object.is(value, from) ? 0 : value - from
}

function gridOf(frame: Frame): [rows: number, columns: number] {
  const [rows, columns] = (frame.arrays['values'] ?? frame.arrays['tiles'])?.shape ?? []
  if (rows === undefined || columns === undefined) throw new RangeError(`${frame.tap}: these are no tiles`)
  return [rows, columns]
}

/** How many cells differ, and by how much at most. */
export function extentOf({ values }: FloatCells): { differ: number; largest: number } {
  let differ = 0
  let largest = 0
  for (const value of values) {
    if (value === 0) continue
    differ++
    if (Math.abs(value) > largest || Number.isNaN(value)) largest = Math.abs(value)
  }
  return { differ, largest }
}

/** Rows of a table of what the charts show. */
export function tableOf({ step, a, b, difference: between }: Compared): (number | null)[][] {
  return step.map((first, at) => [
    first,
    a.mean[at] ?? null,
    b.mean[at] ?? null,
    between.min[at] ?? null,
    between.max[at] ?? null,
  ])
}
