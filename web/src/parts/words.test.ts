import { describe, expect, it } from 'vitest'
import { ranksText, several, spansOf } from './words'

describe('words', () => {
  it('count', () =>
    expect([0, 1, 1200].map((n) => several(n, 'step'))).toEqual(['0 steps', '1 step', '1,200 steps']))

  it('draw numbers together', () => {
    expect(spansOf([8, 0, 1, 2, 3, 3])).toBe('0-3, 8')
    expect(spansOf([0, 2, 4], 2)).toBe('0, 2, ...')
  })

  it('name ranks', () =>
    expect([[3], [3, 3], [1, 0], []].map((ranks) => ranksText(ranks))).toEqual([
      'rank 3',
      'rank 3',
      'ranks 0-1',
      'no rank',
    ]))
})
