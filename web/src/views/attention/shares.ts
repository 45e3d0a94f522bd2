/** How a query spreads its attention, who looks at a key, and what sums a head up. Pure. */

import { placeOf, type AttentionMap, type Grid, type Span } from './map'

/** Attention along one side of a grid. */
export interface Shares {
  /** The queries (or keys) that were picked: more than one where they are a tile. */
  readonly picked: Span
  /** Of each place on the other side: its share; of tiles, the share of all its keys, or the mean of its queries'. */
  readonly values: Float64Array
  /** 1 where nothing can be. */
  readonly missing: Uint8Array
  readonly spans: readonly Span[]
}

/** How the queries at a position spread their attention over the keys; null: nothing is known of them. `grid`: of means. */
export function rowShares(grid: Grid, position: number): Shares | null {
  const row = placeOf(grid.queries, position)
  if (row < 0) return null
  const from = row * grid.columns
  return {
    picked: grid.queries[row] as Span,
    spans: grid.keys,
    values: Float64Array.from(
      grid.keys,
      (span, column) => (grid.values[from + column] as number) * long(span),
    ),
    missing: grid.missing.subarray(from, from + grid.columns),
  }
}

/** How much each query gives to the keys at a position. */
export function columnShares(grid: Grid, position: number): Shares | null {
  const column = placeOf(grid.keys, position)
  if (column < 0) return null
  const picked = grid.keys[column] as Span
  return {
    picked,
    spans: grid.queries,
    values: Float64Array.from(
      grid.queries,
      (_, row) => (grid.values[row * grid.columns + column] as number) * long(picked),
    ),
    missing: Uint8Array.from(grid.queries, (_, row) => grid.missing[row * grid.columns + column] as number),
  }
}

function long([first, last]: Span): number {
  return last - first + 1
}

/** Entropy (nats) and mass on the first key, mean of the queries of a span; null: none of them is known. */
export function ofRow(
  map: AttentionMap,
  head: number,
  [first, last]: Span,
): { entropy: number; first: number } | null {
  const places = map.queries.flatMap((at, index) => (at >= first && at <= last ? [index] : []))
  if (!places.length) return null
  const from = head * map.queries.length
  const mean = (values: ArrayLike<number>): number =>
    places.reduce((sum, place) => sum + (values[from + place] as number), 0) / places.length
  return { entropy: mean(map.entropy), first: mean(map.first) }
}

/** What each key gets of the attention of all queries: all together it is 1. */
export function receivedShares(map: AttentionMap, head: number): Float64Array {
  const from = head * map.keys.length
  const all = map.summed || 1
  return Float64Array.from(map.keys, (_, place) => (map.received[from + place] as number) / all)
}

export interface HeadSummary {
  readonly head: number
  /** Of its queries, in nats, and the share that the first key gets. Of queries that see more than one key. */
  readonly entropy: number
  readonly sink: number
}

/** Means over queries; those that see one key only would say nothing, and are left out where there are others. */
export function summaries(map: AttentionMap): HeadSummary[] {
  const q = map.queries.length
  const start = map.keys[0] ?? 0
  const telling = map.queries.flatMap((at, index) => (map.causal && at <= start ? [] : [index]))
  const places = telling.length ? telling : map.queries.map((_, index) => index)
  return map.heads.map((head, index) => {
    const mean = (values: ArrayLike<number>): number =>
      places.reduce((sum, place) => sum + (values[index * q + place] as number), 0) / places.length
    return { head, entropy: mean(map.entropy), sink: mean(map.first) }
  })
}

/** The places of the largest shares, the largest first; none that is 0. */
export function largest(shares: Shares, most: number): number[] {
  const { values } = shares
  return Array.from(values.keys())
    .filter((at) => (values[at] as number) > 0)
    .sort((a, b) => (values[b] as number) - (values[a] as number))
    .slice(0, most)
}
