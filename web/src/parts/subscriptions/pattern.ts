/**
 * Patterns over names of taps, as the job understands them: `*` is one segment or a part of it, `**` any number of
 * segments, `{a,b}` alternatives, `0-3` or `[0-3]` a range of numbers.
 */

const LONGEST = 512
const MOST_ALTERNATIVES = 256

export type Matcher = (name: string) => boolean

/** What tells whether a name is meant; a line that says why it is no pattern. */
export function matcherOf(pattern: string): Matcher | string {
  if (!pattern || pattern.length > LONGEST) return `A pattern has 1 to ${LONGEST} characters`
  if (/\s/.test(pattern)) return 'A pattern holds no white space'
  const plain = expanded(pattern)
  if (typeof plain === 'string') return plain
  const alternatives: Segment[][] = []
  for (const text of plain) {
    const segments = text.split('.').map(segmentOf)
    const wrong = segments.find((segment) => typeof segment === 'string')
    if (wrong !== undefined) return wrong
    alternatives.push(segments as Segment[])
  }
  return (name) => {
    const parts = name.split('.')
    return alternatives.some((segments) => matches(segments, parts))
  }
}

/** null: any number of segments. */
type Segment = ((part: string) => boolean) | null

function expanded(pattern: string): string[] | string {
  const done: string[] = []
  const todo = [pattern]
  while (todo.length) {
    const text = todo.pop()!
    const close = text.indexOf('}')
    const open = close < 0 ? text.indexOf('{') : text.lastIndexOf('{', close)
    if (close < 0 && open < 0) done.push(text)
    else if (close < 0 || open < 0) return 'The braces do not match'
    else {
      for (const choice of text.slice(open + 1, close).split(',')) {
        todo.push(text.slice(0, open) + choice + text.slice(close + 1))
      }
    }
    if (todo.length + done.length > MOST_ALTERNATIVES) return `More than ${MOST_ALTERNATIVES} alternatives`
  }
  return done
}

function segmentOf(text: string): Segment | string {
  if (!text) return 'A segment between two dots is empty'
  if (text === '**') return null
  const span = /^(?:\[(\d{1,9})(?:-(\d{1,9}))?\]|(\d{1,9})-(\d{1,9}))$/.exec(text)
  if (span) {
    const first = Number(span[1] ?? span[3])
    const last = Number(span[2] ?? span[4] ?? first)
    if (last < first) return `The range ${text} ends before it begins`
    return (part) => /^\d{1,9}$/.test(part) && Number(part) >= first && Number(part) <= last
  }
  if (/[[\]]/.test(text)) return `${text} is no range of numbers such as [0-3]`
  if (!text.includes('*')) return (part) => part === text
  const pieces = text.split('*')
  return (part) => fits(pieces, part)
}

/** The pieces between stars, in order, each as early as it can be. */
function fits(pieces: readonly string[], part: string): boolean {
  const first = pieces[0]!
  const last = pieces.at(-1)!
  if (part.length < first.length + last.length || !part.startsWith(first) || !part.endsWith(last))
    return false
  const end = part.length - last.length
  let at = first.length
  for (const piece of pieces.slice(1, -1)) {
    const found = part.indexOf(piece, at)
    if (found < 0 || found + piece.length > end) return false
    at = found + piece.length
  }
  return true
}

/** By the set of places in the pattern that one may have come to: linear in the name, however many stars. */
function matches(segments: readonly Segment[], parts: readonly string[]): boolean {
  let places = new Set([0])
  for (const part of parts) {
    const following = new Set<number>()
    for (const place of opened(segments, places)) {
      const segment = segments[place]
      if (segment === undefined) continue
      if (segment === null) following.add(place)
      else if (segment(part)) following.add(place + 1)
    }
    if (!following.size) return false
    places = following
  }
  return opened(segments, places).has(segments.length)
}

/** With those behind a `**`, which may stand for nothing. */
function opened(segments: readonly Segment[], places: ReadonlySet<number>): Set<number> {
  const found = new Set(places)
  for (const place of found) if (segments[place] === null) found.add(place + 1)
  return found
}
