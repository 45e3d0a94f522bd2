/** The renderer on the CPU: a frame takes a few milliseconds on a screen of 1280 x 800, whatever the grid's size. */
import { notability, type Coding, type Pooling } from './coding'
import { Pyramid, type Grid } from './pyramid'
import type { Area } from './quantise'
import { rasterise, type Tables } from './raster'
import type { HeatRenderer } from './renderer'
import type { HeatWindow } from './viewport'

export class CanvasRenderer implements HeatRenderer {
  readonly kind = 'canvas'
  private readonly context: CanvasRenderingContext2D | null
  private cells: { pyramid: Pyramid; coding: Coding } | null = null
  private tables: Tables | null = null
  private image: ImageData | null = null

  constructor(private readonly canvas: HTMLCanvasElement) {
    this.context = canvas.getContext('2d')
  }

  set(grid: Grid, coding: Coding, pooling: Pooling = 'high'): void {
    this.cells = { pyramid: new Pyramid(grid, notability(pooling, coding)), coding }
  }

  update(area: Area, cells: Uint8Array): void {
    this.cells?.pyramid.update(area, cells, this.cells.coding.missing ?? this.cells.coding.first)
  }

  colours(tables: Tables): void {
    this.tables = tables
  }

  draw(window: HeatWindow): void {
    const { width, height } = this.canvas
    if (this.context === null || this.cells === null || this.tables === null || width === 0 || height === 0)
      return
    if (this.image?.width !== width || this.image.height !== height) this.image = new ImageData(width, height)
    const pixels = new Uint32Array(this.image.data.buffer)
    pixels.fill(0)
    if (window.width > 0 && window.height > 0) {
      rasterise(this.cells.pyramid, this.cells.coding, this.tables, window, width, height, pixels)
    }
    this.context.putImageData(this.image, 0, 0)
  }

  dispose(): void {
    this.cells = this.image = null
  }
}
