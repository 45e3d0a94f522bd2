/** What the heat map says in words, and what else is drawn on it. Pure. */
import type { Reading } from '../draw/heatmap/encode'
import type { Special } from '../draw/colours'
import type { Span } from '../draw/heatmap/scale'
import type { Cell } from '../draw/heatmap/viewport'

/** A line across the map. */
export interface HeatMarker {
  readonly axis: 'row' | 'column'
  /** Of the row or column; it may be cut, and is drawn through the cell's middle: 3.5 is the edge of 3 and 4. */
  readonly at: number
  readonly label: string
  /** `now`: what is shown elsewhere in the page; `event`: something happened; `edge`: here ends what belongs together. */
  readonly kind: 'now' | 'event' | 'edge'
}

export interface Words {
  readonly rowTitle: string
  readonly columnTitle: string
  rowLabel(row: number): string
  columnLabel(column: number): string
  valueLabel(value: number): string
  /** What a cell without a value is called. */
  readonly missingLabel: string
}

export interface CellText {
  readonly row: string
  readonly column: string
  readonly value: string
}

const SPECIAL = { nan: 'NaN', infinite: 'infinite' } as const

/** A cell in words. */
export function reading(cell: Cell, read: Reading, words: Words): CellText {
  return {
    row: named(words.rowTitle, words.rowLabel(cell.row)),
    column: named(words.columnTitle, words.columnLabel(cell.column)),
    value: valueText(read, words),
  }
}

/** Labels that say what they are of need no title. */
function named(title: string, label: string): string {
  return title === '' ? label : `${title} ${label}`
}

/** What was quantised is about so much. */
function valueText(read: Reading, { valueLabel: label, missingLabel }: Words): string {
  if (typeof read === 'string') return specialName(read, missingLabel)
  return read.exact || !Number.isFinite(read.value) ? label(read.value) : `≈ ${label(read.value)}`
}

export function specialName(special: Special, missingLabel: string): string {
  return special === 'missing' ? missingLabel : SPECIAL[special]
}

/** Significant digits that tell the ends of a span apart. */
export function digitsOf(span: Span | null): number {
  if (span === null || span.low === span.high) return 4
  const most = Math.max(Math.abs(span.low), Math.abs(span.high))
  const needed = 3 + Math.ceil(Math.log10(most / (span.high - span.low)))
  return Math.min(15, Math.max(4, needed || 4))
}
