/**
 * Points and lines drawn into pixels by the processor: the same picture on every machine, and as many points as there are.
 * Pure.
 */

import type { Matrix, Size } from './camera'
import type { Scene } from './scene'

export type Colour = readonly [red: number, green: number, blue: number]

export interface Paper extends Size {
  /** RGBA; what is drawn is opaque. */
  readonly pixels: Uint8ClampedArray
  /** The same memory, a number for each pixel: red lowest, as processors that browsers run on have it. */
  readonly words: Uint32Array
}

export interface Pen {
  /** Of points, in pixels; a half or more. */
  radius: number
  /** Of lines, 0 to 1. */
  lineAlpha: number
  /** Farther points are mixed with it, where they are seen at a depth. */
  background: Colour
  /** Farther points are fainter, and behind nearer ones. */
  deep: boolean
}

/** Levels of depth that are told apart. */
const LEVELS = 64
/** How near the front of a box is, and how far its back, in halves of its sides. */
const BACK = 1.3
/** The farthest points keep so much of their colour. */
const FAINTEST = 0.35
const OPAQUE = 0xff000000 | 0
/** Red and blue of a pixel, which are mixed in one go, as green is between them. */
const RED_BLUE = 0xff00ff
/** Bits behind the point. */
const FRACTION = 16

export function paperOf(width: number, height: number): Paper {
  const pixels = new Uint8ClampedArray(width * height * 4)
  return { width, height, pixels, words: new Uint32Array(pixels.buffer) }
}

export function clear({ words }: Paper, [red, green, blue]: Colour): void {
  words.fill(wordOf(red, green, blue))
}

function wordOf(red: number, green: number, blue: number): number {
  return (OPAQUE | (blue << 16) | (green << 8) | red) >>> 0
}

/** Where points are seen: pixels to the right, pixels down, nearness; NaN for those that are not. */
export function projected(
  positions: Float32Array,
  count: number,
  m: Matrix,
  into: Float32Array,
): Float32Array {
  for (let at = 0; at < 3 * count; at += 3) {
    const x = positions[at]!
    const y = positions[at + 1]!
    const z = positions[at + 2]!
    into[at] = m[0]! * x + m[1]! * y + m[2]! * z + m[3]!
    into[at + 1] = m[4]! * x + m[5]! * y + m[6]! * z + m[7]!
    into[at + 2] = m[8]! * x + m[9]! * y + m[10]! * z + m[11]!
  }
  return into
}

/** A line of a grid, across all of the paper: at so many pixels from its left or top. */
export function rule(
  { width, height, words }: Paper,
  way: 'across' | 'down',
  at: number,
  colour: Colour,
): void {
  const place = Math.floor(at)
  if (!(place >= 0 && place < (way === 'across' ? height : width))) return
  const word = wordOf(...colour)
  if (way === 'across') words.fill(word, place * width, (place + 1) * width)
  else for (let pixel = place; pixel < words.length; pixel += width) words[pixel] = word
}

/** Draw a scene whose points are seen at `places`. */
export function drawScene(paper: Paper, scene: Scene, places: Float32Array, pen: Pen): void {
  drawLines(paper, scene, places, pen)
  drawPoints(paper, scene, places, pen)
}

function drawLines(paper: Paper, scene: Scene, places: Float32Array, pen: Pen): void {
  const { lines, colours } = scene
  const alpha = Math.round(pen.lineAlpha * 256)
  for (let at = 0; at < lines.length; at += 2) {
    const [from, to] = [3 * lines[at]!, 3 * lines[at + 1]!]
    const word = wordOf(colours[from]!, colours[from + 1]!, colours[from + 2]!)
    segment(paper, places[from]!, places[from + 1]!, places[to]!, places[to + 1]!, word, alpha)
  }
}

/** A thin line; what of it lies outside is left out before. */
function segment(
  { width, height, words }: Paper,
  x0: number,
  y0: number,
  x1: number,
  y1: number,
  colour: number,
  alpha: number,
): void {
  const [dx, dy] = [x1 - x0, y1 - y0]
  if (!Number.isFinite(dx + dy)) return
  const span = clipped(x0, y0, dx, dy, width, height)
  if (!span) return
  const left = inside(x0 + dx * span[0], width)
  const top = inside(y0 + dy * span[0], height)
  const [across, down] = [inside(x0 + dx * span[1], width) - left, inside(y0 + dy * span[1], height) - top]
  // From pixel to pixel along the longer way, so that none is left out and none drawn twice.
  const steps = Math.max(Math.abs(across), Math.abs(down))
  const one = 1 << FRACTION
  const [right, below] = steps
    ? [Math.trunc((across * one) / steps), Math.trunc((down * one) / steps)]
    : [0, 0]
  let x = left * one + one / 2
  let y = top * one + one / 2
  const [redBlue, green] = [Math.imul(colour & RED_BLUE, alpha), ((colour >>> 8) & 0xff) * alpha]
  for (let step = 0; step <= steps; step++, x += right, y += below)
    mix(words, (y >> FRACTION) * width + (x >> FRACTION), redBlue, green, 256 - alpha)
}

function inside(at: number, side: number): number {
  return Math.min(side - 1, Math.max(0, Math.floor(at)))
}

