/** Colours of ranks. */

import { colourTable, ENTRIES, type Theme } from '../../draw/colours'
import type { RankValue } from './deviation'

/** What a rank is coloured by. */
export type By = 'value' | 'deviation'
export const BYS: readonly By[] = ['value', 'deviation']

export interface Cell {
  /** Shown in it. */
  number: number | null
  /** `#rrggbb`; undefined: it has no value. */
  colour: string | undefined
}

/** Deviations beyond it have the same colour: one that is far off leaves the others to be told apart. */
export const FAR = 8

/** What is shown of each rank. */
export function numbersOf(
  ranks: readonly RankValue[],
  deviations: readonly (number | null)[],
  by: By,
): (number | null)[] {
  return by === 'value' ? ranks.map(({ value }) => value) : [...deviations]
}

/** From the least to the greatest; deviations: as far on either side of zero. */
export function rangeOf(numbers: readonly (number | null)[], by: By): [low: number, high: number] {
  const known = numbers.filter((number): number is number => number !== null && Number.isFinite(number))
  const low = known.reduce((a, b) => Math.min(a, b), Infinity)
  const high = known.reduce((a, b) => Math.max(a, b), -Infinity)
  if (by === 'value') return known.length ? [low, high] : [0, 0]
  const most = Math.min(Math.max(-low, high, 3), FAR)
  return [-most, most]
}

export function cellsOf(numbers: readonly (number | null)[], by: By, theme: Theme): Cell[] {
  const table = colourTable(by === 'value' ? 'sequential' : 'diverging', theme)
  const [low, high] = rangeOf(numbers, by)
  return numbers.map((number) => {
    if (number === null) return { number, colour: undefined }
    const share = high > low ? (number - low) / (high - low) : 0.5
    const entry = Math.round(Math.min(Math.max(share, 0), 1) * (ENTRIES - 1)) * 4
    return { number, colour: hex(table.subarray(entry, entry + 3)) }
  })
}

function hex(channels: Uint8Array): string {
  return '#' + [...channels].map((channel) => channel.toString(16).padStart(2, '0')).join('')
}

/** Black or white, whichever reads better on a colour. */
export function inkOn(colour: string): 'black' | 'white' {
  const [red, green, blue] = [1, 3, 5].map((at) => linear(parseInt(colour.slice(at, at + 2), 16) / 255))
  const light = 0.2126 * red! + 0.7152 * green! + 0.0722 * blue!
  return (light + 0.05) / 0.05 > 1.05 / (light + 0.05) ? 'black' : 'white'
}

function linear(channel: number): number {
  return channel <= 0.04045 ? channel / 12.92 : ((channel + 0.055) / 1.055) ** 2.4
}
