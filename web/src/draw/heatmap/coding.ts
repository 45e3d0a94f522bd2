/** What the bytes of a heat map stand for. */
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
 * How notable each byte is (256 entries), the most notable largest: NaN before infinite before values, and missing last.
 * Null where larger bytes are more notable anyhow.
 */
export function notability(pooling: Pooling, coding: Coding): Uint8Array | null {
  if (pooling === 'high') return null
  const ranks = Uint8Array.from({ length: 256 }, (_, byte) => byte)
  const middle = (coding.first + coding.last) / 2
  for (let byte = coding.first; byte <= coding.last; byte++) {
    const far = pooling === 'low' ? coding.last - byte : Math.floor(2 * Math.abs(byte - middle))
    ranks[byte] = Math.min(coding.last, far + coding.first)
  }
  return ranks
}
