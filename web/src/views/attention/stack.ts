/** A generated text's rows come one a step: those of earlier steps put above the newest. Pure. */

import type { AttentionMap } from './map'

type Floats = Float32Array | Float64Array

/** Does this map have the row of one generated token only, so that earlier ones are in other steps? */
export function isOneRow(map: AttentionMap): boolean {
  return map.exact !== null && map.queries.length === 1 && map.texts.length > 1 && (map.queries[0] ?? 0) > 0
}

/**
 * The rows of all maps in one, of the queries that any of them has; of a query in several the later one counts. Maps of
 * another text, or of other heads, than the last one are left out.
 */
export function stacked(maps: readonly AttentionMap[]): AttentionMap | null {
  const last = maps.at(-1)
  if (!last) return null
  const rows = new Map<number, { map: AttentionMap; row: number }>()
  for (const map of maps) {
    if (map.exact && fits(map, last)) map.queries.forEach((at, row) => rows.set(at, { map, row }))
  }
  const queries = [...rows.keys()].sort((a, b) => a - b)
  const [n, q, k] = [last.heads.length, queries.length, last.keys.length]
  const exact = new Float32Array(n * q * k)
  const entropy = new Float32Array(n * q)
  const first = new Float32Array(n * q)
  const received = new Float32Array(n * k)
  queries.forEach((at, row) => {
    const from = rows.get(at) as { map: AttentionMap; row: number }
    const [oldQ, oldK] = [from.map.queries.length, from.map.keys.length]
    for (let head = 0; head < n; head++) {
      const source = (head * oldQ + from.row) * oldK
      const given = (from.map.exact as Floats).subarray(source, source + oldK)
      exact.set(given, (head * q + row) * k)
      for (let key = 0; key < oldK; key++) received[head * k + key]! += given[key] as number
      entropy[head * q + row] = from.map.entropy[head * oldQ + from.row] as number
      first[head * q + row] = from.map.first[head * oldQ + from.row] as number
    }
  })
  return { ...last, queries, exact, entropy, first, received, summed: q }
}

/** The begin of the same text, seen by the same heads. */
function fits(map: AttentionMap, last: AttentionMap): boolean {
  return (
    map.keys.length <= last.keys.length &&
    map.heads.length === last.heads.length &&
    map.heads.every((head, index) => head === last.heads[index]) &&
    map.keys.every((key, index) => key === last.keys[index]) &&
    map.texts.length > 0 &&
    map.texts.every((text, index) => text === last.texts[index])
  )
}
