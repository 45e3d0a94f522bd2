/** Series of different steps as columns of one table, which is what is drawn. */

import type { Series } from './series'

/** null: the line breaks here; undefined: it goes on, this series has nothing at this step. */
export type Column = (number | null | undefined)[]

export interface Columns {
  min: Column
  max: Column
  mean: Column
}

export interface Table {
  steps: Float64Array
  /** Of each series, in their order. */
  columns: Columns[]
}

/** A hole is so many times wider than the distances on either side of it. */
const HOLE = 3

export function tableOf(all: readonly Series[]): Table {
  const holes = all.map((series) => holesOf(series.step))
  const every = new Set<number>()
  for (const { step } of all) for (const one of step) every.add(one)
  for (const hole of holes) for (const one of hole) every.add(one)
  const steps = Float64Array.from(every).sort()
  const place = new Map<number, number>()
  steps.forEach((step, at) => place.set(step, at))
  return { steps, columns: all.map((series, at) => columnsOf(series, holes[at]!, place)) }
}

function columnsOf(series: Series, holes: readonly number[], place: ReadonlyMap<number, number>): Columns {
  const empty = (): Column => new Array<undefined>(place.size).fill(undefined)
  const columns = { min: empty(), max: empty(), mean: empty() }
  for (const hole of holes) {
    const at = place.get(hole)!
    columns.min[at] = columns.max[at] = columns.mean[at] = null
  }
  series.step.forEach((step, from) => {
    const at = place.get(step)!
    columns.min[at] = series.min[from] ?? null
    columns.max[at] = series.max[from] ?? null
    columns.mean[at] = series.mean[from] ?? null
  })
  return columns
}

/**
 * Steps at which a line is to break: just behind the last step before each hole. How far apart steps usually lie may
 * change within a series (every tenth, then every one), so a distance is compared to those next to it.
 */
export function holesOf(step: readonly number[]): number[] {
  const found: number[] = []
  const distance = (at: number): number => (step[at + 1] ?? NaN) - step[at]!
  for (let at = 0; at + 1 < step.length; at++) {
    const sides = [
      least(distance(at - 1), distance(at - 2)),
      least(distance(at + 1), distance(at + 2)),
    ].filter((side) => Number.isFinite(side))
    const here = distance(at)
    if (sides.length && here > HOLE * Math.max(...sides)) found.push(step[at]! + 1)
  }
  return found
}

/** The smaller one; NaN counts as nothing. */
function least(one: number, other: number): number {
  if (Number.isNaN(one)) return other
  return Number.isNaN(other) ? one : Math.min(one, other)
}
