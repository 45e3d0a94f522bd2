import { describe, expect, it } from 'vitest'
import { niceTicks } from './axes'
import {
  fitted,
  matrixOf,
  moved,
  readCamera,
  rotated,
  turned,
  windowSeen,
  writtenCamera,
  zoomed,
  type Camera,
} from './camera'
import { besides } from './overlay'
import { clear, drawScene, farFirst, nearestPoint, paperOf, projected, type Colour } from './raster'
import { beyond, boxOf, innerBoxOf, union, type Scene } from './scene'

const SIZE = { width: 200, height: 100 }

function sceneOf(points: readonly (readonly number[])[], lines: number[] = []): Scene {
  return {
    count: points.length,
    positions: Float32Array.from(points.flat()),
    colours: Uint8Array.from(points.flatMap((_, at) => [250 - at, 10, 20])),
    lines: Uint32Array.from(lines),
  }
}

function seen(camera: Camera, point: readonly number[], equal = false): number[] {
  const places = projected(Float32Array.from(point), 1, matrixOf(camera, SIZE, equal), new Float32Array(3))
  return [...places]
}

function colourAt(paper: ReturnType<typeof paperOf>, x: number, y: number): number[] {
  return [...paper.pixels.subarray(4 * (y * paper.width + x), 4 * (y * paper.width + x) + 3)]
}

describe('what is seen', () => {
  const box = { low: [-1, 0, 5], high: [1, 10, 6] } as const

  it('fits a box into the picture, with a margin', () => {
    const camera = fitted(box, [0, 1])
    const [left, bottom] = seen(camera, [-1, 0, 5])
    const [right, top] = seen(camera, [1, 10, 6])
    expect(left).toBeGreaterThan(0)
    expect(right).toBeLessThan(SIZE.width)
    expect(left! + right!).toBeCloseTo(SIZE.width, 3)
    expect(bottom).toBeLessThan(SIZE.height)
    expect(top! + bottom!).toBeCloseTo(SIZE.height, 3)
  })

  it('makes units equal by showing more along one axis', () => {
    const camera = fitted(box, [0, 1])
    const [left, right, bottom, top] = windowSeen(camera, SIZE, true)
    expect((right - left) / SIZE.width).toBeCloseTo((top - bottom) / SIZE.height, 10)
    expect(right - left).toBeGreaterThan(camera.window[1] - camera.window[0])
  })

  it('shows a box that is a point', () => {
    const camera = fitted({ low: [3, 0, 0], high: [3, 0, 0] }, [0, 1])
    expect(seen(camera, [3, 0, 0]).slice(0, 2)).toEqual([100, 50])
  })

  it.each(['flat', 'turned'])('zooms about the place pointed at: %s', (kind) => {
    const camera = kind === 'flat' ? fitted(box, [0, 2]) : turned(box)
    const point = [0.3, 2, 5.2]
    const [x, y] = seen(camera, point) as [number, number]
    const [nearX, nearY] = seen(zoomed(camera, SIZE, false, 3, x, y), point)
    expect([nearX, nearY]).toEqual([expect.closeTo(x, 2), expect.closeTo(y, 2)])
  })

  it.each(['flat', 'turned'])('moves with the pointer: %s', (kind) => {
    const camera = kind === 'flat' ? fitted(box, [0, 1]) : turned(box)
    const [x, y] = seen(camera, [0, 5, 5.5]) as [number, number]
    const [dx, dy] = seen(moved(camera, SIZE, false, 12, -7), [0, 5, 5.5])
    expect([dx, dy]).toEqual([expect.closeTo(x + 12, 3), expect.closeTo(y - 7, 3)])
  })

  it('turns: by half a turn what was near is far, and left is right', () => {
    const camera = turned(box, 0, 0)
    const corner = [1, 5, 6]
    const [x, , near] = seen(camera, corner) as [number, number, number]
    const [otherX, , far] = seen({ ...camera, yaw: Math.PI }, corner) as [number, number, number]
    expect(x - 100).toBeCloseTo(100 - otherX, 3)
    expect(near).toBeCloseTo(-far, 5)
    expect(near).toBeGreaterThan(0)
  })

  it('looks from above where it is tilted: what is nearer is lower', () => {
    const camera = rotated(turned(box, 0, 0), 0, 60)
    expect(camera.pitch).toBeGreaterThan(0)
    expect(seen(camera, [0, 5, 6])[1]).toBeGreaterThan(seen(camera, [0, 5, 5])[1]!)
  })

  it.each([fitted(box, [0, 1]), turned(box, 1.25, -0.5)])('is restored from an address', (camera) => {
    const changed = zoomed(camera, SIZE, false, 2, 30, 40)
    const restored = readCamera(writtenCamera(changed), camera)!
    expect(seen(restored, [0, 5, 5.5])[0]).toBeCloseTo(seen(changed, [0, 5, 5.5])[0]!, 1)
  })

  it.each(['', 'x', '1,2', '1,1,0,2', '1,2,3,4,5', 'NaN,1,2,3'])(
    'takes no nonsense from an address: %s',
    (text) => {
      expect(readCamera(text, fitted(box, [0, 1]))).toBeNull()
    },
  )
})

