/** Values at a step, as text. */

import { counted, shown } from '../../parts/numbers'
import { median } from './outliers'
import { placeUpTo, type Series } from './series'

/** What a series has at a step: `0.5 (0.1 to 0.9), 3 NaN`; of a step that it lacks, at the last one before. */
export function valueText(series: Series, step: number): string {
  const at = placeUpTo(series.step, step)
  if (at < 0) return 'nothing'
  const mean = series.mean[at] ?? null
  const [low, high] = [series.min[at] ?? null, series.max[at] ?? null]
  const nan = series.nan?.[at] ?? 0
  const inf = series.inf?.[at] ?? 0
  const parts: string[] = []
  if (mean !== null)
    parts.push(low === high ? shown(mean) : `${shown(mean)} (${shown(low)} to ${shown(high)})`)
  if (nan) parts.push(`${counted(nan)} NaN`)
  if (inf) parts.push(`${counted(inf)} ${inf === 1 ? 'infinity' : 'infinities'}`)
  return parts.join(', ') || 'no number'
}

/** `step 12`, or `steps 10 to 19` of a bucket of ten. */
export function stepText(step: number, bucketSteps: number, last: number): string {
  const end = Math.min(step + bucketSteps - 1, last)
  return end > step ? `steps ${step} to ${end}` : `step ${step}`
}

/** What many series have at a step, taken together. */
export function othersText(all: readonly Series[], step: number): string {
  const found: number[] = []
  for (const series of all) {
    const mean = series.mean[placeUpTo(series.step, step)]
    if (typeof mean === 'number') found.push(mean)
  }
  if (!found.length) return 'nothing'
  const low = found.reduce((a, b) => Math.min(a, b))
  const high = found.reduce((a, b) => Math.max(a, b))
  return `median ${shown(median(found))} (${shown(low)} to ${shown(high)})`
}
