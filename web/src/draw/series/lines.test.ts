import { describe, expect, it } from 'vitest'
import { commandOf } from './commands'
import { apart } from './ink'
import { median, outliers } from './outliers'
import { MOST_COLOURED, paints } from './paint'
import { rowsOf } from './picture'
import { othersText, stepText, valueText } from './readout'
import type { Series } from './series'
import { tableOf } from './table'
import { moved, showing, within, zoomed } from './window'

const STEPS = Array.from({ length: 50 }, (_, at) => at)

/** Rank `at` of many: a wave with a little of its own. */
function rank(at: number, more: (step: number) => number = () => 0, extra: Partial<Series> = {}): Series {
  const mean = STEPS.map((step) => Math.sin(step) + 0.01 * ((at * 37 + step * 11) % 7) + more(step))
  return { label: `rank ${at}`, step: STEPS, min: mean, max: mean, mean, ...extra }
}

describe('outliers', () => {
  it('are those far from the rest at any step, farthest first', () => {
    const all = Array.from({ length: 40 }, (_, at) => rank(at))
    all[7] = rank(7, (step) => (step === 20 ? 2 : 0))
    all[31] = rank(31, () => -9)
    expect(outliers(all, tableOf(all).columns, 5)).toEqual([31, 7])
  })

  it('are those with NaN, whatever their values', () => {
    const all = Array.from({ length: 12 }, (_, at) => rank(at))
    all[3] = rank(3, () => 0, { nan: STEPS.map((step) => (step === 9 ? 2 : 0)) })
    expect(outliers(all, tableOf(all).columns, 5)).toEqual([3])
  })

  it('are none among equals', () => {
    const all = Array.from({ length: 12 }, () => rank(0))
    expect(outliers(all, tableOf(all).columns, 5)).toEqual([])
  })

  it('have a median', () => expect([median([3, 1, 2]), median([4, 1, 2, 3])]).toEqual([2, 2.5]))
})

describe('paint', () => {
  it('is another for each of up to eight', () => {
    const all = Array.from({ length: MOST_COLOURED }, (_, at) => rank(at))
    const found = paints(all, tableOf(all).columns, 'dark')
    expect(new Set(found.map((one) => one?.colour)).size).toBe(8)
    expect(new Set(found.map((one) => one?.dash.join())).size).toBe(8)
  })

  it('is for the main ones and the outliers of many', () => {
    const all = Array.from({ length: 100 }, (_, at) => rank(at))
    all[50] = rank(50, () => 5)
    all[99] = rank(99, () => 0, { kind: 'main' })
    const found = paints(all, tableOf(all).columns, 'light')
    expect(found.flatMap((one, at) => (one ? [at] : []))).toEqual([50, 99])
  })
})

describe('read-outs', () => {
  const one: Series = {
    label: 'a',
    step: [0, 10, 20],
    min: [1, 0.1, null],
    max: [1, 0.9, null],
    mean: [1, 0.5, null],
    nan: [0, 3, 64],
    inf: [0, 0, 1],
  }
  it.each([
    [0, '1'],
    [10, '0.5 (0.1 to 0.9), 3 NaN'],
    [19, '0.5 (0.1 to 0.9), 3 NaN'],
    [20, '64 NaN, 1 infinity'],
    [-1, 'nothing'],
  ])('at step %s', (step, text) => expect(valueText(one, step)).toBe(text))

  it('name the steps of a bucket', () => {
    expect([stepText(10, 1, 99), stepText(10, 10, 99), stepText(90, 20, 99)]).toEqual([
      'step 10',
      'steps 10 to 19',
      'steps 90 to 99',
    ])
  })

  it('sum up many', () => {
    const flat = (value: number): Series => ({ ...one, mean: [value, value, null] })
    expect(othersText([flat(1), flat(3), flat(2)], 10)).toBe('median 2 (1 to 3)')
    expect(othersText([flat(1)], 20)).toBe('nothing')
  })
})

describe('zooming', () => {
  it('keeps the step that it is about, and ends at all', () => {
    expect(zoomed([0, 100], 25, 0.5, [0, 100])).toEqual([13, 63])
    expect(zoomed([13, 63], 25, 2.2, [0, 100])).toBeNull()
    expect(zoomed([40, 43], 41, 0.1, [0, 100])).toEqual([40, 42])
  })

  it('moves no farther than there are steps', () => {
    expect(moved([10, 20], 15, [0, 100])).toEqual([25, 35])
    expect(moved([10, 20], -50, [0, 100])).toEqual([0, 10])
    expect(moved([10, 20], 500, [0, 100])).toEqual([90, 100])
  })

  it('shows a step', () => {
    expect(showing([10, 20], 15, [0, 100])).toEqual([10, 20])
    expect(showing([10, 20], 22, [0, 100])).toEqual([12, 22])
    expect(showing([10, 20], 3, [0, 100])).toEqual([3, 13])
  })

  it('has whole steps, two apart at least', () => {
    expect(within(3.4, 3.6, [0, 10])).toEqual([3, 5])
    expect(within(9.9, 12, [0, 10])).toEqual([8, 10])
    expect(within(-5, 20, [0, 10])).toBeNull()
  })
})

describe('keys', () => {
  it('are those of heat maps', () => {
    const press = (key: string, shiftKey = false, ctrlKey = false) =>
      commandOf({ key, shiftKey, ctrlKey, altKey: false, metaKey: false })
    expect(press('ArrowRight')).toEqual({ kind: 'move', by: 1 })
    expect(press('ArrowLeft', true)).toEqual({ kind: 'move', by: -10 })
    expect([press('+')?.kind, press('0')?.kind, press('Enter')?.kind]).toEqual(['zoom', 'fit', 'seek'])
    expect([press('x'), press('+', false, true)]).toEqual([null, null])
  })
})

describe('drawing', () => {
  it('leaves out signs too close to the one before', () => expect(apart([9, 1, 2, 5], 3)).toEqual([1, 5, 9]))

  it('puts entries of the legend below each other where they do not fit', () => {
    const rows = rowsOf(
      ['one', 'two', 'three'].map((label) => ({ label, paint: null })),
      200,
      (text) => text.length * 10,
    )
    expect(rows.map((row) => row.map(({ label }) => label))).toEqual([['one', 'two'], ['three']])
  })
})
