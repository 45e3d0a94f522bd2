/** Drawing a grid of bytes on a canvas: with WebGL2 where there is one, else on the CPU. */
import { CanvasRenderer } from './canvas'
import type { Pooling } from './coding'
import type { Area } from './quantise'
import type { Tables } from './raster'
import type { HeatWindow } from './viewport'
import { WebglRenderer } from './webgl'

export type Kind = 'webgl2' | 'canvas'

export interface HeatRenderer {
  readonly kind: Kind
  /** A new grid. The bytes (row by row) are taken over, not copied. */
  set(cells: Uint8Array, rows: number, columns: number): void
  /** New bytes of an area, row by row; the grid grows where the area lies outside. */
  update(area: Area, cells: Uint8Array): void
  /** Colours of the bytes. */
  colours(tables: Tables): void
  /** Which of several cells on a pixel is drawn; `high` at first. */
  pooling(pooling: Pooling): void
  /** Draws the window over the whole canvas, whose size is in device pixels; clear where there is no cell. */
  draw(window: HeatWindow): void
  /** Frees what is on the graphics card; nothing may be called after it. */
  dispose(): void
}

export interface RendererOptions {
  /** `canvas`: never WebGL2. */
  kind?: Kind
  /** The graphics card was lost and is back: draw again. */
  onrestored?: () => void
}

/** Browsers allow sixteen contexts a page, and take the oldest away for one more: a page of many maps must not get there. */
const MOST_CONTEXTS = 8

let contexts = 0

export function createRenderer(canvas: HTMLCanvasElement, options: RendererOptions = {}): HeatRenderer {
  if (options.kind !== 'canvas' && contexts < MOST_CONTEXTS) {
    const made = WebglRenderer.on(canvas, {
      onrestored: options.onrestored ?? (() => undefined),
      ondisposed: () => contexts--,
    })
    if (made !== null) {
      contexts++
      return made
    }
  }
  return new CanvasRenderer(canvas)
}
