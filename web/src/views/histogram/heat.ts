/** Histograms over steps as a grid: exponents below each other, the largest first. */

import type { Answer } from '../../api/client'
import { kept, type StepGrid } from '../../parts/stepMap'

export interface ExponentGrid extends StepGrid {
  /** Of the first row. */
  top: number
}

/** Shares of all values of the step. */
export function exponentGrid(answer: Answer<'/runs/{run}/histogram'>): ExponentGrid {
  const { columns, counts, exponent, tiny, special, bucket_steps: width } = answer
  const rows = counts[0]?.length ?? 0
  const whole = {
    values: new Float32Array(rows * columns.length),
    special: new Uint8Array(rows * columns.length),
  }
  counts.forEach((column, at) => {
    const total = column.reduce((sum, count) => sum + count, 0) + tiny[at]! + special[at]!
    if (!total) return
    column.forEach((count, low) => {
      const cell = (rows - 1 - low) * columns.length + at
      whole.values[cell] = count / total
      whole.special[cell] = 1
    })
  })
  return { ...kept(rows, columns, whole), width, names: [], top: exponent + rows - 1 }
}
