/** Colours behind the tokens of a text: how much attention each gets. Text on them keeps a contrast of 4.5 to 1. Pure. */

import { colourTable, ENTRIES, type Theme } from '../../draw/colours'
import { curveOf, type Scale } from '../../draw/heatmap/scale'

export interface Ink {
  readonly background: string
  readonly text: string
}

/** Ink of each entry of the colours of heat maps, the least first. */
export function inks(theme: Theme): Ink[] {
  const table = colourTable('sequential', theme)
  return Array.from({ length: ENTRIES }, (_, entry) => {
    const rgb = table.subarray(entry * 4, entry * 4 + 3)
    const light = luminance(rgb)
    // Black is the more readable of the two from here on, and one of them always is readable.
    return {
      background: `rgb(${[...rgb].join(' ')})`,
      text: contrast(light, 0) >= contrast(1, light) ? '#000' : '#fff',
    }
  })
}

/** Which ink a share has: all from 0 to the largest share, spread as the map's scale says. */
export function inkOf(value: number, largest: number, scale: Scale): number {
  if (!(largest > 0)) return 0
  const at = curveOf(scale, { low: 0, high: largest }).position(value)
  return Math.round(Math.min(1, Math.max(0, at)) * (ENTRIES - 1))
}

/** WCAG 2: relative luminance, 0 to 1. */
export function luminance(rgb: ArrayLike<number>): number {
  const linear = (channel: number): number => {
    const c = (rgb[channel] as number) / 255
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4
  }
  return 0.2126 * linear(0) + 0.7152 * linear(1) + 0.0722 * linear(2)
}

/** Of two luminances, the lighter first. */
export function contrast(lighter: number, darker: number): number {
  return (lighter + 0.05) / (darker + 0.05)
}
