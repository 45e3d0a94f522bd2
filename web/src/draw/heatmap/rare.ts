/** Cells that are NaN or infinite: where they are, when they are few, and which is next. Pure. */
import { specialOf } from './coding'
import type { Encoded } from './encode'
import type { Cell } from './viewport'

/** More are seen without being pointed out. */
const FEW = 100

export interface RareCell extends Cell {
  readonly special: 'nan' | 'infinite'
}

/** All of them, or none where they are many. */
export function rareCells(encoded: Encoded): RareCell[] {
  const bytes = bytesOf(encoded)
  const count = bytes.reduce((sum, byte) => sum + encoded.counts[byte]!, 0)
  return count > FEW ? [] : bytes.flatMap((byte) => cellsOf(encoded, byte))
}

/** The first one behind a cell, in the order of reading; after the last one comes the first. */
export function nextRare(encoded: Encoded, behind: Cell | null): Cell | null {
  const { stride } = encoded.grid
  const from = behind === null ? 0 : behind.row * stride + behind.column + 1
  const after = bytesOf(encoded).map((byte) => search(encoded, byte, from))
  const first = bytesOf(encoded).map((byte) => search(encoded, byte, 0))
  const found = [after, first].map((some) => Math.min(...some.filter((at) => at >= 0)))
  const at = found.find((each) => each < Infinity)
  return at === undefined ? null : { row: Math.floor(at / stride), column: at % stride }
}

function bytesOf({ coding }: Encoded): number[] {
  return [coding.nan, coding.infinite].filter((byte) => byte !== null)
}

function cellsOf(encoded: Encoded, byte: number): RareCell[] {
  const { stride } = encoded.grid
  const special = specialOf(byte, encoded.coding) === 'nan' ? 'nan' : 'infinite'
  const found: RareCell[] = []
  for (let at = search(encoded, byte, 0); at >= 0; at = search(encoded, byte, at + 1)) {
    found.push({ row: Math.floor(at / stride), column: at % stride, special })
  }
  return found
}

/** Where a byte is next; room that no cell has taken yet is passed over. */
function search({ grid }: Encoded, byte: number, from: number): number {
  let at = grid.bytes.indexOf(byte, from)
  while (at >= 0 && at % grid.stride >= grid.columns) at = grid.bytes.indexOf(byte, at + 1)
  return at >= 0 && at < grid.rows * grid.stride ? at : -1
}