/** The part of a line, from 0 to 1, that lies inside (Liang and Barsky, 1984); null: none. */
function clipped(
  x: number,
  y: number,
  dx: number,
  dy: number,
  width: number,
  height: number,
): [number, number] | null {
  let [first, last] = [0, 1]
  for (const [p, q] of [
    [-dx, x],
    [dx, width - x],
    [-dy, y],
    [dy, height - y],
  ] as const) {
    if (p === 0) {
      if (q < 0) return null
    } else if (p < 0) first = Math.max(first, q / p)
    else last = Math.min(last, q / p)
  }
  return first <= last ? [first, last] : null
}

function drawPoints(paper: Paper, scene: Scene, places: Float32Array, pen: Pen): void {
  const { count, colours } = scene
  const stamp = stampOf(pen.radius)
  if (!pen.deep) {
    for (let point = 0; point < count; point++) press(paper, stamp, places, point, colours)
    return
  }
  const faded = fadedColours(scene, places, pen.background)
  for (const point of farFirst(places, count)) press(paper, stamp, places, point, faded)
}

interface Stamp {
  radius: number
  /** How much of each pixel is covered, 0 to 256. */
  cover: Uint16Array
}

/** A disc with soft edges. */
function stampOf(radius: number): Stamp {
  const reach = Math.ceil(radius)
  const side = 2 * reach + 1
  const cover = new Uint16Array(side * side)
  for (let y = -reach; y <= reach; y++)
    for (let x = -reach; x <= reach; x++) {
      const inside = Math.min(Math.max(radius + 0.5 - Math.hypot(x, y), 0), 1)
      cover[(y + reach) * side + x + reach] = Math.round(256 * inside)
    }
  return { radius: reach, cover }
}

function press(
  { width, height, words }: Paper,
  { radius, cover }: Stamp,
  places: Float32Array,
  point: number,
  colours: Uint8Array,
): void {
  const x = Math.floor(places[3 * point]!)
  const y = Math.floor(places[3 * point + 1]!)
  // Also false for NaN.
  if (!(x >= -radius && y >= -radius && x < width + radius && y < height + radius)) return
  const word = wordOf(colours[3 * point]!, colours[3 * point + 1]!, colours[3 * point + 2]!)
  const side = 2 * radius + 1
  const [left, right] = [Math.max(-radius, -x), Math.min(radius, width - 1 - x)]
  const [top, bottom] = [Math.max(-radius, -y), Math.min(radius, height - 1 - y)]
  for (let dy = top; dy <= bottom; dy++) {
    let from = (dy + radius) * side + left + radius
    let to = (y + dy) * width + x + left
    for (let dx = left; dx <= right; dx++, from++, to++) {
      const alpha = cover[from]!
      if (alpha === 256) words[to] = word
      else if (alpha)
        mix(words, to, Math.imul(word & RED_BLUE, alpha), ((word >>> 8) & 0xff) * alpha, 256 - alpha)
    }
  }
}

/** A colour, of which so much was taken already, onto the `rest` (of 256) of what is there. */
function mix(words: Uint32Array, at: number, redBlue: number, green: number, rest: number): void {
  const there = words[at]!
  const outer = ((Math.imul(there & RED_BLUE, rest) + redBlue) >>> 8) & RED_BLUE
  words[at] = OPAQUE | outer | ((((there >>> 8) & 0xff) * rest + green) & 0xff00)
}

/** Points by depth, the farthest first, in so many levels. */
export function farFirst(places: Float32Array, count: number): Uint32Array {
  const level = (point: number): number => Math.min(LEVELS - 1, Math.floor(nearness(places, point) * LEVELS))
  const begins = new Uint32Array(LEVELS + 1)
  for (let point = 0; point < count; point++) begins[level(point) + 1]!++
  for (let at = 0; at < LEVELS; at++) begins[at + 1]! += begins[at]!
  const order = new Uint32Array(count)
  for (let point = 0; point < count; point++) order[begins[level(point)]!++] = point
  return order
}

/** From 0, at the back of the box that is looked at, to 1. */
function nearness(places: Float32Array, point: number): number {
  const share = (places[3 * point + 2]! / BACK + 1) / 2
  return share >= 0 ? Math.min(share, 1) : 0
}

function fadedColours({ colours, count }: Scene, places: Float32Array, background: Colour): Uint8Array {
  const faded = new Uint8Array(3 * count)
  for (let point = 0; point < count; point++) {
    const kept = FAINTEST + (1 - FAINTEST) * nearness(places, point)
    for (let channel = 0; channel < 3; channel++) {
      const at = 3 * point + channel
      faded[at] = background[channel]! + (colours[at]! - background[channel]!) * kept
    }
  }
  return faded
}

/** The point that is seen nearest to a place, within `reach` pixels; -1: none. */
export function nearestPoint(
  places: Float32Array,
  count: number,
  x: number,
  y: number,
  reach: number,
): number {
  let found = -1
  let best = reach * reach
  for (let point = 0; point < count; point++) {
    const dx = places[3 * point]! - x
    const dy = places[3 * point + 1]! - y
    const distance = dx * dx + dy * dy
    if (distance <= best) [found, best] = [point, distance]
  }
  return found
}

/** How large points are drawn: the more, the smaller. */
export function radiusOf(count: number): number {
  if (count <= 300) return 5
  if (count <= 3000) return 4
  if (count <= 30_000) return 2.5
  return count <= 300_000 ? 1.5 : 0.5
}
