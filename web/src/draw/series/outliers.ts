/** Which of many series are unlike the others. */

import type { Series } from './series'
import type { Columns } from './table'

/** So many steps are looked at. */
const LOOKED_AT = 200
/** Away from the median at some step by so many median deviations. */
const UNLIKE = 8
const NORMAL = 1.4826

/** Places of those most unlike the rest, most unlike first; whoever has NaN or infinities that others lack is. */
export function outliers(all: readonly Series[], columns: readonly Columns[], most: number): number[] {
  const scores = new Float64Array(all.length)
  const rows = columns[0]?.mean.length ?? 0
  const stride = Math.max(Math.floor(rows / LOOKED_AT), 1)
  for (let row = 0; row < rows; row += stride) {
    const values = columns.map(({ mean }) => mean[row])
    const known = values.filter((value): value is number => typeof value === 'number')
    if (known.length < 3) continue
    const centre = median(known)
    const deviation = NORMAL * median(known.map((value) => Math.abs(value - centre)))
    const floor = Math.max(deviation, Math.abs(centre) * 1e-6, Number.MIN_VALUE)
    values.forEach((value, at) => {
      if (typeof value === 'number') scores[at] = Math.max(scores[at]!, Math.abs(value - centre) / floor)
    })
  }
  const ill = all.map((series) => some(series.nan) || some(series.inf))
  if (!ill.every(Boolean)) ill.forEach((is, at) => is && (scores[at] = Infinity))
  return [...scores.keys()]
    .filter((at) => scores[at]! > UNLIKE)
    .sort((a, b) => scores[b]! - scores[a]! || a - b)
    .slice(0, most)
}

function some(counts: readonly number[] | undefined): boolean {
  return counts?.some((count) => count > 0) ?? false
}

/** Of at least one number; of an even count the mean of the two in the middle. */
export function median(values: readonly number[]): number {
  const sorted = Float64Array.from(values).sort()
  const middle = sorted.length >> 1
  return sorted.length % 2 ? sorted[middle]! : (sorted[middle - 1]! + sorted[middle]!) / 2
}
