/** Ways to draw a grid of bytes, behind one interface: ours, and what one would write first. */
import { TILES } from '../src/draw/heatmap/coding'
import { encode, tablesOf, type ByteCells, type Look } from '../src/draw/heatmap/encode'
import { createRenderer, type HeatRenderer, type Kind } from '../src/draw/heatmap/renderer'
import type { HeatWindow } from '../src/draw/heatmap/viewport'

export interface Contender {
  /** From bytes to a canvas that shows all cells. */
  first(cells: ByteCells, window: HeatWindow): void
  draw(window: HeatWindow): void
  /** Waits until what was drawn is there: reads a pixel back. */
  settle(): number
  dispose(): void
}

const LOOK: Look = { scale: 'linear', range: 'extremes', colours: 'sequential' }

export const CONTENDERS: Record<string, (canvas: HTMLCanvasElement) => Contender> = {
  WebGL2: (canvas) => ours(canvas, 'webgl2'),
  'canvas fallback': (canvas) => ours(canvas, 'canvas'),
  'putImageData of all cells': (canvas) => new Plain(canvas),
}

function ours(canvas: HTMLCanvasElement, kind: Kind): Contender {
  const renderer = createRenderer(canvas, { kind })
  if (renderer.kind !== kind) throw new Error(`there is no ${kind} here`)
  return new Ours(canvas, renderer)
}

class Ours implements Contender {
  constructor(
    private readonly canvas: HTMLCanvasElement,
    private readonly renderer: HeatRenderer,
  ) {}

  first(cells: ByteCells, window: HeatWindow): void {
    const encoded = encode(cells, LOOK)
    this.renderer.set(encoded.grid, encoded.coding, encoded.pooling)
    this.renderer.colours(tablesOf(encoded, LOOK.colours, 'dark'))
    this.renderer.draw(window)
  }

  draw(window: HeatWindow): void {
    this.renderer.draw(window)
  }

  settle(): number {
    return pixelOf(this.canvas)
  }

  dispose(): void {
    this.renderer.dispose()
  }
}

/** The whole grid as one picture, which is drawn scaled: no cell is kept on purpose, and zooming out is a mean of colours. */
class Plain implements Contender {
  private readonly whole = document.createElement('canvas')

  constructor(private readonly canvas: HTMLCanvasElement) {}

  first(cells: ByteCells, window: HeatWindow): void {
    const table = new Uint32Array(
      tablesOf(
        encode({ ...cells, bytes: Uint8Array.of(0, 253), rows: 1, columns: 2 }, LOOK),
        'sequential',
        'dark',
      ).colours.buffer,
    )
    const image = new ImageData(cells.columns, cells.rows)
    const pixels = new Uint32Array(image.data.buffer)
    for (let at = 0; at < cells.bytes.length; at++) pixels[at] = table[cells.bytes[at]!]!
    this.whole.width = cells.columns
    this.whole.height = cells.rows
    this.whole.getContext('2d')!.putImageData(image, 0, 0)
    this.draw(window)
  }

  draw({ left, top, width, height }: HeatWindow): void {
    const context = this.canvas.getContext('2d')!
    context.imageSmoothingEnabled = false
    context.drawImage(this.whole, left, top, width, height, 0, 0, this.canvas.width, this.canvas.height)
  }

  settle(): number {
    return pixelOf(this.canvas)
  }

  dispose(): void {
    this.whole.width = this.whole.height = 0
  }
}

function pixelOf(canvas: HTMLCanvasElement): number {
  const gl = canvas.getContext('webgl2')
  if (gl === null)
    return canvas.getContext('2d')!.getImageData(canvas.width / 2, canvas.height / 2, 1, 1).data[0]!
  const pixel = new Uint8Array(4)
  gl.readPixels(canvas.width / 2, canvas.height / 2, 1, 1, gl.RGBA, gl.UNSIGNED_BYTE, pixel)
  return pixel[0]!
}

/** Tiles with a few NaN, the same in every run. */
export function tiles(side: number): ByteCells {
  const bytes = new Uint8Array(side * side)
  let state = 1
  for (let at = 0; at < bytes.length; at++) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0
    const wave = 127 * (1 + Math.sin(at / side / 90) * Math.cos((at % side) / 70))
    bytes[at] = Math.min(TILES.last, wave * 0.8 + (state >>> 26))
  }
  for (let at = 0; at < 7; at++) bytes[Math.floor((bytes.length * (at + 0.5)) / 7)] = TILES.nan!
  return { rows: side, columns: side, bytes, low: -1, high: 1, reserved: true }
}
