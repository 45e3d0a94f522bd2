/** Clouds as points and lines to be drawn: what is coloured for what, and what is joined. Pure. */

import { colourTable, ENTRIES, seriesColours } from '../../draw/colours'
import { rgbOfHex } from '../../draw/colours-oklab'
import type { Scene } from '../../draw/scatter/scene'
import type { Theme } from '../../state/theme.svelte'
import type { Cloud } from './clouds'

export type ColourBy = 'position' | 'group' | 'cloud' | 'token'
/** `sequence`: a token to the next; `path`: a token to itself in the next layer or step. */
export type Lines = 'none' | 'sequence' | 'path'

export interface Look {
  colour: ColourBy
  lines: Lines
  theme: Theme
  /** Texts of tokens by position; empty: not known. */
  texts: readonly string[]
}

/** Which point is which token. */
export interface Points {
  scene: Scene
  /** First point of each cloud, and the number of all. */
  begins: readonly number[]
  /** Lines are drawn of every so many-th token: more could not be told apart. */
  every: number
}

const MOST_LINES = 30_000

/** The part of the map that stands out from the background, at 3 to 1. */
const SEEN: Record<Theme, readonly [number, number]> = { dark: [0.37, 1], light: [0.53, 1] }

export function pointsOf(clouds: readonly Cloud[], look: Look): Points {
  const begins = [0]
  for (const cloud of clouds) begins.push(begins.at(-1)! + cloud.count)
  const count = begins.at(-1)!
  const positions = new Float32Array(3 * count)
  const colours = new Uint8Array(3 * count)
  clouds.forEach((cloud, number) => {
    const paint = painter(clouds, number, look)
    for (let token = 0; token < cloud.count; token++) {
      const to = 3 * (begins[number]! + token)
      for (let axis = 0; axis < cloud.components; axis++)
        positions[to + axis] = cloud.coordinates[token * cloud.components + axis]!
      colours.set(paint(token), to)
    }
  })
  const every = look.lines === 'path' ? Math.ceil(count / MOST_LINES) || 1 : 1
  const lines =
    look.lines === 'sequence'
      ? sequenceLines(clouds, begins)
      : look.lines === 'path'
        ? pathLines(clouds, begins, every)
        : new Uint32Array(0)
  return { scene: { count, positions, colours, lines }, begins, every }
}

/** Which cloud a point is of, and which of its tokens. */
export function tokenAt({ begins }: Points, point: number): { cloud: number; token: number } {
  let cloud = 0
  while (cloud + 2 < begins.length && begins[cloud + 1]! <= point) cloud++
  return { cloud, token: point - begins[cloud]! }
}

/** The points of one token in all clouds that have it, in their order. */
export function pathOf(clouds: readonly Cloud[], { begins }: Points, id: number): number[] {
  return clouds.flatMap((cloud, number) => {
    const token = cloud.ids.indexOf(id)
    return token < 0 ? [] : [begins[number]! + token]
  })
}

/** `#rrggbb` for a share of a whole: for points and legends. */
export function shade(share: number, theme: Theme): readonly [number, number, number] {
  const [low, high] = SEEN[theme]
  const entry = Math.round((low + (high - low) * Math.min(Math.max(share, 0), 1)) * (ENTRIES - 1))
  const table = tableFor(theme)
  return [table[4 * entry]!, table[4 * entry + 1]!, table[4 * entry + 2]!]
}

const tables = new Map<Theme, Uint8Array>()

function tableFor(theme: Theme): Uint8Array {
  const known = tables.get(theme) ?? colourTable('sequential', theme)
  tables.set(theme, known)
  return known
}

export function seriesRgb(number: number, theme: Theme): readonly [number, number, number] {
  const colours = seriesColours(theme)
  const [red, green, blue] = rgbOfHex(colours[number % colours.length]!) ?? [0.5, 0.5, 0.5]
  return [Math.round(red * 255), Math.round(green * 255), Math.round(blue * 255)]
}

type Paint = (token: number) => readonly [number, number, number]

function painter(clouds: readonly Cloud[], number: number, look: Look): Paint {
  const cloud = clouds[number]!
  if (look.colour === 'cloud') {
    const colour = shade(clouds.length > 1 ? number / (clouds.length - 1) : 1, look.theme)
    return () => colour
  }
  if (look.colour === 'group') {
    const colours = Array.from({ length: cloud.groupCount }, (_, group) => seriesRgb(group, look.theme))
    return (token) => colours[cloud.groups[token]!]!
  }
  if (look.colour === 'token') {
    const numbers = wordsOf(look.texts)
    const colours = Array.from({ length: 8 }, (_, word) => seriesRgb(word, look.theme))
    return (token) => colours[(numbers.get(look.texts[cloud.positions[token]!] ?? '') ?? 7) % 8]!
  }
  const last = cloud.positions.reduce((most, position) => Math.max(most, position), 1)
  const ramp = Array.from({ length: last + 1 }, (_, position) => shade(position / last, look.theme))
  return (token) => ramp[cloud.positions[token]!]!
}

/** The texts that come most often have colours of their own (0 to 6), all others share one (7). */
export function wordsOf(texts: readonly string[]): Map<string, number> {
  const counts = new Map<string, number>()
  for (const text of texts) counts.set(text, (counts.get(text) ?? 0) + 1)
  const ordered = [...counts].toSorted((a, b) => b[1] - a[1]).map(([text]) => text)
  return new Map(ordered.map((text, number) => [text, Math.min(number, 7)]))
}

function sequenceLines(clouds: readonly Cloud[], begins: readonly number[]): Uint32Array {
  const found: number[] = []
  clouds.forEach((cloud, number) => {
    const last = new Map<number, number>()
    const order = Array.from(cloud.positions.keys()).sort((a, b) => cloud.positions[a]! - cloud.positions[b]!)
    for (const token of order) {
      const before = last.get(cloud.groups[token]!)
      if (before !== undefined) found.push(begins[number]! + before, begins[number]! + token)
      last.set(cloud.groups[token]!, token)
    }
  })
  return Uint32Array.from(found)
}

function pathLines(clouds: readonly Cloud[], begins: readonly number[], every: number): Uint32Array {
  const found: number[] = []
  let before = new Map<number, number>()
  clouds.forEach((cloud, number) => {
    const here = new Map<number, number>()
    for (let token = 0; token < cloud.count; token += every) {
      const point = begins[number]! + token
      const id = cloud.ids[token]!
      const last = before.get(id)
      if (last !== undefined) found.push(last, point)
      here.set(id, point)
    }
    before = here
  })
  return Uint32Array.from(found)
}
