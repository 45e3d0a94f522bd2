import { describe, expect, it } from 'vitest'
import { alarmOf, gridOf, hangOf, newsOf, shareOf } from './watch'

describe('what is told', () => {
  it('is taken as far as it makes sense', () => {
    expect(alarmOf({ says: 'Rank 3\u0000 is slow', ranks: [3, 'x', -1], since: 30 })).toEqual({
      says: 'Rank 3\ufffd is slow',
      ranks: [3],
      since: 30,
    })
    expect(alarmOf('nonsense')).toEqual({ says: '', ranks: [], since: null })
    expect(
      newsOf({ event: 'hang', says: 'No rank\nRank 2 is missing', unix_ns: 1e18, step: -1 }),
    ).toMatchObject({
      lines: ['No rank', 'Rank 2 is missing'],
      step: null,
      at: new Date(1e12),
    })
    expect(newsOf({ unix_ns: 1e300 }).at).toBeNull()
  })

  it('the last hang counts', () => {
    const news = ['hang', 'moving', 'hang', 'alarm'].map((event, step) => newsOf({ event, step, says: '' }))
    expect(hangOf(news)?.step).toBe(2)
    expect(hangOf([])).toBeNull()
  })

  it('a log ratio is a share', () => {
    expect(shareOf(Math.log(1.5))).toBeCloseTo(0.5)
    expect(shareOf(null)).toBeNull()
  })
})

describe('gridOf', () => {
  it('has stages and replicas below, tensor parallel ranks beside each other', () => {
    const coordinates = Array.from({ length: 8 }, (_, rank) => ({
      tp: rank % 2,
      dp: (rank >> 1) % 2,
      pp: rank >> 2,
    }))
    const grid = gridOf(8, coordinates)
    expect(grid.rowLabels).toEqual(['PP0 DP0', 'PP0 DP1', 'PP1 DP0', 'PP1 DP1'])
    expect(grid.columnLabels).toEqual(['TP0', 'TP1'])
    expect(grid.ranks).toEqual([0, 1, 2, 3, 4, 5, 6, 7])
  })

  it('follows the coordinates, not the numbers', () => {
    const grid = gridOf(4, [
      { pp: 1, dp: 10 },
      { pp: 1, dp: 2 },
      { pp: 0, dp: 10 },
      { pp: 0, dp: 2 },
    ])
    expect(grid.ranks).toEqual([3, 2, 1, 0])
  })

  it.each([[[null, { tp: 1 }]], [[{ tp: 0 }, { tp: 0 }]], [[{ tp: 0 }, { tp: 'x' }]], [[]]])(
    'is rows of ranks where coordinates are missing or contradict each other (%#)',
    (coordinates) => {
      expect(gridOf(2, coordinates)).toMatchObject({ rows: 1, columns: 2, ranks: [0, 1] })
    },
  )

  it('takes many ranks', () => {
    const grid = gridOf(1000, [])
    expect([grid.rows, grid.columns, grid.ranks.at(-1)]).toEqual([63, 16, null])
    expect(gridOf(0, []).ranks).toEqual([])
  })
})
