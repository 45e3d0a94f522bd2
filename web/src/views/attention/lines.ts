/** A long text cut into lines, so that only those in sight have to be there. Pure. */

export interface Line {
  /** Tokens from `first` up to, not with, `end`. */
  readonly first: number
  readonly end: number
}

/** As many tokens on each line as fit (one at least); a token after which the text has a line break ends its line. */
export function linesOf(widths: readonly number[], breaks: readonly boolean[], room: number): Line[] {
  const found: Line[] = []
  let first = 0
  let taken = 0
  widths.forEach((width, at) => {
    if (at > first && taken + width > room) {
      found.push({ first, end: at })
      first = at
      taken = 0
    }
    taken += width
    if (breaks[at]) {
      found.push({ first, end: at + 1 })
      first = at + 1
      taken = 0
    }
  })
  if (first < widths.length) found.push({ first, end: widths.length })
  return found
}

/** Lines that are in sight, and some above and below; from `from` up to, not with, `to`. */
export function inSight(
  count: number,
  height: number,
  scrolled: number,
  screen: number,
): { from: number; to: number } {
  const spare = 4
  const from = Math.max(0, Math.floor(scrolled / height) - spare)
  return { from: Math.min(from, count), to: Math.min(count, Math.ceil((scrolled + screen) / height) + spare) }
}

/** The line that holds a token. */
export function lineWith(lines: readonly Line[], token: number): number {
  return lines.findIndex((line) => line.first <= token && token < line.end)
}
