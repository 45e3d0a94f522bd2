import { describe, expect, it } from 'vitest'
import { passText } from './form'
import { apart } from './pairs'
import { elementsText, onEach, rowsOf, type Preview } from './preview'

const touched = (at_most: boolean) => ({
  ...{ tap: 'parameters.w', kind: 'parameter', shape: [128, 64], dtype: 'float32', note: '' },
  ...{ elements: 1, at_most },
})
const preview = (at_most: boolean) =>
  ({ touched: { 0: [touched(at_most)], 1: [touched(at_most)] } }) as unknown as Preview

describe('a preview', () => {
  it('of one element of a tensor that is cut does not say one of each part', () => {
    const rows = rowsOf(preview(true))
    expect(rows.map((row) => [row.ranks, onEach(row)])).toEqual([[[0, 1], 'at most 1']])
    expect(elementsText(rows, { elements: 1 })).toBe('1 of each tensor, on the ranks that hold them')
  })

  it('says how many of what is whole, or not known', () => {
    const [row] = rowsOf(preview(false))
    expect([onEach(row!), onEach({ ...row!, elements: null })]).toEqual(['1', ''])
  })
})

describe('a paired run', () => {
  it.each([
    [0, 0, 'the first of them'],
    [2, 2, 'step 2 of them, counted from 0'],
    [0, 3, 'steps 0-3 of them, counted from 0'],
  ])('disturbs steps %i to %i in words', (first, last, text) => expect(passText({ first, last })).toBe(text))

  it.each([
    [2.352, 2.352, ['2.352', '2.352']],
    [2.3521, 2.35211, ['2.3521', '2.35211']],
    [1, null, ['1', 'not finite']],
    [0.1, 0.1 + 1e-17, ['0.1', '0.1']],
  ])('tells %d from %d', (clean, disturbed, texts) => expect(apart(clean, disturbed)).toEqual(texts))
})
