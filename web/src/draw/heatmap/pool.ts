/**
 * Many cells to few: of each group the most notable. Four bytes are compared at once, without branches: noise, as gradients
 * are, is what branches are slowest on (4096 x 4096 cells to a screen: about 20 ms, a fifth of what a loop over bytes takes).
 */
import type { Grid, Level } from './pyramid'
import type { Area } from './quantise'

/** A permutation of the bytes: the higher its rank, the more notable a byte is. */
export interface Order {
  /** Of each byte. */
  readonly ranks: Uint8Array
  /** At each rank. */
  readonly bytes: Uint8Array
}

/** Makes an area of `target`, a level of `source`, anew. Without an order larger bytes are more notable. */
export function pool(source: Grid, target: Grid, level: Level, area: Area, order: Order | null): void {
  const group = 1 << level.across
  const first = area.column * group
  const count = Math.min(source.columns, first + area.columns * group) - first
  // Whole groups and whole words; what no cell fills stays 0, which no cell is less notable than.
  const words = Math.ceil((area.columns * group) / 4)
  const [most, next] = [new Uint32Array(words), new Uint32Array(words)]
  const line = new Uint8Array(next.buffer)
  const pooled = new Uint8Array(area.columns)
  for (let row = area.row; row < area.row + area.rows; row++) {
    most.fill(0)
    const end = Math.min(source.rows, (row + 1) << level.down)
    for (let each = row << level.down; each < end; each++) {
      const from = each * source.stride + first
      line.set(source.bytes.subarray(from, from + count))
      if (order !== null) translate(line, order.ranks, count)
      for (let word = 0; word < words; word++) most[word] = larger(most[word]!, next[word]!)
    }
    shorten(most, level.across, pooled)
    if (order !== null) translate(pooled, order.bytes, pooled.length)
    target.bytes.set(pooled, row * target.stride + area.column)
  }
}

function translate(bytes: Uint8Array, table: Uint8Array, count: number): void {
  for (let at = 0; at < count; at++) bytes[at] = table[bytes[at]!]!
}

const TOPS = 0x80808080 | 0

/** The larger of each of four bytes. */
function larger(one: number, other: number): number {
  // Bit 7 of each byte: whether the lower seven bits of `one` are at least those of `other`.
  const lower = ((one | TOPS) - (other & ~TOPS)) | 0
  const chosen = ((one & ~other) | (~(one ^ other) & lower)) & TOPS
  const mask = chosen | ((chosen - (chosen >>> 7)) | 0)
  return other ^ ((one ^ other) & mask)
}

/** The largest byte of each group of 2^times bytes. */
function shorten(words: Uint32Array, times: number, into: Uint8Array): void {
  if (times === 0) {
    into.set(new Uint8Array(words.buffer, 0, into.length))
    return
  }
  if (times === 1) {
    for (let at = 0; at < into.length; at += 2) {
      const pairs = larger(words[at >> 1]!, words[at >> 1]! >>> 8)
      into[at] = pairs & 255
      if (at + 1 < into.length) into[at + 1] = (pairs >>> 16) & 255
    }
    return
  }
  const each = 1 << (times - 2)
  for (let at = 0; at < into.length; at++) {
    let four = words[at * each]!
    for (let word = 1; word < each; word++) four = larger(four, words[at * each + word]!)
    const two = larger(four, four >>> 16)
    into[at] = larger(two, two >>> 8) & 255
  }
}
