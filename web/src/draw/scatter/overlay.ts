/** What lies over the points: names of axes and values, the chosen token, and its way. */

import { niceTicks, type Tick } from './axes'
import { windowSeen, type Camera, type Matrix, type Size } from './camera'

export interface Inks {
  text: string
  muted: string
  line: string
  accent: string
  focus: string
  surface: string
}

export interface Chosen {
  /** Points in order: where the chosen token goes. */
  path: readonly number[]
  selected: number
  hovered: number
  /** Beside points of the path, first and last. */
  labelOf: (point: number) => string
}

const FONT = '12px sans-serif'
/** The title of the upright axis, and the values of the other one, have so much room. */
const TITLE = 22
const GAP = 9
const APART = { across: 90, up: 60 }

export interface Grid {
  across: readonly Tick[]
  up: readonly Tick[]
}

/** The lines of the grid of a flat picture; none of one that is turned. */
export function gridOf(camera: Camera, size: Size, equal: boolean): Grid {
  if (camera.kind !== 'flat') return { across: [], up: [] }
  const [left, right, bottom, top] = windowSeen(camera, size, equal)
  return {
    across: niceTicks(left, right, size.width / APART.across),
    up: niceTicks(bottom, top, size.height / APART.up),
  }
}

export function drawAxes(
  pen: CanvasRenderingContext2D,
  camera: Camera,
  matrix: Matrix,
  size: Size,
  grid: Grid,
  titles: readonly string[],
  inks: Inks,
): void {
  pen.font = FONT
  if (camera.kind === 'flat') {
    pen.textAlign = 'center'
    const [x, y] = camera.axes
    for (const { value, label } of grid.across) {
      const right = matrix[x]! * value + matrix[3]!
      if (right > TITLE && right < size.width - TITLE)
        written(pen, label, right, size.height - 8, inks.muted, inks.surface)
    }
    pen.textAlign = 'left'
    for (const { value, label } of grid.up) {
      const down = matrix[4 + y]! * value + matrix[7]!
      if (down > TITLE && down < size.height - TITLE) written(pen, label, 4, down, inks.muted, inks.surface)
    }
    pen.textAlign = 'right'
    written(pen, `${titles[x] ?? ''} →`, size.width - 6, size.height - 26, inks.text, inks.surface)
    pen.textAlign = 'left'
    written(pen, `↑ ${titles[y] ?? ''}`, 4, 12, inks.text, inks.surface)
    return
  }
  const { low, high } = camera.box
  const place = (at: readonly number[]): [number, number] => [
    matrix[0]! * at[0]! + matrix[1]! * at[1]! + matrix[2]! * at[2]! + matrix[3]!,
    matrix[4]! * at[0]! + matrix[5]! * at[1]! + matrix[6]! * at[2]! + matrix[7]!,
  ]
  const corner = place(low)
  pen.textAlign = 'center'
  for (const axis of [0, 1, 2]) {
    const end = place(low.map((value, other) => (other === axis ? high[axis]! : value)))
    pen.strokeStyle = inks.muted
    pen.lineWidth = 1
    pen.beginPath()
    pen.moveTo(...corner)
    pen.lineTo(...end)
    pen.stroke()
    written(pen, titles[axis] ?? '', ...end, inks.text, inks.surface)
  }
}

export function drawChosen(
  pen: CanvasRenderingContext2D,
  places: Float32Array,
  chosen: Chosen,
  inks: Inks,
  scale: number,
  size: Size,
): void {
  const place = (point: number): [number, number] => [
    places[3 * point]! / scale,
    places[3 * point + 1]! / scale,
  ]
  const path = chosen.path.filter((point) => Number.isFinite(place(point)[0]))
  if (path.length > 1) {
    for (const [ink, width] of [
      [inks.surface, 4],
      [inks.focus, 2],
    ] as const) {
      pen.strokeStyle = ink
      pen.lineWidth = width
      pen.beginPath()
      path.forEach((point, at) => (at ? pen.lineTo(...place(point)) : pen.moveTo(...place(point))))
      pen.stroke()
    }
    pen.font = FONT
    pen.textAlign = 'left'
    for (const point of [path[0]!, path.at(-1)!]) {
      const text = chosen.labelOf(point)
      const [x, y] = besides(place(point), 9, pen.measureText(text).width, size)
      written(pen, text, x, y, inks.text, inks.surface)
    }
  }
  if (chosen.hovered >= 0) ring(pen, ...place(chosen.hovered), 7, inks.text, inks.surface)
  if (chosen.selected >= 0) ring(pen, ...place(chosen.selected), 9, inks.focus, inks.surface)
}

/** Names beside points: of as few as can be told apart. */
export function drawNames(
  pen: CanvasRenderingContext2D,
  places: Float32Array,
  names: readonly string[],
  inks: Inks,
  scale: number,
  size: Size,
): void {
  pen.font = FONT
  pen.textAlign = 'left'
  names.forEach((name, point) => {
    const [x, y] = [places[3 * point]! / scale, places[3 * point + 1]! / scale]
    if (!name || !Number.isFinite(x + y)) return
    const [left] = besides([x, y], 0, pen.measureText(name).width, size)
    written(pen, name, left, y, inks.muted, inks.surface)
  })
}

/** Where a text begins that stands beside a point, so much above it: within the picture, and not on its titles. */
export function besides([x, y]: [number, number], above: number, wide: number, size: Size): [number, number] {
  const right = x + GAP + wide <= size.width
  return [
    right ? x + GAP : Math.max(0, x - GAP - wide),
    y - above < TITLE ? y + Math.max(above, GAP) : y - above,
  ]
}

function ring(
  pen: CanvasRenderingContext2D,
  x: number,
  y: number,
  radius: number,
  ink: string,
  behind: string,
): void {
  if (!Number.isFinite(x + y)) return
  for (const [colour, width] of [
    [behind, 5],
    [ink, 2.5],
  ] as const) {
    pen.strokeStyle = colour
    pen.lineWidth = width
    pen.beginPath()
    pen.arc(x, y, radius, 0, 2 * Math.PI)
    pen.stroke()
  }
}

/** With what lies behind it kept away, so that it can be read on points. */
function written(
  pen: CanvasRenderingContext2D,
  text: string,
  x: number,
  y: number,
  ink: string,
  behind: string,
): void {
  pen.textBaseline = 'middle'
  pen.lineWidth = 4
  pen.lineJoin = 'round'
  pen.strokeStyle = behind
  pen.strokeText(text, x, y)
  pen.fillStyle = ink
  pen.fillText(text, x, y)
}
