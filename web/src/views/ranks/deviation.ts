/** How far a rank is from its peers: those that compute the same of other data. */

import { median } from '../../draw/series/outliers'
import type { Coordinates } from './layout'

export interface RankValue {
  rank: number
  coordinates: Coordinates
  value: number | null
  nan: number
  inf: number
  /** Of which tensor. */
  tap: string
}

export interface Peers {
  /** In deviations of the peers; null: the rank has no value. */
  deviations: (number | null)[]
  /** Which peers they are. */
  what: string
}

/** Fewer say nothing of what is usual. */
const FEWEST = 4
const NORMAL = 1.4826
/** What float32 can tell apart, of the size of the value. */
const SMALLEST = 1e-6

const GROUPINGS: readonly { axes: readonly string[]; what: string }[] = [
  { axes: ['pp', 'tp', 'cp', 'ep'], what: 'the ranks of the same stage and shard (over dp)' },
  { axes: ['pp'], what: 'the ranks of the same stage' },
  { axes: [], what: 'all ranks' },
]

/** By the first grouping in which every rank has enough peers. */
export function deviationsOf(ranks: readonly RankValue[]): Peers {
  for (const { axes, what } of GROUPINGS) {
    const groups = grouped(ranks, axes)
    if (axes.length && [...groups.values()].some((members) => members.length < FEWEST)) continue
    const deviations: (number | null)[] = ranks.map(() => null)
    for (const members of groups.values()) {
      const found = deviationsIn(members.map((at) => ranks[at]!.value))
      members.forEach((at, place) => (deviations[at] = found[place]!))
    }
    return { deviations, what }
  }
  return { deviations: ranks.map(() => null), what: 'all ranks' }
}

function grouped(ranks: readonly RankValue[], axes: readonly string[]): Map<string, number[]> {
  const groups = new Map<string, number[]>()
  ranks.forEach(({ coordinates, tap }, at) => {
    const key = [tap, ...axes.map((axis) => coordinates[axis])].join()
    const members = groups.get(key)
    if (members) members.push(at)
    else groups.set(key, [at])
  })
  return groups
}

function deviationsIn(values: readonly (number | null)[]): (number | null)[] {
  const known = values.filter((value): value is number => value !== null)
  if (!known.length) return values.map(() => null)
  const centre = median(known)
  const usual = NORMAL * median(known.map((value) => Math.abs(value - centre)))
  const unit = Math.max(usual, Math.abs(centre) * SMALLEST, Number.MIN_VALUE)
  return values.map((value) => (value === null ? null : (value - centre) / unit))
}

/** Fewer deviations than that are nothing unusual. */
export const USUAL = 4

/** Ranks unlike their peers, places in `ranks`: those with NaN or infinities, then the farthest; at most so many. */
export function unlike(
  ranks: readonly RankValue[],
  deviations: readonly (number | null)[],
  most: number,
): number[] {
  const ill = (at: number): number => (ranks[at]!.nan || ranks[at]!.inf ? 1 : 0)
  const far = (at: number): number => Math.abs(deviations[at] ?? 0)
  return [...ranks.keys()]
    .filter((at) => ill(at) || far(at) > USUAL)
    .sort((a, b) => ill(b) - ill(a) || far(b) - far(a) || a - b)
    .slice(0, most)
}
