import { describe, expect, it } from 'vitest'
import { cellsOf, columnOf, costsOf, scaleOf, stepsOf, stepTimeline, type StepPlot } from './figures'

describe('the heat map', () => {
  it('tells what is not known from what is as usual', () => {
    const cells = cellsOf(
      [
        [0, null, 0.5],
        [-0.2, 0.1, null],
      ],
      3,
    )
    expect([...cells.values].map((value) => Number(value.toFixed(2)))).toEqual([0, 0, 0.5, -0.2, 0.1, 0])
    expect([...cells.missing!]).toEqual([0, 1, 0, 0, 0, 1])
    expect(scaleOf(cells)).toEqual([-0.5, 0.5])
    expect(scaleOf(cellsOf([[0.01]], 1))).toEqual([-0.1, 0.1])
    expect(scaleOf(cellsOf([[9]], 1), 0.5)).toEqual([-0.5, 0.5])
  })

  it('finds columns by step', () => {
    const plot = { first_steps: [0, 5, 10], last_steps: [4, 5, 14] }
    expect([stepsOf(plot, 0), stepsOf(plot, 1)]).toEqual(['0–4', '5'])
    expect([columnOf(plot, 4), columnOf(plot, 12), columnOf(plot, 15)]).toEqual([0, 2, null])
  })
})

describe('the timeline', () => {
  it('puts lists together', () => {
    const plot: StepPlot = {
      step: 7,
      ranks: [0, 3],
      ranks_left_out: 0,
      categories: ['forward', 'wait'],
      segments: { rank: [3, 3], start_s: [0, 0.1], end_s: [0.1, 0.3], category: [0, 1], label: [1, 0] },
      labels: ['all_reduce', 'layer\u202e 0'],
      segments_left_out: 0,
    }
    const { rows, whole } = stepTimeline(plot)
    expect(rows.map((row) => row.segments.length)).toEqual([0, 2])
    expect(rows[1]?.segments[0]).toMatchObject({ category: 'forward', label: 'layer\ufffd 0' })
    expect(rows[1]?.segments[1]).toMatchObject({ category: 'wait', label: 'all_reduce', end: 0.3 })
    expect(whole).toEqual({ from: 0, to: 0.3 })
  })
})

describe('costs', () => {
  const plot = {
    ranks: [0, 1, 2],
    ranks_left_out: 0,
    lost_s: [0, 0.2, 0.1],
    waited_s: [0.3, null, 0.3],
    clock_error_us: [],
  }

  it.each([
    ['lost', [1, 2, 0]],
    ['waited', [0, 2, 1]],
    ['rank', [0, 1, 2]],
  ] as const)('are ordered by %s', (order, ranks) => {
    expect(costsOf(plot, order).map((cost) => cost.rank)).toEqual(ranks)
  })
})
