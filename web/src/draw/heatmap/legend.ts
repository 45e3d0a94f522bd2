/** The parts of a legend, for the page and for exported pictures. */
import {
  colourTable,
  ENTRIES,
  specialColour,
  specialInk,
  type ColourMap,
  type Special,
  type Theme,
} from '../colours'
import { inked } from './patterns'
import type { Range } from './quantise'
import { curveOf, type Scale, type Span } from './scale'

const SWATCH = { width: 18, height: 12 }

/** All colours, one pixel high. */
export function barPixels(colours: ColourMap, theme: Theme): ImageData {
  return new ImageData(new Uint8ClampedArray(colourTable(colours, theme)), ENTRIES, 1)
}

/** How cells of a special value are drawn. */
export function swatchPixels(special: Special, theme: Theme): ImageData {
  const image = new ImageData(SWATCH.width, SWATCH.height)
  const [colour, ink] = [specialColour(special, theme), specialInk(special, theme)]
  for (let y = 0; y < SWATCH.height; y++) {
    for (let x = 0; x < SWATCH.width; x++) {
      const rgb = inked(special, x, y) ? ink : colour
      image.data.set([...rgb.map((channel) => channel * 255), 255], (y * SWATCH.width + x) * 4)
    }
  }
  return image
}

export interface EndLabels {
  readonly low: string
  readonly middle: string
  readonly high: string
}

/** What is written at the colours; beyond a range that is not that of all values there may be more. */
export function endLabels(
  span: Span,
  scale: Scale,
  range: Range,
  label: (value: number) => string,
): EndLabels {
  const cut = range === 'robust' || typeof range !== 'string'
  const curve = curveOf(scale, span)
  const [low, middle, high] = [0, 0.5, 1].map((position) =>
    label(exact(curve.value(position), position, span)),
  )
  return { low: cut ? `≤ ${low}` : low!, middle: middle!, high: cut ? `≥ ${high}` : high! }
}

/** Not what rounding made of the ends, and of the middle of -2 to 2.0001 not all digits. */
function exact(value: number, position: number, span: Span): number {
  if (position === 0 && Math.abs(value - span.low) < Math.abs(span.low) * 1e-9) return span.low
  if (position === 1) return span.high
  return Math.abs(value) < (span.high / 2 - span.low / 2) * 1e-3 && span.low < 0 ? 0 : value
}
