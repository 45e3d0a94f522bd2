/** What is drawn over the lines: the signs of NaN and infinities, and marks with their labels. In canvas pixels. */

import type { Mark } from './series'

export interface Inks {
  text: string
  muted: string
  line: string
  surface: string
  nan: string
  infinite: string
  perturbation: string
  finding: string
}

export interface Box {
  left: number
  top: number
  width: number
  height: number
}

export interface Sign {
  x: number
  kind: 'nan' | 'infinite'
}

type Context = CanvasRenderingContext2D

/** Room above the lines for signs, in CSS pixels. */
export const SIGN_ROOM = 24
const SIGN = 4
const CLOSE = 3
const MOST_LETTERS = 28
const FONT = '12px system-ui, sans-serif'

/** A filled triangle for NaN, a hollow diamond below it for infinities. */
export function drawSigns(
  context: Context,
  signs: readonly Sign[],
  box: Box,
  inks: Inks,
  scale: number,
): void {
  for (const kind of ['nan', 'infinite'] as const) {
    const y = box.top - (kind === 'nan' ? 17 : 7) * scale
    context.fillStyle = context.strokeStyle = inks[kind]
    context.lineWidth = 1.5 * scale
    for (const x of apart(
      signs.filter((sign) => sign.kind === kind).map((sign) => sign.x),
      CLOSE * scale,
    )) {
      if (x < box.left - 1 || x > box.left + box.width + 1) continue
      drawSign(context, kind, x, y, SIGN * scale)
    }
  }
}

function drawSign(context: Context, kind: Sign['kind'], x: number, y: number, size: number): void {
  context.beginPath()
  context.moveTo(x - size, kind === 'nan' ? y - size : y)
  if (kind === 'infinite') context.lineTo(x, y - size)
  context.lineTo(x + size, kind === 'nan' ? y - size : y)
  context.lineTo(x, y + size)
  context.closePath()
  if (kind === 'nan') context.fill()
  else context.stroke()
}

/** Lines at the steps of marks, those that are of the same pixel once, with as many labels as there is room for. */
export function drawMarks(
  context: Context,
  marks: readonly { x: number; mark: Mark }[],
  box: Box,
  inks: Inks,
  scale: number,
): void {
  const right = box.left + box.width
  context.font = FONT.replace('12', String(12 * scale))
  context.textAlign = 'left'
  context.textBaseline = 'top'
  context.lineWidth = scale
  let free = -Infinity
  let before = -Infinity
  for (const { x, mark } of marks.toSorted((a, b) => a.x - b.x)) {
    if (x < box.left || x > right || x - before < scale) continue
    before = x
    const ink = mark.kind === 'note' ? inks.muted : inks[mark.kind]
    context.strokeStyle = ink
    context.setLineDash([4 * scale, 3 * scale])
    context.beginPath()
    context.moveTo(x, box.top)
    context.lineTo(x, box.top + box.height)
    context.stroke()
    context.setLineDash([])
    const label = cut(mark.label)
    const width = context.measureText(label).width
    const place = x + width + 6 * scale > right ? x - width - 4 * scale : x + 4 * scale
    if (place < Math.max(free, box.left)) continue
    context.lineWidth = 3 * scale
    context.strokeStyle = inks.surface
    context.strokeText(label, place, box.top + 3 * scale)
    context.fillStyle = ink
    context.fillText(label, place, box.top + 3 * scale)
    context.lineWidth = scale
    free = place + width + 6 * scale
  }
}

/** The read-out has all of it. */
function cut(label: string): string {
  return label.length > MOST_LETTERS ? `${label.slice(0, MOST_LETTERS - 1).trimEnd()}…` : label
}

/** Those that are far enough from the one before. */
export function apart(places: readonly number[], least: number): number[] {
  const found: number[] = []
  for (const place of places.toSorted((a, b) => a - b))
    if (!found.length || place - found.at(-1)! >= least) found.push(place)
  return found
}

/** The colours of the page as they are now. */
export function pageInks(of: Element, nan: string, infinite: string): Inks {
  const style = getComputedStyle(of)
  const colour = (name: string): string => style.getPropertyValue(name).trim() || 'gray'
  return {
    text: colour('--text'),
    muted: colour('--muted'),
    line: colour('--line'),
    surface: colour('--raised'),
    perturbation: colour('--warning'),
    finding: colour('--danger'),
    nan,
    infinite,
  }
}
