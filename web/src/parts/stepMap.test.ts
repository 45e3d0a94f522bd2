import { describe, expect, it } from 'vitest'
import type { Frame } from '../api/frames'
import { columnLabel, columnOf, gridOf, logScale, spanOfColumns } from './stepMap'

/** Some rows of a matrix of 2 steps a column, from step 4 on. */
function frame(first_row: number, names: string[], values: number[][], special: number[][]): Frame {
  const columns = values[0]!.length
  const shape = [values.length, columns]
  const meta = { first: 4, last: 4 + 2 * columns - 1, bucket_steps: 2, all_rows: 3, first_row, rows: names }
  return {
    ...{
      tap: 'matrix',
      what: 'raw',
      subscription: '',
      step: 0,
      microbatch: 0,
      rank: 0,
      replica: 0,
      shard: [],
      unixNs: 0n,
    },
    meta,
    arrays: {
      values: { dtype: 'float32', shape, values: Float32Array.from(values.flat()) },
      special: { dtype: 'uint8', shape, values: Uint8Array.from(special.flat()) },
    },
  }
}

describe('a matrix', () => {
  const found = gridOf([
    frame(
      0,
      ['a', 'b'],
      [
        [1, NaN, 3, 4],
        [5, NaN, 7, 8],
      ],
      [
        [1, 0, 3, 1],
        [1, 0, 1, 5],
      ],
    ),
    frame(2, ['c'], [[9, NaN, NaN, 0]], [[1, 0, 0, 1]]),
  ])

  it('is put together, without columns in which nothing is', () => {
    expect(found).toMatchObject({ rows: 3, width: 2, names: ['a', 'b', 'c'], steps: [4, 8, 10] })
  })

  it('shows NaN and infinities that a mean would hide, and tells them from nothing', () => {
    expect([...found.values]).toEqual([1, NaN, 4, 5, 7, Infinity, 9, NaN, 0])
    expect([...found.missing]).toEqual([0, 0, 0, 0, 0, 0, 0, 1, 0])
  })

  it('has no names where the server has left them out', () => {
    expect(gridOf([frame(0, [], [[1], [2], [3]], [[1], [1], [1]])]).names).toEqual([])
  })
})

it('a logarithmic scale leaves out no value', () => {
  const of = (...values: number[]) =>
    logScale({
      values: Float32Array.from(values),
      missing: Uint8Array.from(values, (value) => (value === 9 ? 1 : 0)),
    })
  expect([of(1, NaN, Infinity, 2), of(1, 0), of(1, -1), of(9, 1)]).toEqual(['log', 'symlog', 'symlog', 'log'])
})

describe('columns', () => {
  const grid = { steps: [0, 2, -1, 40, 42], width: 2 }
  it('are found by step, also within a hole', () => {
    expect([-1, 0, 3, 20, 40, 99].map((step) => columnOf(grid, step))).toEqual([-1, 0, 1, 2, 3, 4])
  })

  it('have steps', () => {
    expect(spanOfColumns(grid, 1, 3)).toEqual([2, 41])
    expect(spanOfColumns(grid, -5, 99)).toEqual([0, 43])
    expect([0, 2, 4].map((column) => columnLabel(grid, column))).toEqual(['0–1', '(nothing)', '42–43'])
  })
})
