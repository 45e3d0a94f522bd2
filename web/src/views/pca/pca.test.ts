import { describe, expect, it } from 'vitest'
import { contrast, rgbOfHex } from '../../draw/colours-oklab'
import type { Frame, Tensor } from '../../api/frames'
import { alignedClouds, near, normalised, onto, procrustes } from './align'
import { cloudOf, familyOf, layerOf, shares, unplaced, type Cloud } from './clouds'
import { pathOf, pointsOf, shade, tokenAt, wordsOf } from './scene'
import { csvOfClouds } from './table'

function random(seed: number): () => number {
  let state = seed
  return () => (state = (state * 16807) % 2147483647) / 2147483647 - 0.5
}

function tensor(values: number[], shape: number[], dtype = 'float32'): Tensor {
  const made = dtype === 'int64' ? BigInt64Array.from(values, BigInt) : Float32Array.from(values)
  return { dtype, shape, values: made }
}

function frame(
  coordinates: number[],
  width: number,
  {
    index,
    meta = {},
    arrays = {},
    tap = 'layers.3.output',
  }: {
    index?: number[]
    meta?: Frame['meta']
    arrays?: Frame['arrays']
    tap?: string
  } = {},
): Frame {
  const count = coordinates.length / width
  return {
    tap,
    what: 'pca',
    subscription: 's',
    step: 4,
    microbatch: 0,
    rank: 0,
    replica: 0,
    shard: [['dp', 1, 2]],
    meta,
    unixNs: 0n,
    arrays: {
      coordinates: tensor(coordinates, [count, width]),
      variance: tensor(Array(width).fill(2), [width]),
      total: tensor([8], [1]),
      index: tensor(index ?? Array.from({ length: count }, (_, at) => at), [index?.length ?? count], 'int64'),
      ...arrays,
    },
  }
}

function cloud(points: number[][], tap = 'layers.0.output'): Cloud {
  return cloudOf(frame(points.flat(), points[0]!.length, { tap }))!
}

describe('a cloud', () => {
  it('knows the place of each token in its sequence', () => {
    const found = cloudOf(
      frame(Array(18).fill(1), 3, { meta: { labels: ['s', 'b', 'h'], shape: [3, 2, 8] } }),
    )!
    expect([...found.positions]).toEqual([0, 0, 1, 1, 2, 2])
    expect([...found.groups]).toEqual([0, 1, 0, 1, 0, 1])
    expect(found.groupName(1)).toBe('sequence 1')
    expect(found.part).toBe('dp 1')
    expect(shares(found)).toEqual([0.25, 0.25, 0.25])
  })

  it('knows sequences whose dimension comes first, and heads', () => {
    const found = cloudOf(
      frame(Array(24).fill(1), 2, { meta: { labels: ['b', 's', 'n', 'd'], shape: [2, 3, 2, 4] } }),
    )!
    expect([...found.positions]).toEqual([0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2])
    expect([...found.groups]).toEqual([0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3])
    expect(found.groupName(3)).toBe('sequence 1, head 1')
  })

  it('takes chosen tokens of several sequences', () => {
    const meta = { labels: ['s', 'b', 'h'], shape: [100, 2, 8] }
    const found = cloudOf(frame(Array(8).fill(1), 2, { index: [7, 90], meta }))!
    expect([...found.positions]).toEqual([7, 7, 90, 90])
    expect([...found.groups]).toEqual([0, 1, 0, 1])
    expect([...found.ids]).toEqual([14, 15, 180, 181])
  })

  it('puts parts of a sequence that lie on several ranks after each other', () => {
    const arrays = { rank: tensor([0, 0, 1, 1], [4], 'int64') }
    const meta = { labels: ['s', 'b', 'h'], shape: [2, 1, 8] }
    const found = cloudOf(frame(Array(12).fill(1), 3, { index: [0, 1, 0, 1], meta, arrays }))!
    expect([...found.positions]).toEqual([0, 1, 2, 3])
    expect(new Set(found.ids).size).toBe(4)
  })

  it('shows no axes that are only followed, and no more than three', () => {
    expect(cloudOf(frame(Array(16).fill(1), 8, { meta: { components: 2 } }))!.components).toBe(2)
    expect(cloudOf(frame(Array(16).fill(1), 8))!.components).toBe(3)
  })

  it('is none where the parts could not be put together', () => {
    const broken = frame([1, 2, 3], 3)
    broken.arrays = { 'coordinates@3': broken.arrays['coordinates']! }
    expect(cloudOf(broken)).toBeNull()
  })

  it('says which tokens have no place', () => {
    expect(
      unplaced(
        cloud([
          [1, 2],
          [NaN, NaN],
          [3, Infinity],
        ]),
      ),
    ).toEqual([1, 2])
  })

  it('belongs to a family', () => {
    const taps = [
      'layers.10.output',
      'layers.2.output',
      'layers.2.mlp.output',
      'embedding.output',
      'layers.0.output',
    ]
    expect(familyOf('layers.2.output', taps)).toEqual([
      'layers.0.output',
      'layers.2.output',
      'layers.10.output',
    ])
    expect(familyOf('embedding.output', taps)).toEqual(['embedding.output'])
    expect([layerOf('model.layers.7.output'), layerOf('logits')]).toEqual([7, null])
  })
})

