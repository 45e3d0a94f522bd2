/** A statistic of many rows (layers, ranks) over steps, as a heat map shows it. */

import type { Frame } from '../api/frames'
import { numbersOf } from '../api/frames'
import { holesOf } from '../draw/series/table'
import { placeUpTo, type Span } from '../draw/series/series'

export interface StepGrid {
  rows: number
  /** First step of each column; negative where there was nothing for a while. */
  steps: number[]
  /** Steps of a column. */
  width: number
  values: Float32Array
  /** 1 where there is nothing. */
  missing: Uint8Array
  /** Names of the rows, where the server has said them. */
  names: string[]
}

const [THERE, NAN, INFINITE] = [1, 2, 4]

/** Of the frames of a matrix. Where a column has a NaN (or an infinity) it is shown as such: nothing is hidden by a mean. */
export function gridOf(frames: readonly Frame[]): StepGrid {
  const about = frames[0]?.meta ?? {}
  const [first, last] = [Number(about['first'] ?? 0), Number(about['last'] ?? -1)]
  const width = Number(about['bucket_steps'] ?? 1)
  const columns = Math.floor((last - first) / width) + 1
  const rows = Number(about['all_rows'] ?? 0)
  const whole = { values: new Float32Array(rows * columns), special: new Uint8Array(rows * columns) }
  const names: string[] = []
  for (const frame of frames) {
    const at = Number(frame.meta['first_row']) * columns
    whole.values.set(numbersOf(frame, 'values'), at)
    whole.special.set(frame.arrays['special']!.values as Uint8Array, at)
    names.push(...(frame.meta['rows'] as string[]))
  }
  const steps = Array.from({ length: columns }, (_, column) => first + column * width)
  return { ...kept(rows, steps, whole), width, names: names.length === rows ? names : [] }
}

/** Columns in which any row has something, and an empty one for each hole between them. */
export function kept(
  rows: number,
  steps: readonly number[],
  { values, special }: { values: Float32Array; special: Uint8Array },
): Pick<StepGrid, 'rows' | 'steps' | 'values' | 'missing'> {
  const columns = steps.length
  const there = new Uint8Array(columns)
  for (let at = 0; at < special.length; at++) if (special[at]) there[at % columns] = 1
  const filled = [...steps.keys()].filter((column) => there[column])
  const holes = new Set(holesOf(filled.map((column) => steps[column]!)))
  const chosen = filled.flatMap((column) => (holes.has(steps[column]! + 1) ? [column, -1] : [column]))
  const found = {
    rows,
    steps: chosen.map((column) => steps[column] ?? -1),
    values: new Float32Array(rows * chosen.length),
    missing: new Uint8Array(rows * chosen.length),
  }
  for (let row = 0, to = 0; row < rows; row++) {
    for (const column of chosen) {
      const flags = column < 0 ? 0 : special[row * columns + column]!
      found.missing[to] = flags & THERE ? 0 : 1
      found.values[to++] = flags & NAN ? NaN : flags & INFINITE ? Infinity : values[row * columns + column]!
    }
  }
  return found
}

/** The logarithmic scale that suits the values: on both sides of zero where not all are positive. */
export function logScale({ values, missing }: Pick<StepGrid, 'values' | 'missing'>): 'log' | 'symlog' {
  return values.every((value, cell) => missing[cell] || value > 0 || Number.isNaN(value)) ? 'log' : 'symlog'
}

type Columns = Pick<StepGrid, 'steps' | 'width'>

/** The column of a step, which may lie before all (-1) or in a hole. */
export function columnOf(columns: Columns, step: number): number {
  return placeUpTo(ascending(columns), step)
}

/** Steps with the begins of holes filled in. */
function ascending({ steps, width }: Columns): number[] {
  return steps.map((step, column) => (step < 0 ? steps[column - 1]! + width : step))
}

/** Steps of some columns, from one to another. */
export function spanOfColumns(columns: Columns, from: number, to: number): Span {
  const known = ascending(columns)
  const inside = (column: number): number => Math.min(Math.max(column, 0), known.length - 1)
  const first = known[inside(from)] ?? 0
  return [first, Math.max((known[inside(to)] ?? 0) + columns.width - 1, first)]
}

/** What a column is called. */
export function columnLabel({ steps, width }: Columns, column: number): string {
  const step = steps[column]
  if (step === undefined) return ''
  return step < 0 ? '(nothing)' : width > 1 ? `${step}–${step + width - 1}` : String(step)
}
