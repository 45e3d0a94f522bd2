/** The candidates of a place as a picture to be kept. */

import { tokenLabel } from '../../parts/token'
import { percent, type Answer } from './answers'

const WIDTH = 720
const LINE = 26
const MARGIN = 20
const BARS = { left: 230, width: 360 }
const SCALE = 2

export interface Caption {
  title: string
  /** The text up to there. */
  before: string
}

/** As PNG, in the colours of the page. */
export function pictureOf(
  answer: Answer,
  caption: Caption,
  textOf: (id: number) => string | null,
): Promise<Blob> {
  const canvas = document.createElement('canvas')
  const height = 2 * MARGIN + LINE * (answer.candidates.length + 3)
  canvas.width = WIDTH * SCALE
  canvas.height = height * SCALE
  const pen = canvas.getContext('2d')
  if (!pen) return Promise.reject(new Error('this browser gives no canvas'))
  const style = getComputedStyle(document.documentElement)
  const ink = (name: string): string => style.getPropertyValue(name).trim()
  pen.scale(SCALE, SCALE)
  pen.fillStyle = ink('--surface')
  pen.fillRect(0, 0, WIDTH, height)
  pen.textBaseline = 'middle'
  pen.font = '600 15px sans-serif'
  pen.fillStyle = ink('--text')
  let y = MARGIN + LINE / 2
  pen.fillText(caption.title, MARGIN, y, WIDTH - 2 * MARGIN)
  pen.font = '14px monospace'
  pen.fillStyle = ink('--muted')
  pen.fillText(caption.before, MARGIN, (y += LINE), WIDTH - 2 * MARGIN)
  y += LINE / 2
  for (const candidate of answer.candidates) {
    y += LINE
    const mine = candidate.id === answer.asked?.id
    const text = candidate.text ?? textOf(candidate.id)
    pen.fillStyle = ink('--text')
    pen.fillText(
      text === null ? `#${candidate.id}` : tokenLabel(text, { most: 20 }),
      MARGIN,
      y,
      BARS.left - 30,
    )
    pen.fillStyle = ink(mine ? '--accent' : '--muted')
    pen.fillRect(BARS.left, y - 8, Math.max(1, BARS.width * candidate.probability), 16)
    pen.fillStyle = ink('--text')
    pen.fillText(percent(candidate.probability) + (mine ? ' <' : ''), BARS.left + BARS.width + 12, y)
  }
  return new Promise((resolve, reject) =>
    canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error('no picture came'))), 'image/png'),
  )
}
