/** A heat map on a canvas that draws itself when, and only when, something about it has changed. */
import type { Theme } from '../colours'
import { countsOf, encode, encodeChanged, tablesOf, type Encoded, type HeatCells, type Look } from './encode'
import { createRenderer, type HeatRenderer, type Kind } from './renderer'
import type { HeatWindow, Size } from './viewport'

export class Drawing {
  private readonly renderer: HeatRenderer
  private shown: { cells: HeatCells; look: Look; encoded: Encoded } | null = null
  private theme: Theme = 'dark'
  private window: HeatWindow = { left: 0, top: 0, width: 0, height: 0 }
  private size: Size = { width: 0, height: 0 }
  private frame = 0

  constructor(
    private readonly canvas: HTMLCanvasElement,
    kind?: Kind,
  ) {
    this.renderer = createRenderer(canvas, { kind, onrestored: () => this.request() })
  }

  get kind(): Kind {
    return this.renderer.kind
  }

  /** Shows these cells; of cells that say what has changed only that is encoded and sent anew. */
  show(cells: HeatCells, look: Look): Encoded {
    const before = this.shown
    const update = before !== null && alike(look, before.look) ? encodeChanged(cells, look, before) : null
    if (before === null || update === null) return this.showAll(cells, look)
    this.renderer.update(update.area, update.bytes)
    // What was overwritten is still counted: a legend that says too much until all is encoded again.
    const more = countsOf(update.bytes)
    const counts = before.encoded.counts.map((count, byte) => count + more[byte]!)
    this.shown = { cells, look, encoded: { ...before.encoded, counts } }
    this.request()
    return this.shown.encoded
  }

  private showAll(cells: HeatCells, look: Look): Encoded {
    const encoded = encode(cells, look)
    this.renderer.set(encoded.grid, encoded.coding, encoded.pooling)
    this.shown = { cells, look, encoded }
    this.colour()
    return encoded
  }

  setTheme(theme: Theme): void {
    if (theme === this.theme) return
    this.theme = theme
    this.colour()
  }

  private colour(): void {
    if (this.shown === null) return
    this.renderer.colours(tablesOf(this.shown.encoded, this.shown.look.colours, this.theme))
    this.request()
  }

  setWindow(window: HeatWindow): void {
    this.window = window
    this.request()
  }

  /** In CSS pixels. */
  setSize(size: Size): void {
    this.size = size
    this.request()
  }

  dispose(): void {
    cancelAnimationFrame(this.frame)
    this.renderer.dispose()
  }

  private request(): void {
    if (this.frame === 0) this.frame = requestAnimationFrame(() => this.draw())
  }

  private draw(): void {
    this.frame = 0
    const { canvas } = this
    const [width, height] = [this.size.width, this.size.height].map((side) =>
      Math.round(side * devicePixelRatio),
    )
    if (width === undefined || height === undefined || width === 0 || height === 0) return
    // Even the same size would clear it.
    if (canvas.width !== width) canvas.width = width
    if (canvas.height !== height) canvas.height = height
    this.renderer.draw(this.window)
  }
}

function alike(one: Look, other: Look): boolean {
  const range = String(one.range) === String(other.range)
  return range && one.scale === other.scale && one.colours === other.colours && one.pooling === other.pooling
}
