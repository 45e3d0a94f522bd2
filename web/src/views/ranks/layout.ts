/** Where ranks stand in the grid: stages (pp) beside each other with their cp and tp inside, replicas (ep, dp) below. */

export type Coordinates = Readonly<Record<string, number>>

export interface Place {
  row: number
  column: number
}

export interface Layout {
  rows: number
  columns: number
  /** Of each rank, in their order. */
  places: Place[]
  rowLabels: string[]
  columnLabels: string[]
  /** Columns at which a stage begins, for the gaps between them. */
  begins: number[]
}

const COLUMN_AXES = ['pp', 'cp', 'tp']
const ROW_AXES = ['dp']
/** A grid so many times higher than wide is cut, and its parts are put beside each other. */
const SLENDER = 3
/** Ranks of a host, usually. */
const BESIDE = 8

export function layoutOf(ranks: readonly { rank: number; coordinates: Coordinates }[]): Layout {
  const axes = {
    columns: COLUMN_AXES.filter((axis) => varies(ranks, axis)),
    rows: rowAxes(ranks),
  }
  const columns = keysOf(ranks, axes.columns)
  const rows = keysOf(ranks, axes.rows)
  const places = ranks.map(({ coordinates }) => ({
    row: rows.place(coordinates),
    column: columns.place(coordinates),
  }))
  const taken = new Set(places.map(({ row, column }) => row * columns.count + column))
  if (!axes.rows.length && !axes.columns.length) return inRows(ranks)
  if (taken.size < ranks.length) return inRows(ranks)
  const begins = axes.columns[0] === 'pp' ? stageBegins(columns.keys) : []
  return folded({
    rows: rows.count,
    columns: columns.count,
    places,
    rowLabels: rows.keys.map((key) => labelOf(axes.rows, key)),
    columnLabels: columns.keys.map((key) => labelOf(axes.columns, key)),
    begins,
  })
}

/** Without coordinates: in their order, as many beside each other as a host has, or more where there are many. */
function inRows(ranks: readonly { rank: number }[]): Layout {
  const side = Math.ceil(Math.sqrt(ranks.length * SLENDER) / BESIDE) * BESIDE
  const columns = Math.max(Math.min(side, ranks.length), 1)
  const rows = Math.ceil(ranks.length / columns)
  return {
    rows,
    columns,
    places: ranks.map((_, at) => ({ row: Math.floor(at / columns), column: at % columns })),
    // In a row alone each rank says its own number.
    rowLabels: Array.from({ length: rows }, (_, row) => (rows > 1 ? String(ranks[row * columns]!.rank) : '')),
    columnLabels: Array.from({ length: columns }, (_, column) => (rows > 1 ? `+${column}` : '')),
    begins: [],
  }
}

/** A grid that is very high as several beside each other. */
function folded(layout: Layout): Layout {
  const { rows, columns } = layout
  if (rows <= SLENDER * columns || rows < 2 * BESIDE) return layout
  const folds = Math.ceil(Math.sqrt((rows * SLENDER) / (columns * 2)))
  const height = Math.ceil(rows / folds)
  const wide = Math.ceil(rows / height)
  const { rowLabels, columnLabels } = layout
  return {
    ...layout,
    rows: height,
    columns: columns * wide,
    places: layout.places.map(({ row, column }) => ({
      row: row % height,
      column: Math.floor(row / height) * columns + column,
    })),
    rowLabels: rowLabels.slice(0, height),
    columnLabels: Array.from({ length: columns * wide }, (_, at) => {
      const more = Math.floor(at / columns) * height
      return [more ? `+${more}` : '', columnLabels[at % columns]].filter(Boolean).join(' ')
    }),
    begins: Array.from({ length: wide - 1 }, (_, at) => (at + 1) * columns),
  }
}

/** Replicas; which experts (ep) a rank has usually follows from them, and has rows of its own where it does not. */
function rowAxes(ranks: readonly { coordinates: Coordinates }[]): string[] {
  const axes = ROW_AXES.filter((axis) => varies(ranks, axis))
  const fixed = [...COLUMN_AXES, ...axes]
  const seen = new Map<string, number | undefined>()
  for (const { coordinates } of ranks) {
    const key = fixed.map((axis) => coordinates[axis]).join()
    if (seen.has(key) && seen.get(key) !== coordinates['ep']) return [...axes, 'ep']
    seen.set(key, coordinates['ep'])
  }
  return axes
}

function varies(ranks: readonly { coordinates: Coordinates }[], axis: string): boolean {
  return new Set(ranks.map(({ coordinates }) => coordinates[axis])).size > 1
}

interface Keys {
  keys: number[][]
  count: number
  place: (coordinates: Coordinates) => number
}

/** The different values of some axes, in order. */
function keysOf(ranks: readonly { coordinates: Coordinates }[], axes: readonly string[]): Keys {
  const of = (coordinates: Coordinates): number[] => axes.map((axis) => coordinates[axis] ?? -1)
  const found = new Map(ranks.map(({ coordinates }) => [of(coordinates).join(), of(coordinates)]))
  const keys = [...found.values()].sort(compared)
  const places = new Map(keys.map((key, at) => [key.join(), at]))
  return { keys, count: keys.length, place: (coordinates) => places.get(of(coordinates).join()) ?? 0 }
}

function compared(one: readonly number[], other: readonly number[]): number {
  const at = one.findIndex((value, place) => value !== other[place])
  return at < 0 ? 0 : one[at]! - other[at]!
}

function labelOf(axes: readonly string[], key: readonly number[]): string {
  return axes.map((axis, at) => `${axis} ${key[at] === -1 ? '?' : key[at]}`).join(' ')
}

function stageBegins(keys: readonly (readonly number[])[]): number[] {
  return [...keys.keys()].filter((at) => at > 0 && keys[at]![0] !== keys[at - 1]![0])
}

/** `tp 1, dp 0, pp 3`: of the axes that the job has. */
export function placeText(coordinates: Coordinates, all: readonly { coordinates: Coordinates }[]): string {
  return ['tp', 'cp', 'ep', 'dp', 'pp']
    .filter((axis) => coordinates[axis] !== undefined && varies(all, axis))
    .map((axis) => `${axis} ${coordinates[axis]}`)
    .join(', ')
}
