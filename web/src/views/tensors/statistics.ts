/** What is said of a tensor at a step in numbers, from the vectors that ranks sent (see trimtab/scope/vector.py). Pure. */

import { numbersOf, type Frame } from '../../api/frames'

export interface Numbers {
  readonly elements: number
  readonly rms: number
  readonly absmax: number
  readonly nan: number
  readonly inf: number
}

/** Of all frames (microbatches and parts of the data) together; null: there are none. */
export function numbersOfAll(frames: readonly Frame[]): Numbers | null {
  if (!frames.length) return null
  let [elements, nan, inf, squares, absmax] = [0, 0, 0, 0, 0]
  for (const frame of frames) {
    const [n = 0, ofNan = 0, ofInf = 0, , sum = 0, , about = 0, , , low = 0, high = 0] = numbersOf(
      frame,
      'vector',
    )
    const shift = frame.arrays['shift'] ? (numbersOf(frame, 'shift')[0] ?? 0) : 0
    const finite = n - ofNan - ofInf
    elements += n
    nan += ofNan
    inf += ofInf
    // Sums are about the shift: (x - s)^2 + 2 s (x - s) + s^2 is x^2.
    squares += about + 2 * shift * sum + finite * shift * shift
    if (finite > 0) absmax = Math.max(absmax, Math.abs(low), Math.abs(high))
  }
  const finite = elements - nan - inf
  return {
    elements,
    nan,
    inf,
    rms: finite > 0 ? Math.sqrt(Math.max(squares, 0) / finite) : NaN,
    absmax: finite > 0 ? absmax : NaN,
  }
}
