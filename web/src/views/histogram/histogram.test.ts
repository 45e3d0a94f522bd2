import { describe, expect, it } from 'vitest'
import { exponentGrid } from './heat'
import { exponentsOf, fitOf, percent, powerText, totalOf, TYPES } from './types'

const [bf16, fp16, e5m2, e4m3] = TYPES as [
  (typeof TYPES)[0],
  (typeof TYPES)[0],
  (typeof TYPES)[0],
  (typeof TYPES)[0],
]

describe('number formats', () => {
  /** A value of each exponent from -30 to 20. */
  const even = { first: -30, counts: new Array<number>(51).fill(1), tiny: 9, special: 1 }
  it.each([
    ['bf16', bf16, 0, 0, 0],
    // 2^-25 rounds to 2^-24; 2^16 is too large
    ['fp16', fp16, 5, 11, 5],
    ['e5m2', e5m2, 13, 3, 5],
    ['e4m3', e4m3, 20, 4, 12],
  ] as const)('%s', (_, type, zero, coarse, over) =>
    expect(fitOf(type, even, false)).toEqual({
      zero: zero / 51,
      coarse: coarse / 51,
      over: over / 51,
      shift: 0,
    }),
  )

  it('scaled have room for the largest', () => {
    const { over, shift, zero } = fitOf(e4m3, even, true)
    expect([over, shift]).toEqual([0, -12])
    expect(zero).toBeCloseTo(32 / 51)
  })

  it('of no values hold them all', () =>
    expect(fitOf(e4m3, { first: 0, counts: [0], tiny: 5, special: 0 }, true)).toMatchObject({
      zero: 0,
      over: 0,
      shift: 0,
    }))
})

describe('histograms', () => {
  it('are put together from frames', () => {
    const bins = (...set: [number, number][]) => {
      const found = new Float64Array(256)
      for (const [bin, count] of set) found[bin] = count
      return found
    }
    const found = exponentsOf([bins([0, 2], [127, 5], [255, 1]), bins([125, 3], [127, 1])])
    expect(found).toEqual({ first: -2, counts: [3, 0, 6], tiny: 2, special: 1 })
    expect(totalOf(found)).toBe(12)
  })

  it('are shares of each step, the largest on top, and nothing where there is none', () => {
    const grid = exponentGrid({
      tap: 'a',
      first: 0,
      last: 4,
      bucket_steps: 1,
      columns: [0, 1, 2, 3, 4],
      exponent: -1,
      counts: [
        [1, 1],
        [0, 0],
        [3, 0],
        [0, 0],
        [0, 2],
      ],
      tiny: [2, 0, 0, 0, 0],
      special: [0, 0, 1, 0, 0],
    })
    expect([grid.rows, grid.top, grid.steps]).toEqual([2, 0, [0, 2, 4]])
    expect([...grid.values]).toEqual([0.25, 0, 1, 0.25, 0.75, 0])
    expect([...grid.missing]).toEqual([0, 0, 0, 0, 0, 0])
  })
})

it('exponents and shares are text', () => {
  expect([powerText(-12), powerText(0), powerText(7)]).toEqual(['2⁻¹²', '2⁰', '2⁷'])
  expect([percent(0), percent(1e-9), percent(0.12345), percent(1)]).toEqual([
    '0',
    '<0.001 %',
    '12.3 %',
    '100 %',
  ])
})
