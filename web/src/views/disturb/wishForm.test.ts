import { describe, expect, it } from 'vitest'
import { EMPTY_WISH, readWish } from './wishForm'

describe('the form of one', () => {
  it.each([
    [
      { what: 'tiles', grid: '8 x 16' },
      { grid: [8, 16], reduction: 'mean' },
    ],
    [{ what: 'attention', heads: '0' }, { grid: [64, 64] }],
    [
      { what: 'attention', rows: '3,5' },
      { grid: [64, 64], rows: [3, 5] },
    ],
    [{ what: 'rows', rows: '' }, { rows: [0] }],
    [{ what: 'tokens', tokens: '0,-1' }, { tokens: [0, -1] }],
    [{ what: 'raw', bytes: '1000' }, { bytes: 1000 }],
    [{ what: 'pca' }, { components: 3 }],
    [{ what: 'statistics', grid: 'x' }, {}],
  ] as const)('%o', (changes, parameters) =>
    expect(readWish({ ...EMPTY_WISH, ...changes }).wish?.parameters).toEqual(parameters),
  )

  it.each([
    [{ every: '0' }, 'every'],
    [{ pattern: '' }, 'pattern'],
    [{ what: 'tiles', grid: '0x5' }, 'grid'],
    [{ what: 'tiles', grid: '1025x5' }, 'grid'],
    [{ what: 'raw', bytes: '99999999' }, 'bytes'],
    [{ what: 'pca', components: '17' }, 'components'],
    [{ heads: 'a' }, 'heads'],
  ] as const)('%o is refused', (changes, field) => {
    const { wish, problems } = readWish({ ...EMPTY_WISH, ...changes })
    expect([wish, problems[field] !== undefined]).toEqual([null, true])
  })
})
