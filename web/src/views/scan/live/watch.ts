/** What watch says of a running job, as the page shows it. Texts and fields of events come from elsewhere. */

import { clean } from '../clean'

export interface Coordinates {
  tp?: number
  cp?: number
  dp?: number
  pp?: number
}

export interface Alarm {
  says: string
  ranks: number[]
  /** First step of which it is true. */
  since: number | null
}

export interface News {
  kind: string
  step: number | null
  at: Date | null
  lines: string[]
}

/** Ranks laid out for the eye. */
export interface Grid {
  rows: number
  columns: number
  /** Rank of each cell, row by row; null: none. */
  ranks: (number | null)[]
  rowLabels: string[]
  columnLabels: string[]
  rowTitle: string
  columnTitle: string
}

/** A rank that exceeds its peers by half has the strongest colour. */
export const LARGEST = 0.5
const MOST_LINES = 20
/** Ranks in a row where nobody knows how they are laid out. */
const WIDTH = 16

export function alarmOf(value: unknown): Alarm {
  const said = fields(value)
  return { says: text(said['says']), ranks: wholes(said['ranks']), since: whole(said['since']) }
}

export function newsOf(value: unknown): News {
  const said = fields(value)
  const nanoseconds = said['unix_ns']
  const at = typeof nanoseconds === 'number' ? new Date(nanoseconds / 1e6) : null
  const lines = typeof said['says'] === 'string' ? said['says'].split('\n').slice(0, MOST_LINES) : []
  return {
    kind: text(said['event']),
    step: whole(said['step']),
    at: at && Number.isNaN(at.getTime()) ? null : at,
    lines: lines.map(clean),
  }
}

/** The last hang that was told, if the job hangs. */
export function hangOf(news: readonly News[]): News | null {
  return news.findLast((one) => one.kind === 'hang') ?? null
}

/** Stages and replicas below each other, tensor and context parallel ranks beside each other; else rows of ranks. */
export function gridOf(ranks: number, coordinates: readonly unknown[]): Grid {
  const places = Array.from({ length: ranks }, (_, rank) => placeOf(coordinates[rank]))
  const known = places.every((place): place is Place => place !== null)
  const laid = known ? laidOut(places) : null
  return laid ?? inRows(ranks)
}

interface Place {
  row: string
  column: string
  order: readonly [number, number, number, number]
}

function placeOf(value: unknown): Place | null {
  if (typeof value !== 'object' || value === null) return null
  const { tp = 0, cp = 0, dp = 0, pp = 0 } = value as Coordinates
  if (![tp, cp, dp, pp].every((at) => Number.isSafeInteger(at))) return null
  return { row: `PP${pp} DP${dp}`, column: cp ? `TP${tp} CP${cp}` : `TP${tp}`, order: [pp, dp, cp, tp] }
}

/** Null where two ranks would lie on one another. */
function laidOut(places: readonly Place[]): Grid | null {
  const sorted = [...places].sort((a, b) => compared(a.order, b.order))
  const rowLabels = [...new Set(sorted.map((place) => place.row))]
  const columnLabels = [...new Set(sorted.map((place) => place.column))]
  const ranks: (number | null)[] = Array(rowLabels.length * columnLabels.length).fill(null)
  for (const [rank, place] of places.entries()) {
    const cell = rowLabels.indexOf(place.row) * columnLabels.length + columnLabels.indexOf(place.column)
    if (ranks[cell] !== null) return null
    ranks[cell] = rank
  }
  const [rows, columns] = [rowLabels.length, columnLabels.length]
  return {
    rows,
    columns,
    ranks,
    rowLabels,
    columnLabels,
    rowTitle: 'place',
    columnTitle: 'tensor parallel',
  }
}

function compared(a: readonly number[], b: readonly number[]): number {
  const at = a.findIndex((value, place) => value !== b[place])
  return at < 0 ? 0 : (a[at] as number) - (b[at] as number)
}

function inRows(ranks: number): Grid {
  const columns = Math.min(WIDTH, Math.max(ranks, 1))
  const rows = Math.ceil(ranks / columns)
  return {
    rows,
    columns,
    ranks: Array.from({ length: rows * columns }, (_, at) => (at < ranks ? at : null)),
    rowLabels: Array.from({ length: rows }, (_, row) => `${row * columns} on`),
    columnLabels: Array.from({ length: columns }, (_, column) => `+${column}`),
    rowTitle: 'ranks',
    columnTitle: 'rank',
  }
}

/** A log ratio as a share: 0.4 is 49 % more. */
export function shareOf(excess: number | null): number | null {
  return excess === null ? null : Math.expm1(excess)
}

function fields(value: unknown): Record<string, unknown> {
  return typeof value === 'object' && value !== null ? (value as Record<string, unknown>) : {}
}

function text(value: unknown): string {
  return typeof value === 'string' ? clean(value) : ''
}

function whole(value: unknown): number | null {
  return typeof value === 'number' && Number.isSafeInteger(value) && value >= 0 ? value : null
}

function wholes(value: unknown): number[] {
  return Array.isArray(value) ? value.filter((one): one is number => whole(one) !== null) : []
}
