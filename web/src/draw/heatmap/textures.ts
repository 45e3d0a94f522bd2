/** Textures of a pyramid's levels, in tiles: only those that are seen are sent to the graphics card, and kept while there is
 * room. */
import { coarse, type Grid, type Level } from './pyramid'
import type { Area } from './quantise'

/** Cells on a side. Large enough that a screen is a few tiles, small enough that a new one is sent within a frame. */
const SIDE = 1024

/** Tiles kept: at most 64 MB. A screen of 3840 x 2160 pixels shows 20. */
const KEPT = 64

export interface Tile {
  readonly texture: WebGLTexture
  readonly level: Level
  /** Cells of the level. */
  readonly area: Area
}

export class Textures {
  /** In the order in which they were last used. */
  private readonly tiles = new Map<string, Tile>()
  private readonly side: number

  constructor(private readonly gl: WebGL2RenderingContext) {
    this.side = Math.min(SIDE, gl.getParameter(gl.MAX_TEXTURE_SIZE) as number)
  }

  /** The tiles that an area of a level is in. */
  *cover(grid: Grid, level: Level, area: Area): Generator<Tile> {
    const { side } = this
    const rows = Math.min(grid.rows, area.row + area.rows)
    const columns = Math.min(grid.columns, area.column + area.columns)
    for (let row = Math.floor(area.row / side) * side; row < rows; row += side) {
      for (let column = Math.floor(area.column / side) * side; column < columns; column += side) {
        const tile = this.tile(grid, level, row, column)
        if (tile !== null) yield tile
      }
    }
    this.forget()
  }

  /** Cells of an area of the base have changed: their tiles are sent anew, when they are next seen. */
  changed(area: Area): void {
    for (const [key, tile] of this.tiles) {
      const other = coarse(area, tile.level)
      const apart =
        other.row >= tile.area.row + this.side ||
        other.column >= tile.area.column + this.side ||
        other.row + other.rows <= tile.area.row ||
        other.column + other.columns <= tile.area.column
      if (!apart) this.drop(key, tile)
    }
  }

  clear(): void {
    for (const [key, tile] of this.tiles) this.drop(key, tile)
  }

  private tile(grid: Grid, level: Level, row: number, column: number): Tile | null {
    const key = `${level.across} ${level.down} ${row} ${column}`
    const rows = Math.min(this.side, grid.rows - row)
    const columns = Math.min(this.side, grid.columns - column)
    let tile = this.tiles.get(key) ?? null
    // A tile at the edge of a grid that has grown is larger now, though none of its cells may have changed.
    if (tile !== null && (tile.area.rows !== rows || tile.area.columns !== columns)) {
      this.drop(key, tile)
      tile = null
    }
    if (tile === null) {
      const texture = send(this.gl, grid, { row, column, rows, columns })
      if (texture === null) return null
      tile = { texture, level, area: { row, column, rows, columns } }
    }
    this.tiles.delete(key)
    this.tiles.set(key, tile)
    return tile
  }

  /** Those not used for the longest time. */
  private forget(): void {
    for (const [key, tile] of this.tiles) {
      if (this.tiles.size <= KEPT) return
      this.drop(key, tile)
    }
  }

  private drop(key: string, tile: Tile): void {
    this.gl.deleteTexture(tile.texture)
    this.tiles.delete(key)
  }
}

function send(gl: WebGL2RenderingContext, grid: Grid, area: Area): WebGLTexture | null {
  const texture = gl.createTexture()
  if (texture === null) return null
  plain(gl, texture)
  gl.pixelStorei(gl.UNPACK_ALIGNMENT, 1)
  gl.pixelStorei(gl.UNPACK_ROW_LENGTH, grid.stride)
  const from = area.row * grid.stride + area.column
  gl.texImage2D(
    gl.TEXTURE_2D,
    0,
    gl.R8,
    area.columns,
    area.rows,
    0,
    gl.RED,
    gl.UNSIGNED_BYTE,
    grid.bytes,
    from,
  )
  gl.pixelStorei(gl.UNPACK_ROW_LENGTH, 0)
  return texture
}

/** Binds a texture whose texels are read as they are. */
export function plain(gl: WebGL2RenderingContext, texture: WebGLTexture): void {
  gl.bindTexture(gl.TEXTURE_2D, texture)
  for (const name of [gl.TEXTURE_MIN_FILTER, gl.TEXTURE_MAG_FILTER])
    gl.texParameteri(gl.TEXTURE_2D, name, gl.NEAREST)
  for (const name of [gl.TEXTURE_WRAP_S, gl.TEXTURE_WRAP_T])
    gl.texParameteri(gl.TEXTURE_2D, name, gl.CLAMP_TO_EDGE)
}
