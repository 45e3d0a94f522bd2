import { describe, expect, it } from 'vitest'
import { nearest, placeUpTo, spanOf, type Series } from './series'
import { holesOf, tableOf } from './table'

function series(step: number[], mean: (number | null)[] = step): Series {
  return { label: 'a', step, min: mean, max: mean, mean }
}

describe('holes of a series', () => {
  it.each([
    ['none in regular steps', [0, 10, 20, 30], []],
    ['a pause', [0, 1, 2, 30, 31, 32], [3]],
    ['two pauses with one step between', [0, 1, 2, 50, 100, 101, 102], [3, 51]],
    ['none where every tenth becomes every one', [0, 10, 20, 30, 31, 32, 33], []],
    ['none of two steps: nothing is usual yet', [0, 500], []],
    ['a pause behind the first step', [0, 90, 91, 92], [1]],
  ])('%s', (_, step, holes) => expect(holesOf(step)).toEqual(holes))
})

describe('a table', () => {
  it('has all steps once, in order, and undefined where a series has nothing', () => {
    const { steps, columns } = tableOf([series([0, 2, 4], [1, 2, 3]), series([1, 2, 3], [7, 8, 9])])
    expect([...steps]).toEqual([0, 1, 2, 3, 4])
    expect(columns[0]?.mean).toEqual([1, undefined, 2, undefined, 3])
    expect(columns[1]?.mean).toEqual([undefined, 7, 8, 9, undefined])
  })

  it('breaks lines at holes and where there is no number', () => {
    const { steps, columns } = tableOf([series([0, 1, 2, 30, 31], [1, null, 3, 4, 5])])
    expect([...steps]).toEqual([0, 1, 2, 3, 30, 31])
    expect(columns[0]?.mean).toEqual([1, null, 3, null, 4, 5])
  })

  it('is empty of no series', () => expect(tableOf([]).steps).toHaveLength(0))

  it('is made of 8 series of 2,000 steps in a few milliseconds', () => {
    const steps = Array.from({ length: 2000 }, (_, at) => at * 3)
    const all = Array.from({ length: 8 }, () => series(steps))
    tableOf(all)
    const began = performance.now()
    tableOf(all)
    expect(performance.now() - began).toBeLessThan(100) // 3 ms on an idle machine
  })
})

describe('places', () => {
  it.each([
    [-1, -1, 0],
    [0, 0, 0],
    [14, 1, 1],
    [16, 1, 2],
    [99, 2, 2],
  ])('of %s', (step, before, close) => {
    expect(placeUpTo([0, 10, 20], step)).toBe(before)
    expect(nearest([0, 10, 20], step)).toBe(close)
  })

  it('of nothing', () => expect([placeUpTo([], 3), nearest([], 3)]).toEqual([-1, -1]))

  it('span all series', () => {
    expect(spanOf([series([5, 9]), series([2, 6]), series([])])).toEqual([2, 9])
    expect(spanOf([series([])])).toBeNull()
  })
})
