import { describe, expect, it } from 'vitest'
import { linearTicks, placing, scaleOf, tickTexts, ticksOf } from './scale'
import type { Columns } from './table'

function columns(...values: (number | null | undefined)[]): Columns[] {
  return [{ mean: values, min: values, max: values }]
}
const STEPS = Float64Array.from([0, 1, 2, 3, 4])
const ALL = [0, 4] as const

describe('the scale of values', () => {
  it('has room around what is seen, and for the lines that leave it', () => {
    const scale = scaleOf(STEPS, columns(1000, 3, 5, -7, 2000), [1, 2], false)
    expect(scale.kind).toBe('linear')
    expect(scale.low).toBeLessThan(-7)
    expect(scale.high).toBeGreaterThan(5)
    expect(scale.high).toBeLessThan(2000)
  })

  it('is not lost where all values are the same, or there are none', () => {
    for (const value of [0, 5, -5, 1e-30]) {
      const { low, high } = scaleOf(STEPS, columns(value, value), ALL, false)
      expect([low < value, value < high]).toEqual([true, true])
    }
    expect(scaleOf(STEPS, columns(null, undefined), ALL, true)).toMatchObject({
      kind: 'linear',
      low: 0,
      high: 1,
    })
  })

  it('has no negative and no broken counts', () => {
    const none = scaleOf(STEPS, columns(0, 0, 0), ALL, true, true)
    expect(ticksOf(none, 4)).toEqual([0, 1])
    expect(ticksOf(scaleOf(STEPS, columns(0, 2), ALL, false, true), 8)).toEqual([0, 1, 2])
    expect(ticksOf(scaleOf(STEPS, columns(0, 0, 0), ALL, true), 4)).toContain(-0.5)
  })

  it('is logarithmic of positive values', () => {
    const scale = scaleOf(STEPS, columns(1e-3, 1, 1e3), ALL, true)
    expect(scale.kind).toBe('log')
    expect(ticksOf(scale, 8)).toEqual([1e-3, 1e-2, 0.1, 1, 10, 100, 1000])
  })

  it('keeps zeros and negative values: linear about zero', () => {
    const scale = scaleOf(STEPS, columns(-10, 0, 0.01, 1000), ALL, true)
    expect(scale).toMatchObject({ kind: 'symlog', threshold: 0.01 })
    expect(scale.low).toBeLessThan(-10)
    expect(scale.high).toBeGreaterThan(1000)
    const ticks = ticksOf(scale, 12)
    expect(ticks).toContain(0)
    expect(ticks.some((tick) => tick < 0)).toBe(true)
    expect(ticks.at(-1)).toBe(1000)
  })

  it('is linear of nothing but zeros', () =>
    expect(scaleOf(STEPS, columns(0, 0), ALL, true).kind).toBe('linear'))

  it('shows no more decades than can be told apart', () =>
    expect(scaleOf(STEPS, columns(-1, 1e-30, 1), ALL, true).threshold).toBeCloseTo(1e-6))
})

describe('places on the axis', () => {
  it.each([
    ['linear', { low: -1e308, high: 1e308 }, 0, 0.5],
    ['log', { low: 0.01, high: 100 }, 1, 0.5],
    ['symlog', { low: -1000, high: 1000 }, 0, 0.5],
  ] as const)('of %s values go from 0 to 1', (kind, ends, value, middle) => {
    const place = placing({ kind, ...ends, threshold: 0.1 })
    expect([place(ends.low), place(value), place(ends.high)]).toEqual([0, expect.closeTo(middle), 1])
  })
})

describe('ticks', () => {
  it.each([
    [0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1]],
    [-3, 12, 4, [0, 5, 10]],
    [1e37, 4e37, 3, [1e37, 2e37, 3e37, 4e37]],
  ])('from %s to %s', (low, high, most, ticks) => expect(linearTicks(low, high, most)).toEqual(ticks))

  it('of a narrow logarithmic scale are those of a linear one', () =>
    expect(ticksOf({ kind: 'log', low: 0.51, high: 0.69, threshold: 1 }, 5).length).toBeGreaterThanOrEqual(3))

  it('have as many digits as tell them apart', () => {
    expect(tickTexts([0, 0.5, 1])).toEqual(['0', '0.5', '1'])
    expect(tickTexts([1.00001, 1.00002])).toEqual(['1.00001', '1.00002'])
  })
})
