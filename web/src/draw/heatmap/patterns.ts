/**
 * Patterns of cells without a finite value, so that they are told apart without colours: NaN is hatched this way (/), what
 * is infinite that way (\), missing is dotted. The same is in the shader (see shader.ts).
 */
import type { Special } from '../colours'

/** Device pixels from one stripe to the next. */
export const PERIOD = 6

/** Cells smaller than so many device pixels are drawn plain. */
export const LEAST_CELL = 6

/** Whether a device pixel has the second colour. */
export function inked(special: Special, x: number, y: number): boolean {
  if (special === 'nan') return (x + y) % PERIOD < 2
  if (special === 'infinite') return (x + (PERIOD - 1) * y) % PERIOD < 2
  return x % PERIOD < 2 && y % PERIOD < 2
}
