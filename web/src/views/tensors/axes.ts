/** What the rows and columns of a tensor's picture are called. Pure. */

import type { Frame } from '../../api/frames'
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
  /** Rows that belong to one index of the first dimension. */
  readonly inner: number
  /** Of an index of the first dimension. */
  outer(index: number): string
}

/**
 * `shape`: of the tensor where the frame does not say it, or of another (a few chosen tokens); `rows`: of all that is
 * shown, which may be several parts below each other.
 */
export function axesOf(frame: Frame, rows: number, shape: readonly number[] = shapeOf(frame)): Axes {
  const labels = list(frame.meta['labels']).map((label) => String(label).split('/')[0] ?? '')
  const dims = list(frame.meta['dims']).map(String)
  const texts = textsOf(frame)
  const token = (at: number): string => {
    const text = texts[at]
    return text === undefined ? '' : ` ${tokenLabel(text, { most: TOKEN })}`
  }
  if (dims.length === 2) {
    const name = (at: number): string => `${dims[0]} ${at}${dims[0] === 's' ? token(at) : ''}`
    return { rows: named(dims[0]), columns: named(dims[1]), row: name, inner: 1, outer: name }
  }
  const above = labels.slice(0, -1)
  const sides = shape.slice(0, -1)
  const columns = named(labels.at(-1)) || 'column'
  if (!above.length || sides.length !== above.length) {
    const plain = (at: number): string => String(at)
    return { rows: above.map(named).join(' × ') || 'row', columns, row: plain, inner: 1, outer: plain }
  }
  const part = product(sides)
  const first = above[0] as string
  const outer = (at: number): string => `${first} ${at}${first === 's' ? token(at) : ''}`
  const row = (index: number): string => {
    const cut = cutHeads(frame, rows, part)
    const within = cut ? index % part : index
    const places = decoded(within, sides)
    const heads = above.indexOf('n')
    if (cut && heads >= 0) places[heads]! += Math.floor(index / part) * (sides[heads] as number)
    return above.map((label, at) => (at ? `${label} ${places[at]}` : outer(places[0] as number))).join(' ')
  }
  return { rows: above.map(named).join(' × '), columns, row, inner: product(sides.slice(1)), outer }
}

/** Do the rows come from several ranks that hold other heads, so that the first dimension begins anew on each? */
function cutHeads(frame: Frame, rows: number, part: number): boolean {
  const [, here, all] = list(frame.meta['heads']).map(Number)
  return here !== undefined && all !== undefined && here < all && part > 0 && rows > part && rows % part === 0
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
