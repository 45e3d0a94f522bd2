/** Positions and shares in words. Pure. */

import { shown } from '../../parts/numbers'
import { tokenLabel } from '../../parts/token'
import type { AttentionMap, Span } from './map'

const LABEL = 14
const READ = 60

/** A share of attention, in percent. */
export function share(value: number): string {
  return `${shown(value * 100, 3)} %`
}

/** `12`, or `8–15`. */
export function placed([first, last]: Span): string {
  return first === last ? String(first) : `${first}–${last}`
}

/** Texts of the tokens of a span, with nothing in between; null: they are not known. */
export function textOf(map: AttentionMap, [first, last]: Span): string | null {
  if (!map.texts.length) return null
  const from = map.keys.indexOf(first)
  if (from < 0) return null
  return map.texts.slice(from, from + last - first + 1).join('')
}

/** `12 ␣blue` for an axis. */
export function label(map: AttentionMap, span: Span): string {
  return named(map, span, LABEL)
}

/** The same with more of the text. */
export function longLabel(map: AttentionMap, span: Span): string {
  return named(map, span, READ)
}

function named(map: AttentionMap, span: Span, most: number): string {
  const text = textOf(map, span)
  return text === null ? placed(span) : `${placed(span)} ${tokenLabel(text, { most })}`
}
