/** Number formats, and how much of a tensor each of them could hold. */

export interface NumberType {
  name: string
  about: string
  /** Exponents of the smallest number, of the smallest with all its digits, and of the largest. */
  smallest: number
  normal: number
  largest: number
}

export const TYPES: readonly NumberType[] = [
  { name: 'bf16', about: 'bfloat16', smallest: -133, normal: -126, largest: 127 },
  { name: 'fp16', about: 'half precision, up to 65504', smallest: -24, normal: -14, largest: 15 },
  { name: 'e5m2', about: 'FP8 of gradients, up to 57344', smallest: -16, normal: -14, largest: 15 },
  { name: 'e4m3', about: 'FP8 of weights and activations, up to 448', smallest: -9, normal: -6, largest: 8 },
]

/** How many values there are with each exponent, from `first` on; how many tiny ones, NaN and infinities beside them. */
export interface Exponents {
  first: number
  counts: readonly number[]
  /** Zeros, and what is smaller than 2^-126. */
  tiny: number
  special: number
}

export interface Fit {
  /** Shares of the values that are neither zero, nor NaN or infinite: they become zero, lose digits, are too large. */
  zero: number
  coarse: number
  over: number
  /** By which power of two they were multiplied. */
  shift: number
}

/** Bins of a frame: the first counts what is tiny, the last NaN and infinities. */
const BIAS = 127

export function exponentsOf(frames: readonly ArrayLike<number>[]): Exponents {
  const bins = new Float64Array(256)
  for (const frame of frames) for (let bin = 0; bin < bins.length; bin++) bins[bin]! += frame[bin] ?? 0
  const filled = [...bins.keys()].slice(1, -1).filter((bin) => bins[bin]! > 0)
  const [low, high] = [filled[0] ?? BIAS, filled.at(-1) ?? BIAS]
  return {
    first: low - BIAS,
    counts: [...bins.subarray(low, high + 1)],
    tiny: bins[0]!,
    special: bins[255]!,
  }
}

/**
 * What a type does to the values. `scaled`: after multiplying by the power of two that brings the largest just below the
 * type's largest, as recipes of FP8 do. By exponents only: rounding at the very ends may go either way.
 */
export function fitOf(type: NumberType, { first, counts }: Exponents, scaled: boolean): Fit {
  const last = counts.findLastIndex((count) => count > 0)
  const shift = scaled && last >= 0 ? type.largest - (first + last) : 0
  const found = { zero: 0, coarse: 0, over: 0 }
  let total = 0
  counts.forEach((count, at) => {
    const exponent = first + at + shift
    total += count
    // Half of the smallest number and more is rounded up to it.
    if (exponent < type.smallest - 1) found.zero += count
    else if (exponent < type.normal) found.coarse += count
    else if (exponent > type.largest) found.over += count
  })
  const share = (count: number): number => (total ? count / total : 0)
  return { zero: share(found.zero), coarse: share(found.coarse), over: share(found.over), shift }
}

/** All values. */
export function totalOf({ counts, tiny, special }: Exponents): number {
  return counts.reduce((sum, count) => sum + count, 0) + tiny + special
}

/** `2⁻³`. */
export function powerText(exponent: number): string {
  const digits = [...String(Math.abs(exponent))].map((digit) => '⁰¹²³⁴⁵⁶⁷⁸⁹'[Number(digit)]).join('')
  return `2${exponent < 0 ? '⁻' : ''}${digits}`
}

/** `12.3 %`, `0`, or `<0.001 %` of what is hardly any. */
export function percent(share: number): string {
  if (share === 0) return '0'
  const value = share * 100
  return value < 0.001 ? '<0.001 %' : `${Number(value.toPrecision(3))} %`
}