describe('Procrustes', () => {
  const next = random(5)
  const points = Array.from({ length: 40 }, () => [4 * next(), 2 * next(), next()])

  /** A rotation by Givens angles, mirrored along the first axis. */
  function moved(point: number[], by: number, scale: number, mirror: boolean): number[] {
    const [x, y, z] = point as [number, number, number]
    const [c, s] = [Math.cos(by), Math.sin(by)]
    const turned = [c * x - s * y, s * x + c * y, z]
    const [a, b, d] = [turned[0]!, c * turned[1]! - s * turned[2]!, s * turned[1]! + c * turned[2]!]
    return [(mirror ? -a : a) * scale + 3, b * scale - 7, d * scale + 100]
  }

  it('undoes turning, mirroring, scaling and moving', () => {
    const first = cloud(points)
    const second = cloud(points.map((point) => moved(point, 1.1, 25, true)))
    const [one, other] = alignedClouds([first, second])
    expect(other!.likeness).toBeCloseTo(1, 5)
    other!.cloud.coordinates.forEach((value, at) => expect(value).toBeCloseTo(one!.cloud.coordinates[at]!, 3))
  })

  it('gives an orthogonal matrix that no other one betters', () => {
    const m = Float64Array.from({ length: 9 }, () => next())
    const { rotation, singular } = procrustes(m, 3)
    const trace = (r: Float64Array): number => r.reduce((sum, value, at) => sum + value * m[at]!, 0)
    for (let i = 0; i < 3; i++)
      for (let j = 0; j < 3; j++) {
        let product = 0
        for (let c = 0; c < 3; c++) product += rotation[i * 3 + c]! * rotation[j * 3 + c]!
        expect(product).toBeCloseTo(i === j ? 1 : 0, 10)
      }
    expect(trace(rotation)).toBeCloseTo(
      singular.reduce((sum, value) => sum + value, 0),
      10,
    )
    for (let turn = 0; turn < 6; turn++) {
      const [c, s] = [Math.cos(turn), Math.sin(turn)]
      const other = Float64Array.from([c, -s, 0, s, c, 0, 0, 0, turn % 2 ? 1 : -1])
      expect(trace(other)).toBeLessThanOrEqual(trace(rotation) + 1e-12)
    }
  })

  it('copes with points on a line, and with none', () => {
    const { rotation } = procrustes(Float64Array.from([2, 4, 0, 1, 2, 0, 0, 0, 0]), 3)
    expect(rotation.every(Number.isFinite)).toBe(true)
    expect(Math.abs(determinant(rotation))).toBeCloseTo(1, 8)
    expect(Math.abs(determinant(procrustes(new Float64Array(9), 3).rotation))).toBeCloseTo(1, 8)
  })

  it('says that clouds without anything in common are not alike', () => {
    const other = Array.from({ length: 40 }, () => [next(), next(), next()])
    const { likeness } = onto(normalised(cloud(other)), normalised(cloud(points)))
    expect(likeness).toBeLessThan(0.4)
  })

  it('passes over tokens without a place, and those that only one cloud has', () => {
    const second = points.map((point) => moved(point, 0.4, 1, false))
    second[3] = [NaN, NaN, NaN]
    const some = cloudOf(frame(second.slice(0, 30).flat(), 3))!
    const found = onto(normalised(some), normalised(cloud(points.slice(0, 30))))
    expect(found.likeness).toBeGreaterThan(0.99)
    expect(found.cloud.coordinates[9]).toBeNaN()
  })

  it('does not ask tokens that are far from all others', () => {
    const far = [...points, [9000, 0, 0]]
    const moves = [...points, [0, 0, -500]].map((point) => moved(point, 0.7, 2, false))
    const [one, other] = alignedClouds([cloud(far), cloud(moves)])
    expect(near(cloud(far))[40]).toBe(0)
    expect(other!.likeness).toBeCloseTo(1, 5)
    expect(other!.cloud.coordinates[0]).toBeCloseTo(one!.cloud.coordinates[0]!, 3)
  })

  function determinant(m: Float64Array): number {
    const [a, b, c, d, e, f, g, h, i] = m as unknown as number[]
    return a! * (e! * i! - f! * h!) - b! * (d! * i! - f! * g!) + c! * (d! * h! - e! * g!)
  }
})