describe('the box of points', () => {
  it('passes over those that have no place', () => {
    const scene = sceneOf([
      [NaN, 100, 0],
      [1, 2, 3],
      [-1, Infinity, 0],
      [4, 0, -1],
    ])
    expect(boxOf(scene)).toEqual({ low: [1, 0, -1], high: [4, 2, 3] })
  })

  it('leaves out a few that are far away', () => {
    const near = Array.from({ length: 30 }, (_, at) => [at % 7, (at * 3) % 5, 0])
    const scene = sceneOf([...near, [20_000, 2, 0], [900, 1, 0]])
    const { low, high } = innerBoxOf(scene)
    expect(beyond(scene, { low, high })).toBe(2)
    expect(beyond(scene, union({ low, high }, boxOf(scene)))).toBe(0)
    expect([low[0], high[0]]).toEqual([0, 6])
    expect([low[1], high[1]]).toEqual([0, 4])
  })

  it('leaves out none of two clusters, nor of equal values', () => {
    const clusters = Array.from({ length: 30 }, (_, at) => [at % 2 ? 0 : 50 + (at % 3), 1, 0])
    expect(innerBoxOf(sceneOf(clusters)).high[0]).toBe(52)
    const equal = [...Array.from({ length: 20 }, () => [0, 0, 0]), [5, 0, 0]]
    expect(innerBoxOf(sceneOf(equal)).high[0]).toBe(5)
    expect(innerBoxOf(sceneOf([]))).toEqual(boxOf(sceneOf([])))
  })
})

describe('drawing', () => {
  const BACK: Colour = [1, 2, 3]
  const pen = { radius: 2, lineAlpha: 1, background: BACK, deep: false }

  it('puts points where they are seen, and nothing elsewhere', () => {
    const paper = paperOf(20, 10)
    clear(paper, BACK)
    const scene = sceneOf([
      [5, 5, 0],
      [NaN, 5, 0],
      [1000, 5, 0],
      [-1, 9, 0],
    ])
    drawScene(paper, scene, scene.positions, pen)
    expect(colourAt(paper, 5, 5)).toEqual([250, 10, 20])
    expect(colourAt(paper, 5, 8)).not.toEqual([250, 10, 20])
    expect(colourAt(paper, 15, 2)).toEqual([...BACK])
    expect(colourAt(paper, 0, 9)).toEqual([247, 10, 20])
  })

  it('draws lines, also of points that lie far outside', () => {
    const paper = paperOf(20, 10)
    clear(paper, BACK)
    const scene = sceneOf(
      [
        [-1e6, 4.5, 0],
        [1e6, 4.5, 0],
        [NaN, 0, 0],
      ],
      [0, 1, 1, 2],
    )
    drawScene(paper, scene, scene.positions, { ...pen, radius: 0.5 })
    const row = Array.from({ length: 20 }, (_, x) => colourAt(paper, x, 4)[0])
    expect(new Set(row)).toEqual(new Set([250]))
    expect(colourAt(paper, 10, 5)).toEqual([...BACK])
  })

  it('draws what is near over what is far, and fainter the farther', () => {
    const paper = paperOf(9, 9)
    clear(paper, BACK)
    const scene = sceneOf([
      [4, 4, 1.5],
      [4, 4, -0.5],
    ])
    expect([...farFirst(scene.positions, 2)]).toEqual([1, 0])
    drawScene(paper, scene, scene.positions, { ...pen, deep: true })
    expect(colourAt(paper, 4, 4)).toEqual([250, 10, 20])
  })

  it('finds the nearest point within reach', () => {
    const places = Float32Array.from([10, 10, 0, NaN, 10, 0, 14, 10, 0])
    expect(nearestPoint(places, 3, 13, 10, 5)).toBe(2)
    expect(nearestPoint(places, 3, 30, 30, 5)).toBe(-1)
  })
})

it('writes names within the picture, and beside its titles', () => {
  const size = { width: 300, height: 200 }
  expect(besides([100, 100], 9, 50, size)).toEqual([109, 91])
  expect(besides([280, 100], 9, 50, size)).toEqual([221, 91])
  expect(besides([20, 100], 9, 290, size)).toEqual([0, 91])
  expect(besides([4, 12], 9, 50, size)).toEqual([13, 21])
})

it('puts ticks at round values', () => {
  expect(niceTicks(-1, 1, 4).map((tick) => tick.value)).toEqual([-1, -0.5, 0, 0.5, 1])
  expect(niceTicks(0, 0.0031, 4).map((tick) => tick.label)).toEqual(['0', '0.001', '0.002', '0.003'])
  expect(niceTicks(1, 1, 3)).toEqual([])
})
