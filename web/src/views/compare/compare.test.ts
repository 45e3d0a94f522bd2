import { describe, expect, it } from 'vitest'
import type { Frame } from '../../api/frames'
import type { Run } from '../../state/server.svelte'
import type { PairResult } from '../disturb/pairs'
import {
  closest,
  difference,
  extentOf,
  inOrder,
  others,
  proposed,
  summary,
  tableOf,
  toleranceOf,
  valuesOf,
  type Compared,
  type Parted,
} from './compare'
import { spread } from './spread'

const run = (name: string, label: string, unix_ns: number, more: Partial<Run> = {}) =>
  ({ name, label, unix_ns, directory: 'one', error: '', first_step: 0, last_step: 9, ...more }) as Run
const clean = run('a', 'clean', 1)
const disturbed = run('b', 'disturbed', 2)
const later = run('c', '', 3)
const elsewhere = run('d', 'disturbed', 4, { directory: 'two' })
const broken = run('e', '', 9, { error: 'cut off' })
const all = [clean, disturbed, later, elsewhere, broken]

describe('the other run', () => {
  it('is one that can be read, the newest first', () =>
    expect(others(all, 'a').map((one) => one.name)).toEqual(['d', 'c', 'b']))

  it.each([
    [clean, 'b'],
    [disturbed, 'a'],
    [later, 'b'],
    [elsewhere, 'c'],
  ])('of $name is proposed', (shown, name) => expect(proposed(all, shown)?.name).toBe(name))

  it('may not be there', () => {
    expect(proposed([clean, broken], clean)).toBeNull()
    expect(proposed([], null)).toBeNull()
  })
})

const tap = (name: string, parts_at: number | null, steps = 40): Parted => ({
  tap: name,
  parts_at,
  steps,
  steps_apart: 1,
  unfinished: 0,
  largest: 1,
})

describe('where they part', () => {
  it('orders the tensors, and leaves out those of which nothing can be compared', () => {
    const taps = [
      tap('x', 21),
      tap('none', null, 0),
      tap('w.grad', 20),
      tap('same', null),
      tap('y', 20),
      tap('z', 20),
    ]
    expect(inOrder(taps).map((one) => one.tap)).toEqual(['y', 'z', 'w.grad', 'x', 'same'])
  })

  it('finds the picture that is closest to a tensor', () => {
    const names = ['layers.0.residual', 'layers.1.attention.q', 'layers.1.mlp.hidden']
    expect(closest(names, 'layers.1.mlp.output')).toBe('layers.1.mlp.hidden')
    expect([closest(names, 'loss'), closest([], 'loss')]).toEqual(['layers.0.residual', ''])
  })

  const found = {
    step: [0, 4],
    steps: 40,
    steps_apart: 20,
    unfinished: 0,
    parts_at: 20,
    a: { mean: [1, null], min: [1, null], max: [1, null] },
    b: { mean: [2, 3], min: [2, 3], max: [2, 3] },
    difference: { mean: [1, null], min: [0, null], max: [1.5, null] },
  } as unknown as Compared

  it('is said in a sentence', () => {
    expect(summary(found)).toBe('They part at step 20, and differ in 20 of the 40 steps that both have.')
    expect(summary({ ...found, parts_at: null, steps: 1 })).toBe('Alike in all of the 1 step that both have.')
  })

  it('says which steps are left out', () => {
    const cut = { ...found, parts_at: null, unfinished: 1 }
    expect(summary(cut)).toBe(
      'Alike in all of the 40 steps that both have. The last step is left out: one of the runs lacks a part of it.',
    )
    expect(summary({ ...cut, unfinished: 2 })).toContain('The last 2 steps are left out')
  })

  it('is a table', () =>
    expect(tableOf(found)).toEqual([
      [0, 1, 2, 0, 1.5],
      [4, null, 3, null, null],
    ]))

  it.each([
    ['', '0'],
    [' 1e-6 ', '1e-6'],
    ['0.5', '0.5'],
    ['-1', null],
    ['1e999', null],
    ['abc', null],
    ['0x10', null],
    ['1,5', null],
  ])('within a tolerance of "%s": %s', (typed, tolerance) => expect(toleranceOf(typed)).toBe(tolerance))
})

const tiles = (bytes: number[], low: number, high: number, shape = [1, bytes.length]): Frame => {
  const arrays = {
    tiles: { dtype: 'uint8', shape, values: Uint8Array.from(bytes) },
    scale: { dtype: 'float32', shape: [2], values: Float32Array.of(low, high) },
  }
  return { tap: 'x', arrays, meta: {} } as unknown as Frame
}
const exact = (...numbers: number[]): Frame => {
  const frame = tiles(
    numbers.map(() => 0),
    0,
    0,
  )
  frame.arrays['values'] = {
    dtype: 'float32',
    shape: [1, numbers.length],
    values: Float32Array.from(numbers),
  }
  return frame
}

describe('the difference of tiles', () => {
  it('is that of their values, or of what their levels stand for', () => {
    const { cells } = difference(exact(1, 2, -3), exact(1, 2.5, 1))
    expect(cells).toEqual({ rows: 1, columns: 3, values: Float64Array.of(0, 0.5, 4) })
    expect(Array.from(valuesOf(tiles([0, 253, 254, 255], -1, 1)).values)).toEqual([-1, 1, Infinity, NaN])
    const odd = difference(exact(NaN, Infinity, 0), exact(NaN, Infinity, Infinity))
    expect(Array.from(odd.cells.values)).toEqual([0, 0, Infinity])
  })

  it('is none where it is within what they are rounded to', () => {
    const found = difference(tiles([0, 100, 103], 0, 253), tiles([0, 100, 100], 0.5, 253.5))
    expect(found.resolution).toBe(1)
    expect(Array.from(found.cells.values)).toEqual([0, 0, -2.5])
  })

  it('needs the same shape', () => {
    expect(() => difference(tiles([1, 2], 0, 1), tiles([1], 0, 1))).toThrow('1 × 2 and 1 × 1')
    expect(() => difference({ tap: 'x', arrays: {}, meta: {} } as unknown as Frame, exact(1))).toThrow(
      /no tiles/,
    )
  })

  it('is counted', () => {
    const cells = (...values: number[]) => ({
      rows: 1,
      columns: values.length,
      values: Float64Array.from(values),
    })
    expect(extentOf(cells(0, -3, 2))).toEqual({ differ: 2, largest: 3 })
    expect(extentOf(cells(1, NaN)).differ).toBe(2)
    expect(extentOf(cells(0, 0))).toEqual({ differ: 0, largest: 0 })
  })
})

describe('how far a disturbance spreads', () => {
  it('is a series for each tensor that differs', () => {
    const row = (tap: string, step: number, l2: number | null) =>
      ({ tap, step, l2 }) as PairResult['rows'][number]
    const rows = [
      row('a', 5, 0),
      row('b', 5, 0.1),
      row('c', 5, null),
      row('a', 6, 0),
      row('b', 6, 0.2),
      row('c', 6, 0),
    ]
    expect(spread({ rows }).map(({ label, step, mean }) => [label, step, mean])).toEqual([
      ['b', [5, 6], [0.1, 0.2]],
      ['c', [5, 6], [null, 0]],
    ])
  })
})
