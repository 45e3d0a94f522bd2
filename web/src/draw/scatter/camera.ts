/** From where points are seen: along two of their axes, or turned freely. Pure. */

import type { Box } from './scene'

export interface Size {
  width: number
  height: number
}

export type Axis = 0 | 1 | 2

/** Two axes; `window` is what of them is seen: left, right, bottom, top. */
export interface Flat {
  readonly kind: 'flat'
  readonly axes: readonly [Axis, Axis]
  readonly window: readonly [number, number, number, number]
}

/** Three axes, turned by `yaw` about the upright and then tilted by `pitch`, in radians. */
export interface Turned {
  readonly kind: 'turned'
  readonly yaw: number
  readonly pitch: number
  /** 1: all of it is seen. */
  readonly zoom: number
  /** Of its middle, in shares of the picture. */
  readonly shift: readonly [number, number]
  readonly box: Box
}

export type Camera = Flat | Turned

/** Rows of 4: pixels to the right, pixels down, and how near; of x, y, z and 1. */
export type Matrix = Float64Array

const MARGIN = 0.06
const CLOSEST = 1e-9
const FARTHEST = 1e6

/** All of a box. `equal`: a unit is as long along both axes. */
export function fitted(box: Box, axes: readonly [Axis, Axis]): Flat {
  const [left, right] = widened(box.low[axes[0]], box.high[axes[0]])
  const [bottom, top] = widened(box.low[axes[1]], box.high[axes[1]])
  return { kind: 'flat', axes, window: [left, right, bottom, top] }
}

export function turned(box: Box, yaw = 0.6, pitch = 0.35): Turned {
  return { kind: 'turned', yaw, pitch, zoom: 1, shift: [0, 0], box }
}

function widened(low: number, high: number): [number, number] {
  const length = high - low
  const more = length > 0 ? length * MARGIN : Math.abs(low) * MARGIN || 1
  return [low - more, high + more]
}

/** What is seen of two axes in a picture of that size: with equal units it is more than the window along one of them. */
export function windowSeen(camera: Flat, { width, height }: Size, equal: boolean): Flat['window'] {
  const [left, right, bottom, top] = camera.window
  if (!equal) return camera.window
  const unit = Math.max((right - left) / width, (top - bottom) / height)
  const [x, y] = [(left + right) / 2, (bottom + top) / 2]
  return [x - (unit * width) / 2, x + (unit * width) / 2, y - (unit * height) / 2, y + (unit * height) / 2]
}

export function matrixOf(camera: Camera, size: Size, equal: boolean): Matrix {
  return camera.kind === 'flat' ? flatMatrix(camera, size, equal) : turnedMatrix(camera, size, equal)
}

function flatMatrix(camera: Flat, size: Size, equal: boolean): Matrix {
  const [left, right, bottom, top] = windowSeen(camera, size, equal)
  const matrix = new Float64Array(12)
  const across = size.width / (right - left)
  const up = size.height / (top - bottom)
  matrix[camera.axes[0]] = across
  matrix[3] = -left * across
  matrix[4 + camera.axes[1]] = -up
  matrix[7] = top * up
  return matrix
}

function turnedMatrix(
  { yaw, pitch, zoom, shift, box }: Turned,
  { width, height }: Size,
  equal: boolean,
): Matrix {
  const middle = [0, 1, 2].map((axis) => (box.low[axis]! + box.high[axis]!) / 2)
  const halves = [0, 1, 2].map((axis) => (box.high[axis]! - box.low[axis]!) / 2 || 1)
  // Unless units are to be equal, each axis is as long as the others: the third is often much the shortest.
  const half = equal ? halves.map(() => Math.max(...halves)) : halves
  const scale = (Math.min(width, height) / 2 / Math.hypot(1, 1, 1)) * zoom
  const [cy, sy, cp, sp] = [Math.cos(yaw), Math.sin(yaw), Math.cos(pitch), Math.sin(pitch)]
  const rows = [
    [cy, 0, sy],
    [-sp * sy, -cp, sp * cy],
    [-cp * sy, sp, cp * cy],
  ]
  const offset = [width * (0.5 + shift[0]), height * (0.5 + shift[1]), 0]
  const matrix = new Float64Array(12)
  rows.forEach((row, at) => {
    const factor = at === 2 ? 1 : scale
    let constant = offset[at]!
    row.forEach((value, axis) => {
      matrix[4 * at + axis] = (value * factor) / half[axis]!
      constant -= matrix[4 * at + axis]! * middle[axis]!
    })
    matrix[4 * at + 3] = constant
  })
  return matrix
}

