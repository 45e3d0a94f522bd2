/** Which rows or columns are labelled, and where. Pure. */

export interface Tick {
  readonly index: number
  /** Of the cell's middle, in pixels from the start of the axis. */
  readonly at: number
}

/**
 * Indices at a round distance (1, 2, 5, 10, ...) that lie within the window, at least `room` pixels apart. Where they
 * stand for numbers (`number`; null: for none) those of round numbers.
 */
export function ticks(
  start: number,
  length: number,
  pixels: number,
  count: number,
  room: number,
  number?: (index: number) => number | null,
): Tick[] {
  if (!(length > 0) || !(pixels > 0) || count <= 0) return []
  const place = (index: number): number => ((index + 0.5 - start) / length) * pixels
  if (number) {
    const from = Math.max(0, Math.floor(start))
    const shown = Array.from(
      { length: Math.min(count, Math.ceil(start + length)) - from },
      (_, at) => from + at,
    )
    const known = shown.filter(
      (index) => number(index) !== null && place(index) >= 0 && place(index) <= pixels,
    )
    const found = rounded(
      known.map((index) => ({ index, at: place(index), number: number(index)! })),
      room,
    )
    if (found.length) return found
  }
  const step = round((room * length) / pixels)
  const first = Math.max(0, Math.ceil((Math.floor(start) - 0.5) / step) * step)
  const found: Tick[] = []
  for (let index = first; index < Math.min(count, start + length); index += step) {
    const at = place(index)
    if (at >= 0 && at <= pixels) found.push({ index, at })
  }
  return found
}

/** Those in whose cells a round number lies. */
function rounded(cells: readonly (Tick & { number: number })[], room: number): Tick[] {
  const [first, last] = [cells[0], cells.at(-1)]
  if (!first || !last) return []
  const apart = cells.slice(1).map((cell, before) => cell.number - cells[before]!.number)
  apart.sort((a, b) => a - b)
  const [wide = 0, usual = 0] = [apart[0], apart[apart.length >> 1]] // there may be holes
  if (!(wide > 0)) return [{ index: first.index, at: first.at }]
  const step = round((room * (last.index - first.index) * usual) / (last.at - first.at))
  const found: Tick[] = []
  for (const { index, at, number } of cells) {
    const before = found.at(-1)
    const holds = Math.ceil(number / step) * step < number + wide
    if (holds && (!before || at - before.at >= room)) found.push({ index, at })
  }
  return found
}

/** The smallest of 1, 2, 5, 10, 20, 50, ... that is not below. */
export function round(least: number): number {
  if (!(least > 1)) return 1
  const power = 10 ** Math.floor(Math.log10(least))
  return power * ([1, 2, 5, 10].find((digit) => digit * power >= least * (1 - 1e-9)) ?? 10)
}

/** At most so many characters; what tells names of tensors apart is mostly at their end, so the beginning goes. */
export function shortened(label: string, most: number): string {
  const characters = [...label]
  return characters.length <= most ? label : '…' + characters.slice(characters.length - most + 1).join('')
}

/** Some indices, evenly spread, of which labels are measured: axes must not jump as one moves along. */
export function sampled(count: number, most = 200): number[] {
  const step = Math.max(1, Math.ceil(count / most))
  const found = Array.from({ length: Math.ceil(count / step) }, (_, at) => at * step)
  if (count > 0 && found.at(-1) !== count - 1) found.push(count - 1)
  return found
}
