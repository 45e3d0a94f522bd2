/**
 * Colours of data, computed in OKLab: maps of 256 entries for heat maps, colours of special values, and of series. Tables
 * are RGBA bytes. On a dark page little is dark and much is bright, on a light page the other way round.
 */
import { distance, hexOfRgb, labOfLch, rgbOfLab, type Lab, type Lch, type Rgb } from './colours-oklab'

export type Theme = 'dark' | 'light'
export type ColourMap = 'sequential' | 'diverging'

export const ENTRIES = 256

/**
 * Little to much; hues run from violet over blue and green to yellow, far from the reds of special values. All of it is
 * within sRGB: where a colour had to be brought back into it there would be an edge.
 */
const SEQUENTIAL: Record<Theme, readonly Lch[]> = {
  dark: [
    [0.2, 0.06, 290],
    [0.36, 0.12, 280],
    [0.52, 0.115, 252],
    [0.68, 0.095, 205],
    [0.82, 0.105, 155],
    [0.95, 0.11, 108],
  ],
  light: [
    [0.98, 0.025, 108],
    [0.86, 0.09, 145],
    [0.7, 0.1, 190],
    [0.55, 0.1, 235],
    [0.4, 0.12, 270],
    [0.26, 0.09, 288],
  ],
}

/** Below the centre blue, above it orange: told apart with any kind of colour vision. Both sides are equally light. */
const DIVERGING: Record<Theme, { centre: Lch; sides: readonly [readonly Lch[], readonly Lch[]] }> = {
  dark: {
    centre: [0.23, 0.005, 250],
    sides: [
      [
        [0.5, 0.12, 252],
        [0.86, 0.08, 225],
      ],
      [
        [0.5, 0.11, 60],
        [0.86, 0.12, 78],
      ],
    ],
  },
  light: {
    centre: [0.97, 0.005, 250],
    sides: [
      [
        [0.68, 0.12, 245],
        [0.36, 0.13, 262],
      ],
      [
        [0.68, 0.14, 62],
        [0.36, 0.085, 50],
      ],
    ],
  },
}

/** No colour of a map comes near these. */
const SPECIAL: Record<Theme, Record<'nan' | 'infinite' | 'missing', Lch>> = {
  dark: { nan: [0.64, 0.24, 18], infinite: [0.72, 0.25, 330], missing: [0.42, 0, 0] },
  light: { nan: [0.6, 0.23, 22], infinite: [0.66, 0.27, 330], missing: [0.66, 0, 0] },
}

/** At least 4.5 : 1 against the page, and told apart also by those who see no red or no green. */
const SERIES: Record<Theme, readonly Lch[]> = {
  dark: [
    [0.78, 0.11, 264],
    [0.78, 0.14, 84],
    [0.78, 0.14, 168],
    [0.66, 0.17, 30],
    [0.66, 0.2, 300],
    [0.93, 0.08, 198],
    [0.93, 0.2, 120],
    [0.63, 0.08, 210],
  ],
  light: [
    [0.54, 0.2, 264],
    [0.54, 0.11, 60],
    [0.36, 0.11, 138],
    [0.45, 0.14, 0],
    [0.42, 0.2, 294],
    [0.54, 0.08, 306],
    [0.3, 0.14, 264],
    [0.3, 0.08, 342],
  ],
}

export type Special = 'nan' | 'infinite' | 'missing'

export const SPECIALS: readonly Special[] = ['nan', 'infinite', 'missing']

/** RGBA of the 256 colours of a map, least first. */
export function colourTable(map: ColourMap, theme: Theme): Uint8Array {
  if (map === 'sequential') return evenly(SEQUENTIAL[theme].map(labOfLch), ENTRIES)
  const { centre, sides } = DIVERGING[theme]
  const table = new Uint8Array(ENTRIES * 4)
  const half = ENTRIES / 2
  const [below, above] = sides.map((side) => evenly([centre, ...side].map(labOfLch), half))
  for (let entry = 0; entry < half; entry++) {
    table.set(below!.subarray(entry * 4, entry * 4 + 4), (half - 1 - entry) * 4)
    table.set(above!.subarray(entry * 4, entry * 4 + 4), (half + entry) * 4)
  }
  return table
}

/** The colour of cells that hold no finite value. */
export function specialColour(special: Special, theme: Theme): Rgb {
  return rgbOfLab(labOfLch(SPECIAL[theme][special]))
}

/** The second colour of the pattern of such cells. */
export function specialInk(special: Special, theme: Theme): Rgb {
  const [lightness, chroma, hue] = SPECIAL[theme][special]
  const contrary =
    special === 'missing' ? lightness + (theme === 'dark' ? -0.14 : 0.14) : lightness > 0.65 ? 0.28 : 0.95
  return rgbOfLab(labOfLch([contrary, Math.min(chroma, 0.06), hue]))
}

/** Of up to eight series, `#rrggbb`; more than eight begin again, so something else has to tell them apart. */
export function seriesColours(theme: Theme): string[] {
  return SERIES[theme].map((lch) => hexOfRgb(rgbOfLab(labOfLch(lch))))
}

/** A smooth line through the points, cut so that each colour is as far from the next as every other. */
function evenly(points: readonly Lab[], entries: number): Uint8Array {
  const fine = 64 * (points.length - 1)
  const line = Array.from({ length: fine + 1 }, (_, at) => spline(points, (at / fine) * (points.length - 1)))
  const along = [0]
  for (let at = 1; at <= fine; at++) along.push(along[at - 1]! + distance(line[at - 1]!, line[at]!))
  const table = new Uint8Array(entries * 4)
  let at = 0
  for (let entry = 0; entry < entries; entry++) {
    const wanted = (along[fine]! * entry) / (entries - 1)
    while (at < fine - 1 && along[at + 1]! < wanted) at++
    const share = (wanted - along[at]!) / (along[at + 1]! - along[at]!)
    const rgb = rgbOfLab(mix(line[at]!, line[at + 1]!, share))
    table.set([...rgb.map((channel) => Math.round(channel * 255)), 255], entry * 4)
  }
  return table
}

function mix(one: Lab, other: Lab, share: number): Lab {
  const of = (axis: 0 | 1 | 2) => one[axis] + (other[axis] - one[axis]) * share
  return [of(0), of(1), of(2)]
}

/** A cubic through the points; lightness stays straight between them, so that it never turns back. */
function spline(points: readonly Lab[], where: number): Lab {
  const before = Math.min(Math.floor(where), points.length - 2)
  const t = where - before
  const point = (at: number) => points[Math.min(points.length - 1, Math.max(0, at))]!
  const [p0, p1, p2, p3] = [point(before - 1), point(before), point(before + 1), point(before + 2)]
  const cubic = (axis: 1 | 2) => {
    const slope = [(p2[axis] - p0[axis]) / 2, (p3[axis] - p1[axis]) / 2] as const
    const [t2, t3] = [t * t, t * t * t]
    return (
      (2 * t3 - 3 * t2 + 1) * p1[axis] +
      (t3 - 2 * t2 + t) * slope[0] +
      (3 * t2 - 2 * t3) * p2[axis] +
      (t3 - t2) * slope[1]
    )
  }
  return [p1[0] + (p2[0] - p1[0]) * t, cubic(1), cubic(2)]
}
