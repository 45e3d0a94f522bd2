/** A timeline on a canvas. Kinds of work differ in colour and pattern, and say their name where there is room. */

import { seriesColours, type Theme } from '../colours'
import {
  AXIS,
  boxesOf,
  CATEGORY_NAMES,
  GUTTER,
  rowHeight,
  ticks,
  xOf,
  type Box,
  type Category,
  type Segment,
  type Size,
  type Span,
  type Timeline,
} from './layout'

/** How a kind of work is filled: plain, or with lines over it. */
export type Pattern = 'plain' | 'rising' | 'falling' | 'dots' | 'upright' | 'empty'

export interface Look {
  colour: string
  pattern: Pattern
  /** Of text on it. */
  ink: string
}

export interface Chrome {
  surface: string
  text: string
  muted: string
  line: string
  focus: string
}

const PATTERNS: Record<Category, Pattern> = {
  forward: 'plain',
  backward: 'falling',
  wgrad: 'rising',
  optimizer: 'upright',
  kernel: 'plain',
  other: 'dots',
  transfer: 'plain',
  wait: 'rising',
  gap: 'empty',
}
/** Places in the colours of series; waiting and what is unknown have none. */
const PLACES: Partial<Record<Category, number>> = {
  forward: 0,
  backward: 2,
  wgrad: 6,
  optimizer: 4,
  kernel: 5,
  other: 3,
  transfer: 7,
  wait: 1,
}
const FONT = '11px system-ui, sans-serif'
const LEAST_TEXT = 26
/** No text is narrower than so many pixels a letter. */
const LEAST_LETTER = 3
const LEAST_PATTERN = 5
const TILE = 8

/** How each kind of work looks. */
export function looks(theme: Theme, chrome: Chrome): Record<Category, Look> {
  const colours = seriesColours(theme)
  const ink = theme === 'dark' ? '#06121a' : '#ffffff'
  const look = (category: Category): Look => {
    const place = PLACES[category]
    if (place === undefined) return { colour: chrome.muted, pattern: PATTERNS[category], ink: chrome.text }
    return { colour: colours[place] ?? chrome.muted, pattern: PATTERNS[category], ink }
  }
  return Object.fromEntries(
    (Object.keys(CATEGORY_NAMES) as Category[]).map((category) => [category, look(category)]),
  ) as Record<Category, Look>
}

export interface Scene {
  timeline: Timeline
  span: Span
  hidden: ReadonlySet<Category>
  looks: Record<Category, Look>
  chrome: Chrome
  /** Ranks that a finding names. */
  marked: ReadonlySet<number>
  /** The one under the pointer or the keys. */
  current: Segment | null
}

export function paint(context: CanvasRenderingContext2D, size: Size, scene: Scene): void {
  const { timeline, span, chrome } = scene
  context.fillStyle = chrome.surface
  context.fillRect(0, 0, size.width, size.height)
  context.font = FONT
  context.textBaseline = 'middle'
  paintAxis(context, size, span, chrome)
  paintNames(context, size, timeline, scene)
  const boxes = timeline.rows.flatMap((_, row) => boxesOf(timeline, row, span, size))
  const seen = boxes.filter((box) => !scene.hidden.has(box.segment.category))
  paintBoxes(context, seen, scene)
  for (const box of seen) if (box.width > LEAST_TEXT && box.height >= 11) paintText(context, box, scene)
  const current = seen.find((box) => box.segment === scene.current)
  if (current) paintFrame(context, current, chrome)
}

function paintAxis(context: CanvasRenderingContext2D, size: Size, span: Span, chrome: Chrome): void {
  context.textAlign = 'center'
  for (const time of ticks(span, (size.width - GUTTER) / 90)) {
    const x = Math.round(xOf(time, span, size)) + 0.5
    context.strokeStyle = chrome.line
    context.globalAlpha = 0.6
    line(context, x, 0, x, size.height - AXIS)
    context.globalAlpha = 1
    context.fillStyle = chrome.muted
    const text = `${tidy(time * 1e3)} ms`
    const half = context.measureText(text).width / 2
    context.fillText(text, Math.min(Math.max(x, GUTTER + half), size.width - half), size.height - AXIS / 2)
  }
}

function paintNames(context: CanvasRenderingContext2D, size: Size, timeline: Timeline, scene: Scene): void {
  const height = rowHeight(timeline, size)
  const every = Math.ceil(12 / height)
  context.textAlign = 'right'
  timeline.rows.forEach(({ rank }, row) => {
    const marked = scene.marked.has(rank)
    if (row % every && !marked) return
    context.fillStyle = marked ? scene.chrome.text : scene.chrome.muted
    context.font = marked ? `bold ${FONT}` : FONT
    context.fillText(`${marked ? '▸ ' : ''}rank ${rank}`, GUTTER - 6, (row + 0.5) * height)
  })
  context.font = FONT
  context.textAlign = 'left'
}

