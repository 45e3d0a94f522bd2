/** Which bit of a number means what, for each floating-point format; bits count from 0, the lowest. */

import type { Read } from './lists'

export type BitField = 'sign' | 'exponent' | 'mantissa' | 'whole'

interface Format {
  mantissa: number
  exponent: number
}

const FORMATS: Readonly<Record<string, Format>> = {
  float64: { mantissa: 52, exponent: 11 },
  float32: { mantissa: 23, exponent: 8 },
  bfloat16: { mantissa: 7, exponent: 8 },
  float16: { mantissa: 10, exponent: 5 },
  float8_e4m3fn: { mantissa: 3, exponent: 4 },
  float8_e4m3fnuz: { mantissa: 3, exponent: 4 },
  float8_e5m2: { mantissa: 2, exponent: 5 },
  float8_e5m2fnuz: { mantissa: 2, exponent: 5 },
}
const INTEGERS: Readonly<Record<string, number>> = {
  bool: 8,
  uint8: 8,
  int8: 8,
  int16: 16,
  int32: 32,
  int64: 64,
}
/** Formats whose infinities and NaN are where IEEE 754 has them. */
const IEEE = ['float64', 'float32', 'bfloat16', 'float16', 'float8_e5m2']

/** What can be said in place of a number: one of these bits, drawn for each element. */
export const DRAWN = ['random', 'sign', 'exponent', 'mantissa'] as const
const MOST_BITS = 64

/** How many bits a type has; null: unknown. */
export function widthOf(dtype: string): number | null {
  const format = FORMATS[dtype]
  return format ? format.mantissa + format.exponent + 1 : (INTEGERS[dtype] ?? null)
}

export interface Bit {
  bit: number
  field: BitField
  /** `sign`, `exponent[2]`, `mantissa[0]`; the number alone for what is no floating-point number. */
  name: string
}

/** All bits of a type, from the highest. */
export function layoutOf(dtype: string): Bit[] {
  const width = widthOf(dtype) ?? 0
  return Array.from({ length: width }, (_, index) => bitOf(width - 1 - index, dtype))
}

function bitOf(bit: number, dtype: string): Bit {
  const format = FORMATS[dtype]
  if (!format) return { bit, field: 'whole', name: String(bit) }
  if (bit < format.mantissa) return { bit, field: 'mantissa', name: `mantissa[${bit}]` }
  if (bit < format.mantissa + format.exponent) {
    return { bit, field: 'exponent', name: `exponent[${bit - format.mantissa}]` }
  }
  return { bit, field: 'sign', name: 'sign' }
}

/** The words of a choice: `14, exponent[2], mantissa`. */
export function wordsOf(text: string): string[] {
  return text
    .split(',')
    .map((word) => word.trim())
    .filter(Boolean)
}

/** What the API takes for `bits`; `dtype` '': of whatever type. */
export function readBits(text: string, dtype: string): Read<(number | string)[]> {
  const words = wordsOf(text)
  if (!words.length || words.length > MOST_BITS) return { problem: 'Choose 1 to 64 bits' }
  if (new Set(words).size < words.length) return { problem: 'One bit is said twice' }
  const format = FORMATS[dtype]
  const width = widthOf(dtype)
  const found: (number | string)[] = []
  for (const word of words) {
    const exact = /^(exponent|mantissa)\[(\d{1,2})\]$/.exec(word)
    if (/^\d{1,2}$/.test(word)) {
      const most = (width ?? MOST_BITS) - 1
      if (Number(word) > most)
        return { problem: `Bit ${word} is not there: ${dtype || 'a number'} has 0 to ${most}` }
      found.push(Number(word))
      continue
    }
    if (!exact && !(DRAWN as readonly string[]).includes(word)) {
      return {
        problem: `${word.slice(0, 24)} is no bit: numbers, ${DRAWN.join(', ')}, or one as exponent[2]`,
      }
    }
    if (dtype && !format && word !== 'random')
      return { problem: `${dtype} is no floating-point number: it has no ${word}` }
    if (exact && format && Number(exact[2]) >= format[exact[1] as 'exponent' | 'mantissa']) {
      return {
        problem: `${word} is not there: ${dtype} has ${format[exact[1] as 'exponent' | 'mantissa']} of them`,
      }
    }
    found.push(word)
  }
  return { value: found }
}

/** The words with this bit added, or taken away, whichever way it was said. */
export function toggled(text: string, bit: Bit): string {
  const words = wordsOf(text)
  const without = words.filter((word) => word !== String(bit.bit) && word !== bit.name)
  return (without.length < words.length ? without : [...words, String(bit.bit)]).join(', ')
}

export function isChosen(text: string, bit: Bit): boolean {
  const words = wordsOf(text)
  return words.includes(String(bit.bit)) || words.includes(bit.name)
}

/** What 1 becomes when exactly these bits are flipped; null: it is drawn which, or the format is a special one. */
export function exampleOf(text: string, dtype: string): number | null {
  const format = FORMATS[dtype]
  if (!format || !IEEE.includes(dtype)) return null
  const layout = layoutOf(dtype)
  const chosen = layout.filter((bit) => isChosen(text, bit))
  if (!chosen.length || chosen.length < wordsOf(text).length) return null
  const bias = 2 ** (format.exponent - 1) - 1
  let exponent = bias
  let mantissa = 0
  let sign = 1
  for (const { bit, field } of chosen) {
    if (field === 'sign') sign = -1
    else if (field === 'mantissa') mantissa += 2 ** bit
    else exponent ^= 2 ** (bit - format.mantissa)
  }
  const fraction = mantissa / 2 ** format.mantissa
  if (exponent === 2 ** format.exponent - 1) return mantissa ? NaN : sign * Infinity
  return exponent ? sign * (1 + fraction) * 2 ** (exponent - bias) : sign * fraction * 2 ** (1 - bias)
}
