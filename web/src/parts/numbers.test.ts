import { describe, expect, it } from 'vitest'
import { bytes, seconds, shown } from './numbers'

describe('numbers as text', () => {
  it.each([
    [0, '0'],
    [1.5, '1.5'],
    [-0.25, '−0.25'],
    [1234.5, '1235'],
    [0.00001234, '1.234e−5'],
    [1234567, '1.235e6'],
    [NaN, 'NaN'],
    [Infinity, 'infinity'],
    [-Infinity, '−infinity'],
  ])('%s is %s', (value, text) => expect(shown(value)).toBe(text))

  it('says that there is nothing', () => expect(shown(null)).toBe('nothing'))

  it('chooses units', () => {
    expect([bytes(12), bytes(1500), bytes(2.5e9)]).toEqual(['12 B', '1.50 kB', '2.50 GB'])
    expect([seconds(2e-6), seconds(0.02), seconds(3), seconds(600), seconds(9000)]).toEqual([
      '2 µs',
      '20 ms',
      '3 s',
      '10 min',
      '2.5 h',
    ])
  })
})
