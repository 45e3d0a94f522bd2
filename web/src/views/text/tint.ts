/** Colours behind tokens: the more unexpected, the more colour. Text on them keeps a contrast of 4.5 to 1. Pure. */

import { hexOfRgb, labOfLch, rgbOfLab, type Lch } from '../../draw/colours-oklab'
import type { Theme } from '../../state/theme.svelte'
import { surprise, type Answer } from './answers'

export type TintBy = 'surprise' | 'entropy' | 'none'

export const TINTS: readonly { value: TintBy; label: string }[] = [
  { value: 'surprise', label: 'how unexpected the token is' },
  { value: 'entropy', label: 'how undecided the model is' },
  { value: 'none', label: 'nothing' },
]

/** Bits from which on it is no darker (or lighter) any more: a probability of 0.1 %; entropy of as many tokens. */
export const MOST_BITS = 10

/** Of what is expected, and of what is not at all. */
const ENDS: Record<Theme, readonly [Lch, Lch]> = {
  dark: [
    [0.2, 0.01, 250],
    [0.5, 0.13, 45],
  ],
  light: [
    [0.96, 0.01, 250],
    [0.74, 0.13, 60],
  ],
}

/** `#rrggbb` for so many bits; beyond both ends it stays what it is there. */
export function tint(bits: number, theme: Theme): string {
  const share = Math.min(Math.max(bits / MOST_BITS, 0), 1) ** 0.75
  const [low, high] = ENDS[theme].map(labOfLch) as [Lch, Lch]
  const at = (axis: 0 | 1 | 2): number => low[axis] + (high[axis] - low[axis]) * share
  return hexOfRgb(rgbOfLab([at(0), at(1), at(2)]))
}

/** What a token is coloured for, in bits; null: nothing is known, or nothing wanted. */
export function bitsOf(answer: Answer | null, by: TintBy): number | null {
  if (!answer || by === 'none') return null
  const bits = by === 'entropy' ? answer.entropy / Math.LN2 : surprise(answer.asked?.probability ?? NaN)
  return Number.isNaN(bits) ? null : bits
}

/** Steps of the legend. */
export function legendOf(by: TintBy): { bits: number; label: string }[] {
  if (by === 'none') return []
  const label = by === 'surprise' ? (bits: number) => SHARES[bits] ?? '' : (bits: number) => `${bits} bits`
  return [0, 1, 3.3, 6.6, 10].map((bits) => ({ bits, label: label(bits) }))
}

const SHARES: Readonly<Record<number, string>> = {
  0: '100 %',
  1: '50 %',
  3.3: '10 %',
  6.6: '1 %',
  10: '0.1 % or less',
}