/** By `factor` (above 1: nearer) about a place of the picture. */
export function zoomed(
  camera: Camera,
  size: Size,
  equal: boolean,
  factor: number,
  x: number,
  y: number,
): Camera {
  if (camera.kind === 'turned') {
    const zoom = clamp(camera.zoom * factor, 0.1, 1000)
    const by = zoom / camera.zoom
    const [right, down] = [x / size.width - 0.5, y / size.height - 0.5]
    const shift = [right - (right - camera.shift[0]) * by, down - (down - camera.shift[1]) * by] as const
    return { ...camera, zoom, shift }
  }
  const [left, right, bottom, top] = windowSeen(camera, size, equal)
  const [across, up] = [right - left, top - bottom]
  const by = clamp(1 / factor, CLOSEST / Math.min(across, up), FARTHEST)
  const [px, py] = [left + (across * x) / size.width, top - (up * y) / size.height]
  return {
    ...camera,
    window: [px - (px - left) * by, px + (right - px) * by, py - (py - bottom) * by, py + (top - py) * by],
  }
}

/** By so many pixels. */
export function moved(camera: Camera, size: Size, equal: boolean, dx: number, dy: number): Camera {
  if (camera.kind === 'turned') {
    const shift = [camera.shift[0] + dx / size.width, camera.shift[1] + dy / size.height] as const
    return { ...camera, shift }
  }
  const [left, right, bottom, top] = windowSeen(camera, size, equal)
  const [x, y] = [(dx / size.width) * (right - left), (dy / size.height) * (top - bottom)]
  return { ...camera, window: [left - x, right - x, bottom + y, top + y] }
}

/** A drag of so many pixels turns a freely turned camera. */
export function rotated(camera: Turned, dx: number, dy: number): Turned {
  const pitch = clamp(camera.pitch + dy * 0.008, -Math.PI / 2, Math.PI / 2)
  return { ...camera, yaw: camera.yaw + dx * 0.008, pitch }
}

function clamp(value: number, low: number, high: number): number {
  return Math.min(Math.max(value, low), high)
}

/** For addresses: a few digits of each number. */
export function writtenCamera(camera: Camera): string {
  const numbers =
    camera.kind === 'flat' ? camera.window : [camera.yaw, camera.pitch, camera.zoom, ...camera.shift]
  return numbers.map((number) => Number(number.toPrecision(5))).join(',')
}

/** What {@link writtenCamera} gave, for a camera as `usual` in what it does not say; null for anything else. */
export function readCamera(text: string, usual: Camera): Camera | null {
  const numbers = text.split(',').map(Number)
  if (text.trim() === '' || !numbers.every(Number.isFinite)) return null
  if (usual.kind === 'flat') {
    const [left, right, bottom, top] = numbers
    if (numbers.length !== 4 || !(left! < right!) || !(bottom! < top!)) return null
    return { ...usual, window: [left!, right!, bottom!, top!] }
  }
  const [yaw, pitch, zoom, x, y] = numbers
  if (numbers.length !== 5 || !(zoom! > 0)) return null
  return { ...usual, yaw: yaw!, pitch: pitch!, zoom: zoom!, shift: [x!, y!] }
}
