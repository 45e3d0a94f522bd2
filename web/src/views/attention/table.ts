/** A head as a table. Pure. */

import { csvOf } from '../../parts/csv'
import type { AttentionMap, Grid, Span } from './map'
import { placed, textOf } from './words'

/** Rows are queries, columns keys; masked cells are empty. The first column and line say positions, the second ones texts. */
export function tableOf(map: AttentionMap, grid: Grid): string {
  const told = map.texts.length > 0
  const name = (span: Span): string => placed(span)
  const rows = grid.queries.map((query, row) => [
    name(query),
    ...(told ? [textOf(map, query)] : []),
    ...Array.from({ length: grid.columns }, (_, column) => {
      const at = row * grid.columns + column
      return grid.missing[at] ? null : (grid.values[at] as number)
    }),
  ])
  const keys = ['query \\ key', ...(told ? ['token'] : []), ...grid.keys.map(name)]
  const texts = told ? [['', '', ...grid.keys.map((key) => textOf(map, key))]] : []
  return csvOf(keys, [...texts, ...rows])
}
