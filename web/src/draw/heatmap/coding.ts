/** What the bytes of a heat map stand for. */
import type { Order } from './pool'
import { SPECIALS, type Special } from '../colours'

/** Bytes `first` to `last` are values, the smallest first; the others, where there are any, have no finite value. */
export interface Coding extends Readonly<Record<Special, number | null>> {
  readonly first: number
  readonly last: number
}

/** Numbers quantised here. The larger a byte, the more it is to be seen: missing, values, infinite, NaN. */
export const FLOATS: Coding = { first: 1, last: 253, missing: 0, infinite: 254, nan: 255 }

/** Tiles as ranks send them. */
export const TILES: Coding = { first: 0, last: 253, missing: null, infinite: 254, nan: 255 }

/** Bytes that are values all, as those of attention. */
export const WHOLE: Coding = { first: 0, last: 255, missing: null, infinite: null, nan: null }

export function specialOf(byte: number, coding: Coding): Special | null {
  return SPECIALS.find((special) => coding[special] === byte) ?? null
}

/** Which of several cells on one pixel is drawn: the largest, the smallest, or the farthest from the middle. */
export type Pooling = 'high' | 'low' | 'away'

/**
 * How notable bytes are, the most notable last: missing, values, infinite, NaN. Null where larger bytes are more notable
 * anyhow. Of two values that are as far from the middle, the larger one.
 */
export function notability(pooling: Pooling, coding: Coding): Order | null {
  if (pooling === 'high') return null
  const middle = (coding.first + coding.last) / 2
  const far = (byte: number) => (pooling === 'low' ? -byte : Math.abs(byte - middle) + byte / 1e4)
  const values = Array.from({ length: coding.last - coding.first + 1 }, (_, at) => coding.first + at)
  const [bytes, ranks] = [new Uint8Array(256), new Uint8Array(256)]
  for (let byte = 0; byte < 256; byte++) bytes[byte] = byte
  bytes.set(
    values.sort((one, other) => far(one) - far(other)),
    coding.first,
  )
  bytes.forEach((byte, rank) => (ranks[byte] = rank))
  return { ranks, bytes }
}
