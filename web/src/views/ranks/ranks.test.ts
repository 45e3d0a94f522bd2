import { describe, expect, it } from 'vitest'
import { deviationsOf, unlike, type RankValue } from './deviation'
import { layoutOf, placeText } from './layout'
import { cellsOf, inkOn, rangeOf } from './shades'
import { nameOf, ofEveryStage, usualTap } from './taps'

/** Ranks as Megatron-Core numbers them: tp, then cp, then dp, then pp. */
function job(
  { tp = 1, cp = 1, dp = 1, pp = 1, ep = 1 },
  value: (rank: number) => number | null = () => 1,
): RankValue[] {
  return Array.from({ length: tp * cp * dp * pp }, (_, rank) => ({
    rank,
    coordinates: {
      tp: rank % tp,
      cp: Math.floor(rank / tp) % cp,
      dp: Math.floor(rank / tp / cp) % dp,
      pp: Math.floor(rank / tp / cp / dp),
      ep: Math.floor(rank / tp) % ep,
      vpp: 0,
    },
    value: value(rank),
    nan: 0,
    inf: 0,
    tap: 'layers.0.output',
  }))
}

describe('the grid', () => {
  it('has replicas below each other, stages beside each other with their shards', () => {
    const found = layoutOf(job({ tp: 2, dp: 2, pp: 2 }))
    expect([found.rows, found.columns]).toEqual([2, 4])
    expect(found.columnLabels).toEqual(['pp 0 tp 0', 'pp 0 tp 1', 'pp 1 tp 0', 'pp 1 tp 1'])
    expect(found.rowLabels).toEqual(['dp 0', 'dp 1'])
    expect(found.places[6]).toEqual({ row: 1, column: 2 }) // tp 0, dp 1, pp 1
    expect(found.begins).toEqual([2])
  })

  it.each([
    { tp: 8, dp: 125 },
    { tp: 1, dp: 4096 },
    { tp: 4, cp: 2, dp: 16, pp: 8, ep: 8 },
    { tp: 8, pp: 128, dp: 16 },
    { pp: 5 },
    { dp: 3 },
    {},
  ])('has a place for every rank of %o, and not too slender', (sizes) => {
    const ranks = job(sizes)
    const { rows, columns, places, rowLabels, columnLabels } = layoutOf(ranks)
    expect(new Set(places.map(({ row, column }) => row * columns + column)).size).toBe(ranks.length)
    expect(places.every(({ row, column }) => row >= 0 && row < rows && column >= 0 && column < columns)).toBe(
      true,
    )
    expect([rowLabels.length, columnLabels.length]).toEqual([rows, columns])
    expect(rows).toBeLessThanOrEqual(Math.max(columns * 3, 15))
  })

  it('is in rows of hosts where nothing, or not enough, is known of places', () => {
    const nowhere = job({ dp: 20 }).map((rank) => ({ ...rank, coordinates: {} }))
    expect(layoutOf(nowhere)).toMatchObject({ rows: 3, columns: 8, rowLabels: ['0', '8', '16'] })
    const half = job({ tp: 2, dp: 2, pp: 2 }).map((rank) => ({ ...rank, coordinates: { tp: rank.rank % 2 } }))
    const { places, columns } = layoutOf(half)
    expect(new Set(places.map(({ row, column }) => row * columns + column)).size).toBe(8)
  })

  it('names the axes that the job has', () => {
    const ranks = job({ tp: 2, pp: 2 })
    expect(placeText(ranks[3]!.coordinates, ranks)).toBe('tp 1, pp 1')
  })
})

describe('deviations', () => {
  it('are from the same stage and shard, in median deviations', () => {
    // tp 1 is ten times tp 0: no rank is unlike its peers, but rank 10 (tp 0) is.
    const ranks = job(
      { tp: 2, dp: 8 },
      (rank) => (rank % 2 ? 10 : 1) * (1 + 0.01 * ((rank >> 1) % 4)) + (rank === 10 ? 3 : 0),
    )
    const { deviations, what } = deviationsOf(ranks)
    expect(what).toContain('same stage and shard')
    expect(unlike(ranks, deviations, 5)).toEqual([10])
    expect(deviations[11]).toBeCloseTo(deviations[3]!, 6)
  })

  it('are from the stage where there are few replicas', () => {
    const ranks = job({ tp: 2, dp: 2, pp: 2 }, (rank) => (rank < 4 ? 1 : 100))
    expect(deviationsOf(ranks)).toEqual({
      deviations: new Array(8).fill(0),
      what: 'the ranks of the same stage',
    })
  })

  it('of equal values are large for the one that differs at all', () => {
    const ranks = job({ dp: 8 }, (rank) => (rank === 5 ? 1.01 : 1))
    expect(unlike(ranks, deviationsOf(ranks).deviations, 5)).toEqual([5])
  })

  it('put NaN first, and know of ranks without a value', () => {
    const ranks = job({ dp: 8 }, (rank) => (rank === 5 ? 9 : rank === 6 ? null : 1))
    ranks[2]!.nan = 4
    const { deviations } = deviationsOf(ranks)
    expect(deviations[6]).toBeNull()
    expect(unlike(ranks, deviations, 5)).toEqual([2, 5])
  })
})

describe('colours', () => {
  it('span the values, and deviations on both sides of zero', () => {
    expect(rangeOf([3, null, 1], 'value')).toEqual([1, 3])
    expect(rangeOf([-0.5, 0.5], 'deviation')).toEqual([-3, 3])
    expect(rangeOf([-0.5, 90], 'deviation')).toEqual([-8, 8])
    expect(rangeOf([null], 'value')).toEqual([0, 0])
  })

  it('differ by value, and leave out what has none', () => {
    const [low, none, high] = cellsOf([0, null, 1], 'value', 'dark')
    expect(none?.colour).toBeUndefined()
    expect(low?.colour).toMatch(/^#[0-9a-f]{6}$/)
    expect(low?.colour).not.toBe(high?.colour)
  })

  it('have readable text on them', () => {
    expect([inkOn('#000000'), inkOn('#ffffff'), inkOn('#00308f')]).toEqual(['white', 'black', 'white'])
  })
})

describe('tensors', () => {
  const tap = (name: string, ranks: number[], what = ['statistics']) => ({ name, ranks, what })
  const all = [
    tap('embedding.output', [0, 1]),
    tap('layers.0.output', [0, 1]),
    tap('layers.1.output', [0, 1]),
    tap('layers.2.output', [2, 3]),
    tap('layers.3.output', [2, 3]),
    tap('layers.3.mlp.output', [2, 3], ['tiles']),
    tap('logits', [2, 3]),
  ]
  it('are chosen so that a layer is seen', () => {
    expect(usualTap(all)).toBe('layers.3.output')
    expect(usualTap([tap('loss', [0])])).toBe('loss')
    expect(usualTap([tap('a', [0], ['tiles'])])).toBe('')
  })

  it('are the last of each stage', () => {
    expect(ofEveryStage('layers.0.output', all)).toEqual(['layers.1.output', 'layers.3.output'])
    expect(ofEveryStage('logits', all)).toEqual(['logits'])
    expect(ofEveryStage('layers.7.output', all)).toEqual(['layers.7.output'])
    expect([nameOf(['logits']), nameOf(['layers.1.output', 'layers.3.output'])]).toEqual([
      'logits',
      'layers.*.output',
    ])
  })
})
