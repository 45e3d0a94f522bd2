/** What each line looks like: eight colours, each with dashes of its own, since colour alone tells nobody apart for sure. */

import { seriesColours, type Theme } from '../colours'
import { outliers } from './outliers'
import type { Series } from './series'
import type { Columns } from './table'

/** Lines in colours of their own; of more series those most unlike the rest are among them. */
export const MOST_COLOURED = 8
const MOST_UNLIKE = 5

const DASHES: readonly (readonly number[])[] = [
  [],
  [7, 3],
  [2, 2],
  [9, 3, 2, 3],
  [4, 2],
  [12, 4],
  [2, 5],
  [9, 2, 2, 2, 2, 2],
]

export interface Paint {
  colour: string
  dash: readonly number[]
}

/** The paint of each series; null: one of many, in a muted colour that all of those share. */
export function paints(all: readonly Series[], columns: readonly Columns[], theme: Theme): (Paint | null)[] {
  const chosen = colouredOf(all, columns)
  const colours = seriesColours(theme)
  const found: (Paint | null)[] = all.map(() => null)
  chosen.forEach((at, order) => (found[at] = { colour: colours[order]!, dash: DASHES[order]! }))
  return found
}

function colouredOf(all: readonly Series[], columns: readonly Columns[]): number[] {
  const every = [...all.keys()]
  if (all.length <= MOST_COLOURED) return every
  const main = every.filter((at) => all[at]!.kind === 'main').slice(0, MOST_COLOURED)
  const others = every.filter((at) => !main.includes(at))
  const unlike = outliers(
    others.map((at) => all[at]!),
    others.map((at) => columns[at]!),
    Math.min(MOST_UNLIKE, MOST_COLOURED - main.length),
  )
  return [...main, ...unlike.map((at) => others[at]!)]
}