/** All of a kind at once: to change what is filled with takes longer than to fill. */
function paintBoxes(
  context: CanvasRenderingContext2D,
  boxes: readonly Box[],
  { looks, chrome }: Scene,
): void {
  const byCategory = new Map<Category, Box[]>()
  for (const box of boxes) {
    const known = byCategory.get(box.segment.category)
    if (known) known.push(box)
    else byCategory.set(box.segment.category, [box])
  }
  // what is known nothing of lies below
  const kinds = [...byCategory].sort(([a], [b]) => Number(b === 'gap') - Number(a === 'gap'))
  for (const [category, mine] of kinds) {
    const look = looks[category]
    fillAll(
      context,
      look,
      chrome,
      mine.filter((box) => box.width >= LEAST_PATTERN),
    )
    fillAll(
      context,
      { ...look, pattern: look.pattern === 'empty' ? 'empty' : 'plain' },
      chrome,
      mine.filter((box) => box.width < LEAST_PATTERN),
    )
  }
  context.fillStyle = chrome.surface // a gap between neighbours
  for (const { segment, x, y, width, height } of boxes) {
    if (width > 3 && segment.category !== 'gap') context.fillRect(x + width - 0.5, y, 0.5, height)
  }
}

interface Area {
  x: number
  y: number
  width: number
  height: number
}

/** Fields in the colour and pattern of a kind of work. */
export function fillAll(
  context: CanvasRenderingContext2D,
  look: Look,
  chrome: Chrome,
  areas: readonly Area[],
): void {
  if (!areas.length) return
  const thin = look.pattern === 'empty'
  context.fillStyle =
    thin || look.pattern === 'plain' ? look.colour : (tiled(context, look, chrome) ?? look.colour)
  for (const { x, y, width, height } of areas) {
    if (thin) context.fillRect(x, y + height / 2 - 0.5, width, 1)
    else context.fillRect(x, y, width, height)
  }
}

/** A square of the pattern, to be repeated: lines stand still while the drawing is moved across them. */
function tiled(context: CanvasRenderingContext2D, look: Look, chrome: Chrome): CanvasPattern | null {
  const scale = context.getTransform().a
  const tile = document.createElement('canvas')
  tile.width = tile.height = Math.round(TILE * scale)
  const inner = tile.getContext('2d')
  if (!inner) return null
  inner.setTransform(tile.width / TILE, 0, 0, tile.height / TILE, 0, 0)
  inner.fillStyle = look.colour
  inner.fillRect(0, 0, TILE, TILE)
  inner.globalAlpha = 0.45
  inner.strokeStyle = inner.fillStyle = chrome.surface
  hatch(inner, look.pattern)
  const pattern = context.createPattern(tile, 'repeat')
  pattern?.setTransform(new DOMMatrix().scale(TILE / tile.width))
  return pattern
}

function hatch(context: CanvasRenderingContext2D, pattern: Pattern): void {
  if (pattern === 'dots') {
    context.fillRect(1, 1, 2, 2)
    context.fillRect(1 + TILE / 2, 1 + TILE / 2, 2, 2)
    return
  }
  // beside the square, too: corners of lines that belong to the next one
  for (const at of [-TILE, 0, TILE]) {
    if (pattern === 'upright') line(context, at + TILE / 2, 0, at + TILE / 2, TILE)
    else if (pattern === 'falling') line(context, at - 1, -1, at + TILE + 1, TILE + 1)
    else line(context, at - 1, TILE + 1, at + TILE + 1, -1)
  }
}

function line(context: CanvasRenderingContext2D, x: number, y: number, toX: number, toY: number): void {
  context.beginPath()
  context.moveTo(x, y)
  context.lineTo(toX, toY)
  context.stroke()
}

function paintFrame(context: CanvasRenderingContext2D, { x, y, width, height }: Box, chrome: Chrome): void {
  context.strokeStyle = chrome.focus
  context.lineWidth = 2
  context.strokeRect(x - 1, y - 1, Math.max(width, 2) + 2, height + 2)
  context.lineWidth = 1
}

function paintText(context: CanvasRenderingContext2D, box: Box, { looks }: Scene): void {
  const look = looks[box.segment.category]
  if (look.pattern === 'empty') return
  const text = fitting(context, box.segment, box.width - 8)
  if (!text) return
  const middle = box.y + box.height / 2 + 0.5
  if (look.pattern !== 'plain') {
    const wide = context.measureText(text).width
    context.fillStyle = look.colour // no pattern behind the text
    context.fillRect(box.x + 2, middle - 7, wide + 4, 14)
  }
  context.fillStyle = look.ink
  context.fillText(text, box.x + 4, middle)
}

/** The label, as much of it as fits: its first part, or the kind of work, or nothing. */
function fitting(context: CanvasRenderingContext2D, { label, category }: Segment, room: number): string {
  const short = label.split(',')[0] ?? ''
  const tries = [`${category} ${label}`, `${category} ${short}`, label, short, category]
  const fits = (text: string): boolean =>
    text.length * LEAST_LETTER <= room && context.measureText(text).width <= room
  return tries.find((text) => text && fits(text)) ?? ''
}

function tidy(value: number): string {
  return String(Number(value.toFixed(Math.abs(value) < 1 ? 4 : 2)))
}