describe('the scene', () => {
  const look = { colour: 'position', lines: 'none', theme: 'dark', texts: [] } as const
  const clouds = [
    cloud([
      [0, 1],
      [2, 3],
      [4, 5],
    ]),
    cloud(
      [
        [6, 7],
        [8, 9],
        [1, 1],
      ],
      'layers.1.output',
    ),
  ]

  it('holds the points of all clouds, and knows which is which', () => {
    const points = pointsOf(clouds, look)
    expect([...points.scene.positions.slice(9, 12)]).toEqual([6, 7, 0])
    expect(tokenAt(points, 2)).toEqual({ cloud: 0, token: 2 })
    expect(tokenAt(points, 3)).toEqual({ cloud: 1, token: 0 })
    expect(pathOf(clouds, points, 1)).toEqual([1, 4])
  })

  it('joins tokens in their order, or each to itself in the next cloud', () => {
    expect([...pointsOf(clouds, { ...look, lines: 'sequence' }).scene.lines]).toEqual([
      0, 1, 1, 2, 3, 4, 4, 5,
    ])
    expect([...pointsOf(clouds, { ...look, lines: 'path' }).scene.lines]).toEqual([0, 3, 1, 4, 2, 5])
  })

  it('joins no tokens of different sequences', () => {
    const both = cloudOf(
      frame(Array(12).fill(1), 2, { meta: { labels: ['s', 'b', 'h'], shape: [3, 2, 8] } }),
    )!
    expect([...pointsOf([both], { ...look, lines: 'sequence' }).scene.lines]).toEqual([
      0, 2, 1, 3, 2, 4, 3, 5,
    ])
  })

  it('colours equal tokens alike', () => {
    const texts = ['a', 'b', 'a']
    const { colours } = pointsOf([clouds[0]!], { ...look, colour: 'token', texts }).scene
    expect([...colours.slice(0, 3)]).toEqual([...colours.slice(6, 9)])
    expect([...colours.slice(0, 3)]).not.toEqual([...colours.slice(3, 6)])
    expect(wordsOf(Array.from({ length: 20 }, (_, at) => String(at))).get('19')).toBe(7)
  })

  it.each([
    ['dark', '#0a0f14'],
    ['light', '#e9eef3'],
  ] as const)('keeps points apart from the background: %s', (theme, background) => {
    for (let share = 0; share <= 1; share += 0.05) {
      const colour = shade(share, theme).map((channel) => channel / 255) as [number, number, number]
      expect(contrast(colour, rgbOfHex(background)!)).toBeGreaterThanOrEqual(3)
    }
  })
})

it('makes a table, in which no token is a formula', () => {
  const table = csvOfClouds(
    [
      cloud([
        [1, 2],
        [NaN, 3],
      ]),
    ],
    ['=1+1', 'a"b'],
  )
  expect(table.split('\r\n')).toEqual([
    'tap,step,position,sequence,token,component 1,component 2',
    "layers.0.output,4,0,sequence 0,'=1+1,1,2",
    'layers.0.output,4,1,sequence 0,"a""b",,3',
    '',
  ])
})
