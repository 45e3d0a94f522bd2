/** What the rows and columns of a tensor's picture are called. Pure. */

import { numbersOf, type Frame } from '../../api/frames'
import { textsOf, tokenLabel } from '../../parts/token'

/** Labels of dimensions, see docs/scope-taps.md. */
const NAMES: Readonly<Record<string, string>> = {
  s: 'token',
  b: 'sequence',
  h: 'hidden',
  n: 'head',
  d: 'feature of the head',
  f: 'feature of the MLP',
  v: 'vocabulary',
  e: 'expert',
  t: 'token',
  out: 'output',
  in: 'input',
  k: 'place',
}
const TOKEN = 12

export interface Axes {
  /** `token (s) × head (n)` */
  readonly rows: string
  readonly columns: string
  /** Of a row of the matrix that a tensor is shown as: `s 3 n 0`. */
  row(index: number): string
  /** Of several rows that follow each other: `s 3–4`; of one that begins within a token `s 3 n 1 …`. */
  span(from: number, to: number): string
  /** Rows that belong to one index of the first dimension. */
  readonly inner: number
  /** Of the rows from one place in the tensor to another; null: they are no block of it. */
  block(first: Place, last: Place | null, sides: Place): string
}

/** An index in each dimension but the last. */
export type Place = readonly number[]

/** `shape`: of the tensor where the frame does not say it, or of another (a few chosen tokens). */
export function axesOf(frame: Frame, shape: readonly number[] = shapeOf(frame)): Axes {
  const dims = list(frame.meta['dims']).map(String)
  const token = tokensOf(frame)
  if (dims.length === 2) {
    const label = dims[0] as string
    const names = { rows: named(label), columns: named(dims[1]) }
    const name = (at: number): string => `${label} ${at}${label === 's' ? token(at) : ''}`
    return { ...names, ...counted(name, (from, to) => `${label} ${from}–${to}`) }
  }
  const labels = list(frame.meta['labels']).map((label) => String(label).split('/')[0] ?? '')
  const above = labels.slice(0, -1)
  const sides = shape.slice(0, -1)
  const columns = named(labels.at(-1)) || 'column'
  if (!above.length || sides.length !== above.length)
    return { rows: above.map(named).join(' × ') || 'row', columns, ...counted(String, (a, b) => `${a}–${b}`) }
  const name = (dimension: number, at: number): string =>
    `${above[dimension]} ${at}${above[dimension] === 's' ? token(at) : ''}`
  const point = (place: Place): string => place.map((at, dimension) => name(dimension, at)).join(' ')
  const block = (first: Place, last: Place | null, all: Place): string => {
    if (!last) return `${point(first)} …`
    const said = first.map((from, dimension) => {
      const to = last[dimension] as number
      if (dimension && from === 0 && to + 1 === all[dimension]) return ''
      return from === to ? name(dimension, from) : `${above[dimension]} ${from}–${to}`
    })
    return said.filter(Boolean).join(' ')
  }
  const offset = heldFrom(frame, above, sides)
  const place = (index: number): Place =>
    decoded(index, sides).map((at, dimension) => at + offset[dimension]!)
  const all = wholeSides(frame, above, sides)
  const span = (from: number, to: number): string => {
    if (from === to) return point(place(from))
    const [first, last] = [place(from), place(to)]
    const size = product(last.map((at, dimension) => Math.max(0, at - first[dimension]! + 1)))
    return block(first, size === to - from + 1 ? last : null, all)
  }
  const row = (index: number): string => point(place(index))
  return { rows: above.map(named).join(' × '), columns, row, span, block, inner: product(sides.slice(1)) }
}

/** Where rows have numbers only. */
function counted(
  row: (index: number) => string,
  several: (from: number, to: number) => string,
): Pick<Axes, 'row' | 'span' | 'inner' | 'block'> {
  const span = (from: number, to: number): string => (from === to ? row(from) : several(from, to))
  return { row, span, inner: 1, block: (first) => first.join(' ') }
}

