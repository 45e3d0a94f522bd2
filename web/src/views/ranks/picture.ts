/** A grid of few ranks as a PNG. */

import { shown } from '../../parts/numbers'
import type { RankValue } from './deviation'
import type { Layout } from './layout'
import { inkOn, type Cell } from './shades'

const CELL = { width: 84, height: 44 }
const GAP = 4
const MARGIN = 14
const SHARP = 2
const FONT = '12px system-ui, sans-serif'

export function picture(
  title: string,
  ranks: readonly RankValue[],
  layout: Layout,
  cells: readonly Cell[],
): Promise<Blob> {
  const canvas = document.createElement('canvas')
  const context = canvas.getContext('2d')
  if (context === null) throw new Error('this browser has no room for the picture: close other pages')
  context.font = FONT
  const left = MARGIN + 8 + Math.max(0, ...layout.rowLabels.map((text) => context.measureText(text).width))
  const top = MARGIN + 44
  const width = Math.max(left + layout.columns * CELL.width, MARGIN + context.measureText(title).width * 1.1)
  canvas.width = (width + MARGIN) * SHARP
  canvas.height = (top + layout.rows * CELL.height + MARGIN) * SHARP
  const style = getComputedStyle(document.documentElement)
  const [surface, text] = ['--surface', '--text'].map((name) => style.getPropertyValue(name))
  context.scale(SHARP, SHARP)
  context.fillStyle = surface!
  context.fillRect(0, 0, canvas.width, canvas.height)
  context.fillStyle = text!
  context.textBaseline = 'middle'
  context.font = `bold ${FONT}`
  context.fillText(title, MARGIN, MARGIN + 6)
  context.font = FONT
  layout.rowLabels.forEach((label, row) => context.fillText(label, MARGIN, top + (row + 0.5) * CELL.height))
  context.textAlign = 'center'
  layout.columnLabels.forEach((label, column) =>
    context.fillText(label, left + (column + 0.5) * CELL.width, top - 12, CELL.width - GAP),
  )
  ranks.forEach((rank, at) =>
    drawCell(
      context,
      rank,
      cells[at]!,
      {
        x: left + layout.places[at]!.column * CELL.width,
        y: top + layout.places[at]!.row * CELL.height,
      },
      text!,
    ),
  )
  return new Promise((resolve, reject) =>
    canvas.toBlob((blob) =>
      blob ? resolve(blob) : reject(new Error('this browser could not make the picture')),
    ),
  )
}

function drawCell(
  context: CanvasRenderingContext2D,
  { rank, nan, inf }: RankValue,
  { number, colour }: Cell,
  { x, y }: { x: number; y: number },
  text: string,
): void {
  const [width, height] = [CELL.width - GAP, CELL.height - GAP]
  if (colour) {
    context.fillStyle = colour
    context.fillRect(x, y, width, height)
  }
  context.strokeStyle = text
  context.setLineDash(nan || inf ? [4, 3] : [])
  context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1)
  context.fillStyle = colour ? inkOn(colour) : text
  const ill = [nan ? 'NaN' : '', inf ? 'inf' : ''].filter(Boolean).join(' ')
  context.fillText(`${rank}${ill && ` (${ill})`}`, x + width / 2, y + height * 0.3)
  context.fillText(number === null ? '–' : shown(number, 3), x + width / 2, y + height * 0.7)
}
