/** Points in three dimensions and the lines between them, as they are drawn. */

export interface Scene {
  readonly count: number
  /** (count, 3); a point with a NaN is not drawn. */
  readonly positions: Float32Array
  /** (count, 3), red, green and blue of each point. */
  readonly colours: Uint8Array
  /** Pairs of points, each joined by a line of the colour of its first one. */
  readonly lines: Uint32Array
}

export const NOTHING: Scene = {
  count: 0,
  positions: new Float32Array(0),
  colours: new Uint8Array(0),
  lines: new Uint32Array(0),
}

/** Least and greatest along each axis. */
export interface Box {
  readonly low: readonly [number, number, number]
  readonly high: readonly [number, number, number]
}

/** Points so many times the middle half's extent away from it are far outside (Tukey's outer fence) ... */
const FENCE = 3
/** ... and left out of the picture where the others would fill less than this share of it. */
const CROWDED = 0.25

/** Of all points that can be drawn; a box around 0 where there are none. */
export function boxOf({ positions, count }: Scene): Box {
  const low: [number, number, number] = [Infinity, Infinity, Infinity]
  const high: [number, number, number] = [-Infinity, -Infinity, -Infinity]
  for (let at = 0; at < 3 * count; at += 3) {
    if (!drawable(positions, at)) continue
    for (const axis of [0, 1, 2] as const) {
      const value = positions[at + axis]!
      if (value < low[axis]) low[axis] = value
      if (value > high[axis]) high[axis] = value
    }
  }
  return low[0] <= high[0] ? { low, high } : { low: [-1, -1, -1], high: [1, 1, 1] }
}

/** Of nearly all points, where a few are so far away that the others could not be told apart; else of all. */
export function innerBoxOf(scene: Scene): Box {
  const whole = boxOf(scene)
  const low: [number, number, number] = [...whole.low]
  const high: [number, number, number] = [...whole.high]
  for (const axis of [0, 1, 2] as const) {
    const values = axisOf(scene, axis)
    const [quarter, rest] = [values[values.length >> 2]!, values[(3 * values.length) >> 2]!]
    const reach = FENCE * (rest - quarter)
    const first = values.find((value) => value >= quarter - reach)!
    const last = values.findLast((value) => value <= rest + reach)!
    if (last > first && last - first < CROWDED * (high[axis] - low[axis]))
      [low[axis], high[axis]] = [first, last]
  }
  return { low, high }
}

/** Coordinates along an axis, of at most some ten thousand points, ascending. */
function axisOf({ positions, count }: Scene, axis: number): Float32Array {
  const every = Math.max(1, Math.ceil(count / 20_000))
  const found: number[] = []
  for (let at = 0; at < 3 * count; at += 3 * every)
    if (drawable(positions, at)) found.push(positions[at + axis]!)
  return Float32Array.from(found).sort()
}

function drawable(positions: Float32Array, at: number): boolean {
  return Number.isFinite(positions[at]! + positions[at + 1]! + positions[at + 2]!)
}

/** The smallest box that holds both. */
export function union(a: Box, b: Box): Box {
  const each = (of: typeof Math.min, one: Box['low'], other: Box['low']): [number, number, number] => [
    of(one[0], other[0]),
    of(one[1], other[1]),
    of(one[2], other[2]),
  ]
  return { low: each(Math.min, a.low, b.low), high: each(Math.max, a.high, b.high) }
}

/** How many points lie outside. */
export function beyond({ positions, count }: Scene, { low, high }: Box): number {
  let found = 0
  for (let at = 0; at < 3 * count; at += 3) {
    const out = (axis: 0 | 1 | 2): boolean =>
      positions[at + axis]! < low[axis] || positions[at + axis]! > high[axis]
    if (out(0) || out(1) || out(2)) found++
  }
  return found
}
