/** Attention of a layer as a frame has it (see trimtab/scope/attention.py), and its heads as grids. Pure. */

import { numbersOf, type Frame } from '../../api/frames'
import { textsOf } from '../../parts/token'

type Floats = Float32Array | Float64Array

/** Means (or largest) of rectangles of the whole map, as bytes. */
interface Tiles {
  readonly rows: number
  readonly columns: number
  /** First query, or key, of each. */
  readonly queries: readonly number[]
  readonly keys: readonly number[]
  readonly mean: Uint8Array
  readonly meanScale: Floats
  readonly peak: Uint8Array
  readonly peakScale: Floats
}

export interface AttentionMap {
  /** Numbers in the whole model. */
  readonly heads: readonly number[]
  /** Positions in the sequence, ascending: of each query row that something is known of, and of the keys. */
  readonly queries: readonly number[]
  readonly keys: readonly number[]
  /** Of the keys; none: nobody has said them. */
  readonly texts: readonly string[]
  /** [head, query]: nats; and the mass on the first key. */
  readonly entropy: Floats
  readonly first: Floats
  /** [head, key]: mass of all `summed` rows. */
  readonly received: Floats
  readonly summed: number
  /** [head, query, key]; null: there are tiles only. */
  readonly exact: Floats | null
  readonly tiles: Tiles | null
  /** No query sees a later key. */
  readonly causal: boolean
}

/** What a frame says; RangeError, in a line, for one that says something else. */
export function mapOf(frame: Frame): AttentionMap {
  if (!frame.arrays['heads'] && Object.keys(frame.arrays).some((name) => name.includes('@')))
    throw new RangeError('The parts of the ranks do not fit together: choose one rank')
  const heads = whole(frame, 'heads')
  const queries = whole(frame, 'position')
  const keys = whole(frame, 'key_position')
  const [n, q, k] = [heads.length, queries.length, keys.length]
  const exact = frame.arrays['probabilities'] ? sized(frame, 'probabilities', n * q * k) : null
  const tiles = frame.arrays['tiles'] ? tilesOf(frame, n) : null
  if (!exact && !tiles) throw new RangeError('The frame has neither rows nor tiles of a map')
  const texts = textsOf(frame)
  const found = {
    heads,
    queries,
    keys,
    texts: texts.length === k ? texts : [],
    entropy: sized(frame, 'entropy', n * q),
    first: sized(frame, 'first', n * q),
    received: sized(frame, 'received', n * k),
    summed: whole(frame, 'queries')[0] ?? q,
    exact,
    tiles,
  }
  return { ...found, causal: isCausal(found) }
}

function tilesOf(frame: Frame, heads: number): Tiles {
  const queries = whole(frame, 'tile_row')
  const keys = whole(frame, 'tile_key')
  const size = heads * queries.length * keys.length
  return {
    rows: queries.length,
    columns: keys.length,
    queries,
    keys,
    mean: bytes(frame, 'tiles', size),
    meanScale: sized(frame, 'scale', heads),
    peak: bytes(frame, 'peaks', size),
    peakScale: sized(frame, 'peak_scale', heads),
  }
}

/** One head, as it is drawn. */
export interface Grid {
  readonly rows: number
  readonly columns: number
  readonly values: Floats
  /** 1 where no query of the cell may see any of its keys. */
  readonly missing: Uint8Array
  readonly queries: readonly Span[]
  readonly keys: readonly Span[]
  /** Each cell is a probability, no tile. */
  readonly exact: boolean
}

/** Positions of the first and the last one. */
export type Span = readonly [first: number, last: number]

/** The head at a place in `map.heads`; of tiles their means, or the largest in each. */
export function gridOf(map: AttentionMap, head: number, peaks = false): Grid {
  const queries = spans(map.tiles && !map.exact ? map.tiles.queries : map.queries, map.queries, !map.exact)
  const keys = spans(map.tiles && !map.exact ? map.tiles.keys : map.keys, map.keys, !map.exact)
  const size = queries.length * keys.length
  const grid = { rows: queries.length, columns: keys.length, queries, keys, exact: map.exact !== null }
  const values = map.exact
    ? map.exact.subarray(head * size, (head + 1) * size)
    : tileValues(map.tiles as Tiles, head, peaks)
  return { ...grid, values, missing: map.causal ? future(queries, keys) : new Uint8Array(size) }
}

function tileValues(tiles: Tiles, head: number, peaks: boolean): Float32Array {
  const size = tiles.rows * tiles.columns
  const scale = (peaks ? tiles.peakScale : tiles.meanScale)[head] ?? 0
  const levels = (peaks ? tiles.peak : tiles.mean).subarray(head * size, (head + 1) * size)
  return Float32Array.from(levels, (level) => scale * (level / 255) ** 2)
}

function spans(begins: readonly number[], positions: readonly number[], ranges: boolean): Span[] {
  if (!ranges) return begins.map((at) => [at, at])
  const end = positions.at(-1) ?? 0
  return begins.map((at, index) => [at, Math.max(at, (begins[index + 1] ?? end + 1) - 1)])
}

function future(queries: readonly Span[], keys: readonly Span[]): Uint8Array {
  const found = new Uint8Array(queries.length * keys.length)
  queries.forEach(([, last], row) => {
    let column = keys.length
    while (column > 0 && (keys[column - 1] as Span)[0] > last) column--
    found.fill(1, row * keys.length + column, (row + 1) * keys.length)
  })
  return found
}

/** What is masked is exactly 0 in every head; anything else there says that the model looks both ways. */
function isCausal(map: Omit<AttentionMap, 'causal'>): boolean {
  const grid = gridOf({ ...map, causal: true }, 0, true)
  const { missing } = grid
  if (!missing.includes(1)) return true
  for (let head = 0; head < map.heads.length; head++) {
    const { values } = gridOf({ ...map, causal: false }, head, true)
    for (let at = 0; at < missing.length; at++) if (missing[at] && values[at]) return false
  }
  return true
}

/** Where in spans a position lies; -1: in none. */
export function placeOf(all: readonly Span[], position: number): number {
  return all.findIndex(([first, last]) => first <= position && position <= last)
}

function whole(frame: Frame, name: string): number[] {
  return Array.from(numbersOf(frame, name))
}

function sized(frame: Frame, name: string, length: number): Floats {
  const values = numbersOf(frame, name)
  if (values.length !== length)
    throw new RangeError(`${frame.tap}: ${name} has ${values.length} numbers in place of ${length}`)
  return values
}

function bytes(frame: Frame, name: string, length: number): Uint8Array {
  const values = frame.arrays[name]?.values
  if (!(values instanceof Uint8Array) || values.length !== length)
    throw new RangeError(`${frame.tap}: ${name} are no ${length} bytes`)
  return values
}
