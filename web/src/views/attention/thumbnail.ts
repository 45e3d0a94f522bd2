/** A head as a small picture. Pure, but for the drawing at the end. */

import { colourTable, ENTRIES, specialColour, type Theme } from '../../draw/colours'
import { curveOf, type Scale } from '../../draw/heatmap/scale'
import type { Grid } from './map'

export const SIDE = 64

/** Pixels of a head: the largest value of each, so that a narrow line is not lost; -1 where all is masked. */
export function pooled(grid: Grid, side = SIDE): { rows: number; columns: number; values: Float32Array } {
  const rows = Math.min(side, grid.rows)
  const columns = Math.min(side, grid.columns)
  const values = new Float32Array(rows * columns).fill(-1)
  const across = Int32Array.from({ length: grid.columns }, (_, at) =>
    Math.floor((at * columns) / grid.columns),
  )
  for (let row = 0; row < grid.rows; row++) {
    const to = Math.floor((row * rows) / grid.rows) * columns
    const from = row * grid.columns
    for (let column = 0; column < grid.columns; column++) {
      const at = to + (across[column] as number)
      const value = grid.values[from + column] as number
      if (value > (values[at] as number) && !grid.missing[from + column]) values[at] = value
    }
  }
  return { rows, columns, values }
}

/** RGBA of a head; each has its own range of colours, as its map has. */
export function pixels(grid: Grid, scale: Scale, theme: Theme): ImageData {
  const { rows, columns, values } = pooled(grid)
  const table = colourTable('sequential', theme)
  const masked = specialColour('missing', theme).map((channel) => Math.round(channel * 255))
  const largest = values.reduce((most, value) => Math.max(most, value), 0)
  const curve = curveOf(scale, { low: 0, high: largest || 1 })
  const image = new ImageData(columns, rows)
  values.forEach((value, at) => {
    const entry = Math.round(Math.min(1, Math.max(0, curve.position(value))) * (ENTRIES - 1)) * 4
    image.data.set(value < 0 ? [...masked, 255] : table.subarray(entry, entry + 4), at * 4)
  })
  return image
}
