/** Which rows or columns are labelled, and where. Pure. */

export interface Tick {
  readonly index: number
  /** Of the cell's middle, in pixels from the start of the axis. */
  readonly at: number
}

/** Indices at a round distance (1, 2, 5, 10, ...) that lie within the window, at least `room` pixels apart. */
export function ticks(start: number, length: number, pixels: number, count: number, room: number): Tick[] {
  if (!(length > 0) || !(pixels > 0) || count <= 0) return []
  const step = round((room * length) / pixels)
  const first = Math.max(0, Math.ceil((Math.floor(start) - 0.5) / step) * step)
  const found: Tick[] = []
  for (let index = first; index < Math.min(count, start + length); index += step) {
    const at = ((index + 0.5 - start) / length) * pixels
    if (at >= 0 && at <= pixels) found.push({ index, at })
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
