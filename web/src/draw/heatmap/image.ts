/** Pictures of heat maps as PNG, with title, axes and legend; drawn on the CPU, by the same rules as on the screen. */
import type { ColourMap, Theme } from '../colours'
import { columnTicks, roomOf, rowTicks, type Axis } from './axes'
import { notability } from './coding'
import { specialsOf, tablesOf, type Encoded } from './encode'
import { barPixels, endLabels, swatchPixels } from './legend'
import { FONT, widest } from './measure'
import { Pyramid } from './pyramid'
import type { Range } from './quantise'
import { rasterise } from './raster'
import type { Scale } from './scale'
import type { HeatWindow, Size } from './viewport'

/** What is seen, or all cells, each a pixel at least. */
export type Part = 'seen' | 'all'

export interface Picture {
  readonly encoded: Encoded
  readonly scale: Scale
  readonly range: Range
  readonly colours: ColourMap
  readonly theme: Theme
  readonly title: string
  readonly axes: { readonly row: Axis; readonly column: Axis }
  readonly valueLabel: (value: number) => string
  readonly missingLabel: string
  readonly window: HeatWindow
  /** Of the map on the page, in CSS pixels. */
  readonly screen: Size
  readonly what: Part
}

/** Browsers draw no larger pictures; a larger grid is drawn smaller, its most notable cells kept. */
const LARGEST = 8192

/** Pixels of a picture for each of the page: it is for print, too. */
const SHARP = 2

const MARGIN = 12
const LINE = 18
const LEGEND = { width: 200, height: 12, gap: 8 }

interface Layout {
  readonly map: { readonly x: number; readonly y: number } & Size
  readonly width: number
  readonly height: number
}

export async function picture(of: Picture): Promise<Blob> {
  const pixels = pixelsOf(of)
  const items = legendOf(of)
  const at = layout(of, items, { width: pixels.width / SHARP, height: pixels.height / SHARP })
  const canvas = document.createElement('canvas')
  canvas.width = Math.ceil(at.width * SHARP)
  canvas.height = Math.ceil(at.height * SHARP)
  const context = canvas.getContext('2d')
  if (context === null)
    throw new Error('the picture is too large for this browser: zoom in, and export what is seen')
  const style = getComputedStyle(document.documentElement)
  const ink = { surface: style.getPropertyValue('--surface'), text: style.getPropertyValue('--text') }
  context.fillStyle = ink.surface || 'white'
  context.fillRect(0, 0, canvas.width, canvas.height)
  context.putImageData(mapPixels(of, pixels), at.map.x * SHARP, at.map.y * SHARP)
  context.scale(SHARP, SHARP)
  context.fillStyle = context.strokeStyle = ink.text || 'black'
  drawAxes(context, of, at)
  drawLegend(context, items, at)
  return blobOf(canvas)
}

function pixelsOf({ what, screen, encoded: { grid } }: Picture): Size {
  const wanted = [screen.width * SHARP, screen.height * SHARP]
  const [width, height] =
    what === 'seen' ? wanted : [Math.max(wanted[0]!, grid.columns), Math.max(wanted[1]!, grid.rows)]
  const side = (length: number) => Math.min(LARGEST, Math.max(1, Math.round(length)))
  return { width: side(width!), height: side(height!) }
}

function layout(of: Picture, items: readonly Item[], map: Size): Layout {
  const x = MARGIN + LINE + roomOf(of.axes.row) + 10
  const y = MARGIN + LINE * 1.5
  const below = LINE * 2 + MARGIN + LINE
  const least = x + MARGIN + Math.max(widthOf(items), widest([of.title], `bold ${FONT}`))
  return {
    map: { x, y, ...map },
    width: Math.max(least, x + map.width + MARGIN),
    height: y + map.height + below + MARGIN,
  }
}

function mapPixels({ encoded, colours, theme, window }: Picture, { width, height }: Size): ImageData {
  const pyramid = new Pyramid(encoded.grid, notability(encoded.pooling, encoded.coding))
  const image = new ImageData(width, height)
  const pixels = new Uint32Array(image.data.buffer)
  if (window.width > 0 && window.height > 0) {
    rasterise(pyramid, encoded.coding, tablesOf(encoded, colours, theme), window, width, height, pixels)
  }
  return image
}

function drawAxes(
  context: CanvasRenderingContext2D,
  { title, axes, window }: Picture,
  { map }: Layout,
): void {
  context.font = `bold ${FONT}`
  context.textBaseline = 'middle'
  context.fillText(title, map.x, MARGIN + LINE / 2)
  context.font = FONT
  context.textAlign = 'right'
  for (const tick of rowTicks(axes.row, window.top, window.height, map.height)) {
    context.fillText(tick.text, map.x - 8, map.y + tick.y)
    context.fillRect(map.x - 5, map.y + tick.at - 0.5, 5, 1)
  }
  context.textAlign = 'center'
  for (const tick of columnTicks(axes.column, roomOf(axes.column), window.left, window.width, map.width)) {
    context.fillText(tick.text, map.x + tick.at, map.y + map.height + LINE / 2 + 4)
    context.fillRect(map.x + tick.at - 0.5, map.y + map.height, 1, 5)
  }
  context.fillText(axes.column.title, map.x + map.width / 2, map.y + map.height + LINE * 1.5 + 2)
  context.save()
  context.translate(MARGIN + LINE / 2, map.y + map.height / 2)
  context.rotate(-Math.PI / 2)
  context.fillText(axes.row.title, 0, 0)
  context.restore()
}

type Item = { readonly text: string } | { readonly image: ImageData; readonly width: number }

function legendOf(of: Picture): Item[] {
  const bar = { image: barPixels(of.colours, of.theme), width: LEGEND.width }
  const special = specialsOf(of.encoded).flatMap((name) => [
    { image: swatchPixels(name, of.theme), width: 18 },
    { text: name === 'nan' ? 'NaN' : name === 'missing' ? of.missingLabel : name },
  ])
  if (of.encoded.span === null) return [{ text: 'no finite value' }, ...special]
  const labels = endLabels(of.encoded.span, of.scale, of.range, of.valueLabel)
  const bent = of.scale === 'linear' ? [] : [{ text: `(${of.scale}, ${labels.middle} in the middle)` }]
  return [{ text: labels.low }, bar, { text: labels.high }, ...bent, ...special]
}

function widthOf(items: readonly Item[]): number {
  return items.reduce(
    (sum, item) => sum + LEGEND.gap + ('text' in item ? widest([item.text]) : item.width),
    0,
  )
}

function drawLegend(context: CanvasRenderingContext2D, items: readonly Item[], { map }: Layout): void {
  const middle = map.y + map.height + LINE * 2 + MARGIN + LINE / 2
  let x = map.x
  context.textAlign = 'left'
  context.imageSmoothingEnabled = false
  for (const item of items) {
    if ('text' in item) context.fillText(item.text, x, middle)
    else context.drawImage(canvasOf(item.image), x, middle - LEGEND.height / 2, item.width, LEGEND.height)
    x += widthOf([item])
  }
}

function canvasOf(image: ImageData): HTMLCanvasElement {
  const canvas = document.createElement('canvas')
  canvas.width = image.width
  canvas.height = image.height
  canvas.getContext('2d')?.putImageData(image, 0, 0)
  return canvas
}

function blobOf(canvas: HTMLCanvasElement): Promise<Blob> {
  return new Promise((resolve, reject) => {
    canvas.toBlob((blob) => {
      if (blob) resolve(blob)
      else reject(new Error('this browser could not make the picture: zoom in, and export what is seen'))
    }, 'image/png')
  })
}
