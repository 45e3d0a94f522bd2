import { describe, expect, it } from 'vitest'
import { exampleOf, layoutOf, readBits, toggled, widthOf } from './bits'

describe('bits of a number', () => {
  it.each([
    ['float32', 32, 'sign', 'exponent[7]', 'mantissa[0]'],
    ['bfloat16', 16, 'sign', 'exponent[7]', 'mantissa[0]'],
    ['float16', 16, 'sign', 'exponent[4]', 'mantissa[0]'],
    ['float8_e4m3fn', 8, 'sign', 'exponent[3]', 'mantissa[0]'],
    ['float64', 64, 'sign', 'exponent[10]', 'mantissa[0]'],
    ['int16', 16, '15', '14', '0'],
  ])('%s', (dtype, width, first, second, last) => {
    const names = layoutOf(dtype).map((bit) => bit.name)
    expect([names.length, names[0], names[1], names.at(-1)]).toEqual([width, first, second, last])
  })

  it('knows nothing of a type that is unknown', () => {
    expect([widthOf('quaternion'), layoutOf('quaternion')]).toEqual([null, []])
  })

  it('is toggled by its number, by whichever name it was said', () => {
    const bit = layoutOf('bfloat16').find((one) => one.name === 'exponent[2]')!
    expect(toggled('3', bit)).toBe('3, 9')
    expect(toggled('3, 9', bit)).toBe('3')
    expect(toggled('exponent[2], 3', bit)).toBe('3')
  })

  it.each([
    ['30', 'float32', Infinity],
    ['31', 'float32', -1],
    ['0', 'float16', 1 + 2 ** -10],
    ['14', 'bfloat16', Infinity],
    ['13, 12, 11, 10, 9, 8, 7', 'bfloat16', 0],
    ['14, 0', 'bfloat16', NaN],
    ['23', 'float32', 0.5],
  ])('bits %s of 1 in %s flipped', (text, dtype, value) => expect(exampleOf(text, dtype)).toBe(value))

  it.each(['exponent', '99', 'exponent, 3'])('says nothing of what is drawn: %s', (text) =>
    expect(exampleOf(text, 'float32')).toBeNull(),
  )

  it('takes what the API takes', () => {
    expect(readBits('14, exponent[2], mantissa', 'bfloat16').value).toEqual([14, 'exponent[2]', 'mantissa'])
    expect(readBits('random', 'int8').value).toEqual(['random'])
    expect(readBits('63', '').value).toEqual([63])
  })

  it.each([
    ['16', 'bfloat16', /0 to 15/],
    ['exponent[8]', 'bfloat16', /has 8/],
    ['sign', 'int8', /no floating-point/],
    ['3, 3', 'float32', /twice/],
    ['<b>', 'float32', /<b> is no bit/],
    ['64', '', /0 to 63/],
  ])('refuses %s of %s', (text, dtype, line) => expect(readBits(text, dtype).problem).toMatch(line))
})
