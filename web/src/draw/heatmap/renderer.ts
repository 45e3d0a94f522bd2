/** Drawing a grid of bytes on a canvas: with WebGL2 where there is one, else on the CPU. */
import { CanvasRenderer } from './canvas'
import { hasCard } from './card'
import type { Coding, Pooling } from './coding'
import type { Grid } from './pyramid'
import type { Area } from './quantise'
import type { Tables } from './raster'
import type { HeatWindow } from './viewport'
import { WebglRenderer } from './webgl'

export type Kind = 'webgl2' | 'canvas'

export interface HeatRenderer {
  readonly kind: Kind
  /**
   * A new grid, which is taken over, not copied; `pooling` says which of several cells on a pixel is
   * drawn.
   */
  set(grid: Grid, coding: Coding, pooling?: Pooling): void
  /** New bytes of an area, row by row; the grid grows where the area lies outside. */
  update(area: Area, cells: Uint8Array): void
  /** Colours of the bytes. */
  colours(tables: Tables): void
  /** Draws the window over the whole canvas, whose size is in device pixels; clear where there is no cell. */
  draw(window: HeatWindow): void
  /** Frees what is on the graphics card; nothing may be called after it. */
  dispose(): void
}

export interface RendererOptions {
  /** `canvas`: never WebGL2; `webgl2`: even where no graphics card does it. */
  kind?: Kind
  /** The graphics card was lost and is back: draw again. */
  onrestored?: () => void
}

/** Browsers allow sixteen contexts a page, and take the oldest away for one more: a page of many maps must not get there. */
const MOST_CONTEXTS = 8

/** Of the page: contexts that are open, and whether there is a graphics card, which does not change. */
const page: { contexts: number; card: boolean | null } = { contexts: 0, card: null }

/**
 * WebGL2 where a graphics card does it. Emulated on the CPU it takes several times as long a frame as the other renderer
 * (benchmarks/web_heatmap.py).
 */
export function createRenderer(canvas: HTMLCanvasElement, options: RendererOptions = {}): HeatRenderer {
  const wanted = options.kind ?? ((page.card ??= hasCard()) ? 'webgl2' : 'canvas')
  if (wanted === 'webgl2' && page.contexts < MOST_CONTEXTS) {
    const made = WebglRenderer.on(canvas, {
      onrestored: options.onrestored ?? (() => undefined),
      ondisposed: () => page.contexts--,
    })
    if (made !== null) {
      page.contexts++
      return made
    }
  }
  return new CanvasRenderer(canvas)
}
