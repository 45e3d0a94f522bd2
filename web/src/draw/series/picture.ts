/** A chart as a PNG, with its title and legend. */

import type { Inks } from './ink'
import type { Paint } from './paint'

export interface Entry {
  label: string
  paint: Paint | null
}

const MARGIN = 12
const LINE = 18
const SWATCH = 24
const FONT = '12px system-ui, sans-serif'

/** `plot`: what is on the page, of `width` CSS pixels; `now`: where the line of the step shown is, in these. */
export function picture(
  plot: HTMLCanvasElement,
  width: number,
  { title, entries, now, inks }: { title: string; entries: readonly Entry[]; now: number | null; inks: Inks },
): Promise<Blob> {
  const scale = plot.width / width
  const canvas = document.createElement('canvas')
  const context = canvas.getContext('2d')
  if (context === null) throw new Error('this browser has no room for the picture: close other pages')
  context.font = FONT
  const rows = rowsOf(entries, width, (text) => context.measureText(text).width)
  const top = MARGIN * 2 + LINE * (rows.length + 1)
  canvas.width = plot.width + 2 * MARGIN * scale
  canvas.height = plot.height + (top + MARGIN) * scale
  context.fillStyle = inks.surface
  context.fillRect(0, 0, canvas.width, canvas.height)
  context.drawImage(plot, MARGIN * scale, top * scale)
  context.scale(scale, scale)
  context.textBaseline = 'middle'
  context.font = `bold ${FONT}`
  context.fillStyle = inks.text
  context.fillText(title, MARGIN, MARGIN + LINE / 2)
  context.font = FONT
  rows.forEach((row, at) =>
    row.forEach((entry) => drawEntry(context, entry, MARGIN + LINE * (at + 1.6), inks)),
  )
  if (now !== null) {
    context.fillRect(MARGIN + now - 0.5, top, 1, plot.height / scale - LINE * 1.6)
  }
  return new Promise((resolve, reject) =>
    canvas.toBlob(
      (blob) => (blob ? resolve(blob) : reject(new Error('this browser could not make the picture'))),
      'image/png',
    ),
  )
}

interface Placed extends Entry {
  x: number
}

/** Entries beside each other as far as they fit. */
export function rowsOf(
  entries: readonly Entry[],
  width: number,
  measure: (text: string) => number,
): Placed[][] {
  const rows: Placed[][] = []
  let x = Infinity
  for (const entry of entries) {
    const needed = SWATCH + 6 + measure(entry.label) + 16
    if (x + needed > width) {
      rows.push([])
      x = 0
    }
    rows.at(-1)!.push({ ...entry, x })
    x += needed
  }
  return rows
}

function drawEntry(
  context: CanvasRenderingContext2D,
  { label, paint, x }: Placed,
  y: number,
  inks: Inks,
): void {
  context.strokeStyle = paint?.colour ?? inks.muted
  context.lineWidth = 2
  context.setLineDash([...(paint?.dash ?? [])])
  context.beginPath()
  context.moveTo(MARGIN + x, y)
  context.lineTo(MARGIN + x + SWATCH, y)
  context.stroke()
  context.setLineDash([])
  context.fillText(label, MARGIN + x + SWATCH + 6, y)
}
