/** Where lines of a grid stand, and what they are called. Pure. */

import { shown } from '../../parts/numbers'

export interface Tick {
  value: number
  label: string
}

/** Round values (1, 2 or 5 times a power of ten) from `low` to `high`, about `most` of them. */
export function niceTicks(low: number, high: number, most: number): Tick[] {
  const rough = (high - low) / Math.max(1, most)
  if (!(rough > 0) || !Number.isFinite(rough)) return []
  const power = 10 ** Math.floor(Math.log10(rough))
  const step = power * ([1, 2, 5, 10].find((digit) => digit * power >= rough * (1 - 1e-9)) ?? 10)
  const found: Tick[] = []
  for (let at = Math.ceil(low / step); at * step <= high; at++) {
    const value = Number((at * step).toPrecision(12))
    found.push({ value, label: shown(value) })
  }
  return found
}
