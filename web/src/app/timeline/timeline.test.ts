import { describe, expect, it } from 'vitest'
import type { Notice } from '../../state/server.svelte'
import { filled, holding, lowerBound, placeOf, shownOf, stepAt, ticks, zoomed } from './axis'
import { auditOf, clusters, marksOf, neighbour, type Mark } from './marks'

const whole = { first: 0, last: 10_000 }

describe('the axis', () => {
  it('has a place for each step, and a step at each place', () => {
    for (const step of [0, 1, 4_999, 10_000]) expect(stepAt(placeOf(step, whole), whole)).toBe(step)
    expect([stepAt(-1, whole), stepAt(2, whole)]).toEqual([0, 10_000])
    expect(placeOf(7, { first: 7, last: 7 })).toBe(0.5)
  })

  it.each([
    [null, null, [0, 10_000]],
    [100, 200, [100, 200]],
    [9_000, 99_999, [9_000, 10_000]],
    [300, 200, [0, 10_000]],
    [20_000, 30_000, [0, 10_000]],
  ])('shows steps %s to %s as %s', (first, last, span) => {
    const shown = shownOf(whole, first, last)
    expect([shown.first, shown.last]).toEqual(span)
  })

  it('is zoomed about a step that stays where it is, and no further than there is', () => {
    const near = zoomed(whole, whole, 0.1, 2_500)
    expect(near).toEqual({ first: 2_250, last: 3_250 })
    expect(placeOf(2_500, near)).toBeCloseTo(placeOf(2_500, whole))
    expect(zoomed(near, whole, 1000, 2_500)).toEqual(whole)
    expect(zoomed(near, whole, 1e-6, 10_000)).toEqual({ first: 3_240, last: 3_250 })
    expect(zoomed({ first: 0, last: 3 }, { first: 0, last: 3 }, 0.5, 1)).toEqual({ first: 0, last: 3 })
  })

  it('is moved to a step that it does not hold', () => {
    const span = { first: 100, last: 200 }
    expect(holding(span, whole, 150)).toBe(span)
    expect(holding(span, whole, 900)).toEqual({ first: 850, last: 950 })
    expect(holding(span, whole, 9_990)).toEqual({ first: 9_900, last: 10_000 })
  })

  it.each([
    [0, 39, 8, [0, 5, 10, 15, 20, 25, 30, 35]],
    [0, 10_000, 6, [0, 2_000, 4_000, 6_000, 8_000, 10_000]],
    [97, 103, 10, [97, 98, 99, 100, 101, 102, 103]],
    [5, 5, 10, [5]],
  ])('from %s to %s in %s parts has the steps %s', (first, last, most, steps) =>
    expect(ticks({ first, last }, most)).toEqual(steps),
  )

  it('knows where something was recorded', () => {
    expect(filled([0, 4, 8], { first: 0, last: 9 }, 10)).toEqual([
      [0, 1],
      [4, 1],
      [8, 1],
    ])
    expect(filled([0, 1, 2, 8], { first: 0, last: 9 }, 10)).toEqual([
      [0, 3],
      [8, 1],
    ])
    const every = Array.from({ length: 10_001 }, (_, step) => step)
    expect(filled(every, whole, 500)).toEqual([[0, 500]])
    expect(filled(every, { first: 20, last: 29 }, 100)).toEqual([[0, 100]])
    expect(filled([], whole, 100)).toEqual([])
  })

  it('finds steps in an ordered list', () =>
    expect([0, 3, 4, 9, 10].map((step) => lowerBound([3, 4, 9], step))).toEqual([0, 0, 1, 2, 3]))
})

const notice = (kind: string, step: number, said: string, more: object = {}) =>
  ({ kind, step, text: said, rank: 0, unix_ns: 0, ...more }) as Notice
const activated = (perturbation: string, step: number, said = 'flips a bit') => ({
  event: 'activated',
  perturbation,
  step,
  text: said,
})

describe('marks', () => {
  const happened = {
    audit: [
      activated('p-1', 22),
      activated('p-1', 20),
      activated('p-2', 30, 'zero'),
      { event: 'activated', step: 'x' },
    ],
    notices: [
      notice('error', 25, 'full'),
      notice('error', 25, 'full'),
      notice('applied', 20, ''),
      notice('rank', -1, 'x'),
    ],
    events: [
      { event: 'alarm', step: 70, says: 'rank 3 is slow', alarm: { since: 60 } },
      { event: 'over', step: 90, says: 'over' },
      { event: 'hang', step: 95, says: 'hangs', alarm: null },
    ],
    findings: [
      { kind: 'slow_rank', ranks: [3], onset: 8 },
      { kind: 'slow_stage', onset: null },
    ],
  }

  it('say what happened when, in order', () => {
    const found = marksOf(happened, { first: 0, last: 100 })
    expect(found.map((mark) => [mark.kind, mark.step, mark.last, mark.text])).toEqual([
      ['finding', 8, 8, 'slow rank 3 begins'],
      ['perturbation', 20, 22, 'flips a bit'],
      ['notice', 25, 25, 'error: full'],
      ['perturbation', 30, 30, 'zero'],
      ['alarm', 60, 60, 'rank 3 is slow'],
      ['alarm', 95, 95, 'hangs'],
    ])
    expect(marksOf(happened, { first: 21, last: 25 }).map((mark) => mark.step)).toEqual([20, 25])
  })

  it('survive whatever stands in a file', () => {
    const odd = [
      {},
      { event: 5, step: NaN, text: {} },
      { event: 'activated', step: 1, perturbation: null, text: 'a\n \u202e\u0000b' },
    ]
    const found = marksOf({ audit: odd, notices: [], events: odd, findings: odd }, whole)
    expect(found.map((mark) => mark.text)).toEqual(['a b'])
    expect(
      marksOf({ ...happened, audit: [activated('p', 1, 'x'.repeat(9_999))] }, whole)[0]?.text,
    ).toHaveLength(301)
  })

  it('of one of several recordings are those that it has heard of', () => {
    const heard = [notice('activated', 20, '', { perturbation: 'p-1' })]
    expect(auditOf(happened.audit, heard, false).map((entry) => entry['step'])).toEqual([22, 20])
    expect(auditOf(happened.audit, [], true)).toBe(happened.audit)
  })

  it('that lie close together are drawn as one', () => {
    const at = (step: number, last = step): Mark => ({ kind: 'notice', step, last, text: `${step}` })
    const marks = [at(0, 60), at(100), at(101), at(150), at(300)]
    const found = clusters(marks, { first: 50, last: 250 }, 0.02)
    expect(found.map(([place, some]) => [place, some.length])).toEqual([
      [0, 1],
      [0.25, 2],
      [0.5, 1],
    ])
  })

  it('are gone through one by one', () => {
    const marks = marksOf(happened, { first: 0, last: 100 })
    expect(neighbour(marks, 20, 1)?.step).toBe(25)
    expect(neighbour(marks, 20, -1)?.step).toBe(8)
    expect([neighbour(marks, 95, 1), neighbour(marks, 0, -1)]).toEqual([null, null])
  })
})
