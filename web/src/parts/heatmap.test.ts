import { expect, it } from 'vitest'
import { endLabels } from '../draw/heatmap/legend'
import { digitsOf, reading } from './heatmap'

const WORDS = {
  rowTitle: 'layer',
  columnTitle: 'step',
  rowLabel: (row: number) => `L${row}`,
  columnLabel: (column: number) => String(column * 10),
  valueLabel: (value: number) => value.toFixed(2),
  missingLabel: 'masked',
}

it('cells are read in words', () => {
  const cell = { row: 2, column: 7 }
  expect(reading(cell, { value: 0.5, exact: true }, WORDS)).toEqual({
    row: 'layer L2',
    column: 'step 70',
    value: '0.50',
  })
  expect(reading(cell, { value: 0.5, exact: false }, WORDS).value).toBe('≈ 0.50')
  expect(reading(cell, { value: NaN, exact: true }, WORDS).value).toBe('NaN')
  expect(reading(cell, 'missing', WORDS).value).toBe('masked')
  expect(reading(cell, 'nan', WORDS).value).toBe('NaN')
  expect(reading(cell, 'nan', { ...WORDS, rowTitle: '' }).row).toBe('L2')
})

it('values are written with as many digits as tell the ends apart', () => {
  expect(digitsOf(null)).toBe(4)
  expect(digitsOf({ low: 0, high: 5 })).toBe(4)
  expect(digitsOf({ low: 1000, high: 1000.1 })).toBe(8)
  expect(digitsOf({ low: 0, high: 0 })).toBe(4)
  expect(digitsOf({ low: 1, high: 1 + 2 ** -52 })).toBe(15)
})

it('a legend says the ends, the middle, and where there is more beyond', () => {
  const label = (value: number) => String(value)
  expect(endLabels({ low: -2, high: 2.0001 }, 'linear', 'extremes', label)).toEqual({
    low: '-2',
    middle: '0',
    high: '2.0001',
  })
  expect(endLabels({ low: 0, high: 4 }, 'sqrt', [0, 4], label)).toEqual({
    low: '≤ 0',
    middle: '1',
    high: '≥ 4',
  })
  expect(endLabels({ low: 1, high: 100 }, 'log', 'robust', (value) => value.toFixed(1)).middle).toBe('10.0')
})
