/** What keys do on a map. Pure. */
import type { Cell } from './viewport'

export type Command =
  | { readonly kind: 'move'; readonly rows: number; readonly columns: number }
  | { readonly kind: 'zoom'; readonly factor: number }
  | { readonly kind: 'fit' | 'pick' | 'special' | 'leave' }

const STEP = 1.5
const FAR = 10

const ARROWS: Readonly<Record<string, readonly [rows: number, columns: number]>> = {
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
}

/** For the page's help. */
export const KEYS: readonly { key: string; help: string }[] = [
  { key: 'ArrowLeft', help: 'another cell; with shift ten cells on' },
  { key: '+', help: 'zoom in' },
  { key: '-', help: 'zoom out' },
  { key: '0', help: 'show all cells (also Home)' },
  { key: 'n', help: 'the next NaN or infinite cell' },
  { key: 'Enter', help: 'pick the cell' },
  { key: 'Escape', help: 'leave the map' },
]

export function commandOf(
  event: Pick<KeyboardEvent, 'key' | 'shiftKey' | 'ctrlKey' | 'metaKey' | 'altKey'>,
): Command | null {
  if (event.ctrlKey || event.metaKey || event.altKey) return null
  const arrow = ARROWS[event.key]
  if (arrow !== undefined) {
    const far = event.shiftKey ? FAR : 1
    return { kind: 'move', rows: arrow[0] * far, columns: arrow[1] * far }
  }
  switch (event.key) {
    case '+':
    case '=':
      return { kind: 'zoom', factor: STEP }
    case '-':
    case '_':
      return { kind: 'zoom', factor: 1 / STEP }
    case '0':
    case 'Home':
      return { kind: 'fit' }
    case 'n':
      return { kind: 'special' }
    case 'Enter':
      return { kind: 'pick' }
    case 'Escape':
      return { kind: 'leave' }
    default:
      return null
  }
}

/** The cell so many rows and columns away, no farther than the edges. */
export function moved(
  cell: Cell,
  rows: number,
  columns: number,
  grid: { width: number; height: number },
): Cell {
  const within = (index: number, count: number) => Math.min(count - 1, Math.max(0, index))
  return { row: within(cell.row + rows, grid.height), column: within(cell.column + columns, grid.width) }
}
