/**
 * Texts of tokens as they can be shown. They come from jobs and files, so they may hold anything: what cannot be seen, or
 * would change what stands around it, is shown as a mark. Pure.
 */

import type { Frame } from '../api/frames'

/** `mark`: stands for a character that cannot be shown as it is. */
export interface TokenPart {
  readonly kind: 'text' | 'mark'
  readonly text: string
}

export interface TokenLook {
  /** So many characters at most, those of marks counted. */
  most?: number
  /** Ordinary spaces stay what they are: in running text, where they can be seen by what is around them. */
  spaces?: boolean
}

const MOST = 40
const EMPTY = '∅'
const CUT = '…'
const MARKS: Readonly<Record<string, string>> = { ' ': '␣', '\n': '⏎', '\t': '⇥' }
/** Control, format (directions among them), private, unassigned and lone surrogate characters, and other spaces. */
const UNSEEN = /[\p{C}\p{Zl}\p{Zp}\p{Zs}\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0]/u
const COMBINING = /\p{M}/u
/** More marks above one another on one letter would grow into other lines. */
const MOST_COMBINING = 2

/** A token, cut into what is text and what are marks; neighbours are of different kinds. */
export function tokenParts(token: string, { most = MOST, spaces = false }: TokenLook = {}): TokenPart[] {
  if (token === '') return [{ kind: 'mark', text: EMPTY }]
  const found: { kind: TokenPart['kind']; text: string }[] = []
  let length = 0
  let combining = MOST_COMBINING // one that begins a token has no letter to stand on
  for (const character of token) {
    combining = COMBINING.test(character) ? combining + 1 : 0
    const mark = spaces && character === ' ' ? null : markOf(character, combining)
    const text = mark ?? character
    if (length + text.length > most) return [...found, { kind: 'mark', text: CUT }]
    length += text.length
    const kind = mark === null ? 'text' : 'mark'
    const last = found.at(-1)
    if (last?.kind === kind) last.text += text
    else found.push({ kind, text })
  }
  return found
}

/** A token in one line of text, for pictures and labels. */
export function tokenLabel(token: string, look: TokenLook = {}): string {
  return tokenParts(token, look)
    .map((part) => part.text)
    .join('')
}

function markOf(character: string, combining: number): string | null {
  const known = MARKS[character]
  if (known !== undefined) return known
  return UNSEEN.test(character) || combining > MOST_COMBINING ? escaped(character) : null
}

function escaped(character: string): string {
  const code = character.codePointAt(0) as number
  const digits = code.toString(16)
  if (code < 0x100) return `\\x${digits.padStart(2, '0')}`
  return code < 0x10000 ? `\\u${digits.padStart(4, '0')}` : `\\u{${digits}}`
}

/** Texts that travel in a frame (array `texts`: a list of texts as JSON in UTF-8); none where there are none. */
export function textsOf(frame: Frame): string[] {
  const bytes = frame.arrays['texts']?.values
  if (!(bytes instanceof Uint8Array)) return []
  try {
    const said: unknown = JSON.parse(new TextDecoder().decode(bytes))
    return Array.isArray(said) ? said.map((text) => (typeof text === 'string' ? text : '')) : []
  } catch {
    return [] // a damaged recording: its numbers can be shown all the same
  }
}
