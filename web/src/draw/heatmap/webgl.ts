/** The renderer with WebGL2: bytes are a texture, and the graphics card looks their colours up. */
import { notability, type Coding, type Pooling } from './coding'
import { levelFor, Pyramid, type Grid } from './pyramid'
import type { Area } from './quantise'
import { hatched, scaled, type Tables } from './raster'
import type { HeatRenderer } from './renderer'
import { compile, type Shader } from './shader'
import { plain, Textures, type Tile } from './textures'
import type { HeatWindow } from './viewport'

interface Callbacks {
  onrestored: () => void
  ondisposed: () => void
}

/** What a lost context takes along. */
interface Resources {
  readonly shader: Shader
  readonly textures: Textures
  readonly tables: WebGLTexture
}

export class WebglRenderer implements HeatRenderer {
  readonly kind = 'webgl2'
  private cells: { pyramid: Pyramid; coding: Coding } | null = null
  private tables: Tables | null = null

  /** Null where there is no WebGL2; the canvas can have another context then. */
  static on(canvas: HTMLCanvasElement, callbacks: Callbacks): WebglRenderer | null {
    const gl = canvas.getContext('webgl2', {
      antialias: false,
      depth: false,
      stencil: false,
    })
    return gl === null ? null : new WebglRenderer(canvas, gl, callbacks)
  }

  private resources: Resources | null

  private constructor(
    private readonly canvas: HTMLCanvasElement,
    private readonly gl: WebGL2RenderingContext,
    private readonly callbacks: Callbacks,
  ) {
    this.resources = resourcesOf(gl)
    canvas.addEventListener('webglcontextlost', this.onlost)
    canvas.addEventListener('webglcontextrestored', this.onrestored)
  }

  set(grid: Grid, coding: Coding, pooling: Pooling = 'high'): void {
    this.cells = { pyramid: new Pyramid(grid, notability(pooling, coding)), coding }
    this.resources?.textures.clear()
  }

  update(area: Area, cells: Uint8Array): void {
    this.cells?.pyramid.update(area, cells, this.cells.coding.missing ?? this.cells.coding.first)
    this.resources?.textures.changed(area)
  }

  colours(tables: Tables): void {
    this.tables = tables
    if (this.resources !== null) sendTables(this.gl, this.resources.tables, tables)
  }

  draw(window: HeatWindow): void {
    const { width, height } = this.canvas
    if (this.resources === null || width === 0 || height === 0) return
    this.gl.viewport(0, 0, width, height)
    this.gl.clear(this.gl.COLOR_BUFFER_BIT)
    if (this.cells === null || this.tables === null || !(window.width > 0 && window.height > 0)) return
    this.drawCells(this.resources, this.cells.pyramid, this.cells.coding, window)
  }

  dispose(): void {
    this.canvas.removeEventListener('webglcontextlost', this.onlost)
    this.canvas.removeEventListener('webglcontextrestored', this.onrestored)
    this.cells = this.resources = null
    // Contexts are few, and collected late.
    this.gl.getExtension('WEBGL_lose_context')?.loseContext()
    this.callbacks.ondisposed()
  }

  private drawCells(
    { shader, textures, tables }: Resources,
    pyramid: Pyramid,
    coding: Coding,
    window: HeatWindow,
  ): void {
    const { gl } = this
    const { width, height } = this.canvas
    const { places } = shader
    const level = levelFor(window, { width, height }, pyramid.base)
    const grid = pyramid.grid(level)
    gl.useProgram(shader.program)
    gl.activeTexture(gl.TEXTURE1)
    gl.bindTexture(gl.TEXTURE_2D, tables)
    gl.activeTexture(gl.TEXTURE0)
    gl.uniform1i(places.cells, 0)
    gl.uniform1i(places.tables, 1)
    gl.uniform1f(places.height, height)
    gl.uniform3i(places.special, coding.nan ?? -1, coding.infinite ?? -1, coding.missing ?? -1)
    gl.uniform1i(places.hatched, hatched(window, width, height) ? 1 : 0)
    const seen = scaled(window, pyramid.base, grid)
    gl.uniform2f(places.cellsPerPixel, seen.width / width, seen.height / height)
    for (const tile of textures.cover(grid, level, areaOf(seen))) {
      this.drawTile(shader, tile, seen)
    }
  }

  private drawTile({ places }: Shader, { area, texture }: Tile, seen: HeatWindow): void {
    const { gl } = this
    const across = edges(area.column, area.columns, seen.left, seen.width, this.canvas.width)
    const down = edges(area.row, area.rows, seen.top, seen.height, this.canvas.height)
    if (across.start >= across.end || down.start >= down.end) return
    const [x, y] = [2 / this.canvas.width, 2 / this.canvas.height]
    gl.uniform4f(
      places.rectangle,
      across.start * x - 1,
      1 - down.start * y,
      across.end * x - 1,
      1 - down.end * y,
    )
    // Relative to the tile, so that 32 bits are exact in a grid of any size.
    gl.uniform2f(places.origin, seen.left - area.column, seen.top - area.row)
    gl.uniform2i(places.last, area.columns - 1, area.rows - 1)
    gl.bindTexture(gl.TEXTURE_2D, texture)
    gl.drawArrays(gl.TRIANGLE_STRIP, 0, 4)
  }

  private readonly onlost = (event: Event): void => {
    event.preventDefault() // else it never comes back
    this.resources = null
  }

  private readonly onrestored = (): void => {
    this.resources = resourcesOf(this.gl)
    if (this.tables !== null) this.colours(this.tables)
    this.callbacks.onrestored()
  }
}

/** Null while the context is lost. */
function resourcesOf(gl: WebGL2RenderingContext): Resources | null {
  const shader = compile(gl)
  const tables = gl.createTexture()
  if (shader === null || tables === null) return null
  gl.clearColor(0, 0, 0, 0)
  return { shader, textures: new Textures(gl), tables }
}

function sendTables(gl: WebGL2RenderingContext, texture: WebGLTexture, { colours, inks }: Tables): void {
  const both = new Uint8Array(colours.length + inks.length)
  both.set(colours)
  both.set(inks, colours.length)
  plain(gl, texture)
  gl.texImage2D(gl.TEXTURE_2D, 0, gl.RGBA8, 256, 2, 0, gl.RGBA, gl.UNSIGNED_BYTE, both)
}

function areaOf(seen: HeatWindow): Area {
  const [row, column] = [Math.max(0, Math.floor(seen.top)), Math.max(0, Math.floor(seen.left))]
  const rows = Math.ceil(seen.top + seen.height) - row
  return { row, column, rows, columns: Math.ceil(seen.left + seen.width) - column }
}

/** The pixels whose centres lie on cells `first` to `first + count`. */
function edges(first: number, count: number, start: number, length: number, pixels: number) {
  const pixel = (cell: number) => Math.ceil(((cell - start) / length) * pixels - 0.5)
  return { start: Math.max(0, pixel(first)), end: Math.min(pixels, pixel(first + count)) }
}