function tokensOf(frame: Frame): (at: number) => string {
  const texts = textsOf(frame)
  return (at) => {
    const text = texts[at]
    return text === undefined ? '' : ` ${tokenLabel(text, { most: TOKEN })}`
  }
}

/** `[first, how many, of how many]` heads, where the frame says it and has a dimension of them. */
function headsOf(
  frame: Frame,
  above: readonly string[],
  sides: Place,
): { at: number; first: number; all: number } | null {
  const [first, here, all] = list(frame.meta['heads']).map(Number)
  const at = above.indexOf('n')
  if (at < 0 || first === undefined || all === undefined || here !== sides[at]) return null
  return { at, first, all }
}

/** The place of the first row: a rank that holds other heads than the first. */
function heldFrom(frame: Frame, above: readonly string[], sides: Place): Place {
  const heads = headsOf(frame, above, sides)
  return sides.map((_, at) => (heads?.at === at ? heads.first : 0))
}

function wholeSides(frame: Frame, above: readonly string[], sides: Place): Place {
  const heads = headsOf(frame, above, sides)
  return sides.map((side, at) => (heads?.at === at ? heads.all : side))
}

export interface Places {
  /** Of each row of what is shown. */
  readonly first: readonly Place[]
  /** null: its rows are no block of the tensor. */
  readonly last: readonly (Place | null)[]
  readonly sides: Place
  /** Rows that are not behind the row before them in the tensor: with another part it begins anew. */
  readonly breaks: readonly number[]
}

/** Where the rows of parts that lie below each other are in the tensor; null where the server did not say so. */
export function placesOf(frame: Frame): Places | null {
  const array = frame.arrays['places']
  const [rows = 0, two, dimensions = 0] = array?.shape ?? []
  if (!array || two !== 2 || !dimensions) return null
  const values = numbersOf(frame, 'places')
  const at = (row: number, end: number): Place =>
    Array.from(values.subarray((row * 2 + end) * dimensions, (row * 2 + end + 1) * dimensions))
  const first = Array.from({ length: rows }, (_, row) => at(row, 0))
  const last = first.map((_, row) => {
    const place = at(row, 1)
    return place.some((one) => one < 0) ? null : place
  })
  const [, , heads] = list(frame.meta['heads']).map(Number)
  const labels = list(frame.meta['labels']).map(String)
  const sides = Array.from({ length: dimensions }, (_, dimension) => {
    let most = labels[dimension] === 'n' && heads ? heads : 0
    for (const place of [...first, ...last]) most = Math.max(most, (place?.[dimension] ?? -1) + 1)
    return most
  })
  const breaks = first.flatMap((place, row) => (row && before(place, first[row - 1]!) ? [row] : []))
  return { first, last, sides, breaks }
}

function before(place: Place, other: Place): boolean {
  const at = place.findIndex((one, dimension) => one !== other[dimension])
  return at >= 0 && place[at]! < other[at]!
}

/** Indices in each dimension; the first takes what is left. */
function decoded(index: number, sides: readonly number[]): number[] {
  const places = sides.map(() => 0)
  let left = index
  for (let at = sides.length - 1; at > 0; at--) {
    const side = sides[at] as number
    places[at] = side ? left % side : 0
    left = side ? Math.floor(left / side) : 0
  }
  places[0] = left
  return places
}

function named(label: string | undefined): string {
  if (!label) return ''
  const known = Object.hasOwn(NAMES, label) ? NAMES[label] : undefined
  return known ? `${known} (${label})` : label
}

export function shapeOf(frame: Frame): number[] {
  return list(frame.meta['shape']).map(Number)
}

export function product(sides: readonly number[]): number {
  return sides.reduce((all, side) => all * side, 1)
}

function list(value: unknown): unknown[] {
  return Array.isArray(value) ? value : []
}
