/** What the server says of the report's figures, as the parts of the page draw it. */

import type { Answer } from '../../api/client'
import type { FloatCells } from '../../draw/heatmap/encode'
import { timelineOf, type Timeline } from '../../draw/timeline/layout'
import { clean } from './clean'

export type Plots = Answer<'/runs/{run}/report/plots'>
export type HeatPlot = NonNullable<Plots['heatmap']>
export type StepPlot = NonNullable<Plots['timeline']>
export type RankPlot = NonNullable<Plots['by_rank']>
export type TimePlot = NonNullable<Plots['step_time']>

/** Figures that a finding leads to, and their names. */
export const DRAWN = { excess: 'heat map', timeline: 'timeline' } as const
export type Drawn = keyof typeof DRAWN

/** Colours span at least ±10 %, so that noise looks like noise. */
const LEAST_SCALE = 0.1

/** A grid of the excess; what is not known is missing in it. */
export function cellsOf(rows: readonly (readonly (number | null)[])[], columns: number): FloatCells {
  const values = new Float32Array(rows.length * columns)
  const missing = new Uint8Array(values.length)
  rows.forEach((row, at) =>
    row.forEach((value, column) => {
      values[at * columns + column] = value ?? 0
      missing[at * columns + column] = Number(value === null)
    }),
  )
  return { rows: rows.length, columns, values, missing }
}

/** Values with the strongest colours; `largest`: where one that stands out far is not to make all others pale. */
export function scaleOf({ values }: FloatCells, largest = Infinity): [number, number] {
  let most = LEAST_SCALE
  for (const value of values) most = Math.max(most, Math.abs(value))
  most = Math.min(most, largest)
  return [-most, most]
}

/** The steps of a column, in words: `7` or `7–9`. */
export function stepsOf(plot: { first_steps: number[]; last_steps: number[] }, column: number): string {
  const [first, last] = [plot.first_steps[column], plot.last_steps[column]]
  return first === last ? String(first) : `${first}–${last}`
}

/** Column of a step; null: it is in none. */
export function columnOf(plot: { first_steps: number[]; last_steps: number[] }, step: number): number | null {
  const found = plot.first_steps.findIndex(
    (first, at) => first <= step && step <= (plot.last_steps[at] ?? first),
  )
  return found < 0 ? null : found
}

export function stepTimeline(plot: StepPlot): Timeline {
  const { segments, categories } = plot
  const labels = plot.labels.map(clean)
  return timelineOf(
    segments.rank.map((rank, at) => ({
      rank,
      start: segments.start_s[at] ?? 0,
      end: segments.end_s[at] ?? 0,
      category: categories[segments.category[at] ?? 0] ?? 'other',
      label: labels[segments.label[at] ?? 0] ?? '',
    })),
    plot.ranks,
  )
}

export interface Cost {
  rank: number
  lost: number | null
  waited: number | null
}

export const ORDERS = ['lost', 'waited', 'rank'] as const
export type Order = (typeof ORDERS)[number]

/** Excess and waiting of ranks, the most first. */
export function costsOf(plot: RankPlot, order: Order): Cost[] {
  const costs = plot.ranks.map((rank, at) => ({
    rank,
    lost: plot.lost_s[at] ?? null,
    waited: plot.waited_s[at] ?? null,
  }))
  return order === 'rank' ? costs : costs.sort((a, b) => (b[order] ?? 0) - (a[order] ?? 0) || a.rank - b.rank)
}
