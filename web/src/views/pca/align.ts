/**
 * Clouds with axes of their own, turned onto each other: orthogonal Procrustes (Schönemann, "A generalized solution of the
 * orthogonal Procrustes problem", 1966). Pure.
 *
 * Each layer's components are directions of its own space, so equal coordinates in two layers mean nothing. What can be
 * compared is the shape: which tokens are near which. A cloud is centred, scaled to a spread of 1, and turned or mirrored
 * so that its tokens lie as near as possible to the same tokens of the layer before. Tokens that lie far from all others
 * (the first one in most language models) have no say in that, or there would be nothing else to see.
 */

import { placed, type Cloud } from './clouds'

export interface Aligned {
  cloud: Cloud
  /** How alike its shape is to that of the layer before: 1, the same; 0, nothing in common. NaN for the first. */
  likeness: number
}

const SWEEPS = 30
const SMALL = 1e-12
/** Times the median distance, beyond which a token has no say. */
const FAR = 8

/** One after the other, each onto the one before. */
export function alignedClouds(clouds: readonly Cloud[]): Aligned[] {
  const found: Aligned[] = []
  for (const cloud of clouds) {
    const scaled = normalised(cloud)
    const before = found.at(-1)?.cloud
    found.push(before ? onto(scaled, before) : { cloud: scaled, likeness: NaN })
  }
  return found
}

/** Centred, and with a mean square distance of 1 from there, both of those that count. */
export function normalised(cloud: Cloud): Cloud {
  const { components: k, count } = cloud
  const counts = near(cloud)
  const mean = new Float64Array(k)
  let known = 0
  for (let token = 0; token < count; token++) {
    if (!counts[token]) continue
    known++
    for (let axis = 0; axis < k; axis++) mean[axis]! += cloud.coordinates[token * k + axis]!
  }
  if (!known) return cloud
  for (let axis = 0; axis < k; axis++) mean[axis]! /= known
  let spread = 0
  for (let token = 0; token < count; token++) {
    if (!counts[token]) continue
    for (let axis = 0; axis < k; axis++) spread += (cloud.coordinates[token * k + axis]! - mean[axis]!) ** 2
  }
  const scale = spread > 0 ? Math.sqrt(known / spread) : 1
  return { ...cloud, coordinates: cloud.coordinates.map((value, at) => (value - mean[at % k]!) * scale) }
}

/** 1 for tokens that have coordinates, not many times as far from the middle as half of them are. */
export function near(cloud: Cloud): Uint8Array {
  const { components: k, count, coordinates } = cloud
  const known = Array.from({ length: count }, (_, token) => token).filter((token) => placed(cloud, token))
  const middle = Array.from({ length: k }, (_, axis) =>
    median(known.map((token) => coordinates[token * k + axis]!)),
  )
  const distance = (token: number): number =>
    Math.hypot(...middle.map((at, axis) => coordinates[token * k + axis]! - at))
  const usual = median(known.map(distance))
  const counts = new Uint8Array(count)
  for (const token of known) counts[token] = usual === 0 || distance(token) <= FAR * usual ? 1 : 0
  return counts
}

function median(values: readonly number[]): number {
  return Float64Array.from(values).sort()[values.length >> 1] ?? 0
}

/** `cloud` turned onto `target`; both are normalised. */
export function onto(cloud: Cloud, target: Cloud): Aligned {
  const k = Math.min(cloud.components, target.components)
  const there = new Map<number, number>()
  const [counts, count] = [near(cloud), near(target)]
  for (let token = 0; token < target.count; token++) if (count[token]) there.set(target.ids[token]!, token)
  const cross = new Float64Array(k * k)
  let [own, other] = [0, 0]
  for (let token = 0; token < cloud.count; token++) {
    const same = there.get(cloud.ids[token]!)
    if (same === undefined || !counts[token]) continue
    for (let i = 0; i < k; i++) {
      const x = cloud.coordinates[token * cloud.components + i]!
      own += x * x
      other += target.coordinates[same * target.components + i]! ** 2
      for (let j = 0; j < k; j++) cross[i * k + j]! += x * target.coordinates[same * target.components + j]!
    }
  }
  if (!(own > 0) || !(other > 0)) return { cloud, likeness: NaN }
  const { rotation, singular } = procrustes(cross, k)
  const likeness = Math.min(1, singular.reduce((sum, value) => sum + value, 0) ** 2 / (own * other))
  return { cloud: { ...cloud, coordinates: turnedBy(cloud, rotation, k) }, likeness }
}

function turnedBy(cloud: Cloud, rotation: Float64Array, k: number): Float32Array {
  const turned = new Float32Array(cloud.coordinates)
  const width = cloud.components
  for (let token = 0; token < cloud.count; token++)
    for (let j = 0; j < k; j++) {
      let sum = 0
      for (let i = 0; i < k; i++) sum += cloud.coordinates[token * width + i]! * rotation[i * k + j]!
      turned[token * width + j] = sum
    }
  return turned
}

/** The orthogonal (k, k) matrix R with the greatest trace of R' M, and the singular values of M (row by row). */
export function procrustes(m: Float64Array, k: number): { rotation: Float64Array; singular: number[] } {
  // One-sided Jacobi (Hestenes, 1958): columns of M V are made orthogonal to each other; M = U S V'.
  const a = m.slice()
  const v = identity(k)
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    let off = 0
    for (let p = 0; p < k; p++)
      for (let q = p + 1; q < k; q++) off = Math.max(off, orthogonalised(a, v, k, p, q))
    if (off < SMALL) break
  }
  const singular = Array.from({ length: k }, (_, j) => Math.hypot(...column(a, k, j)))
  const u = completed(a, singular, k)
  const rotation = new Float64Array(k * k)
  for (let i = 0; i < k; i++)
    for (let j = 0; j < k; j++)
      for (let c = 0; c < k; c++) rotation[i * k + j]! += u[i * k + c]! * v[j * k + c]!
  return { rotation, singular }
}

/** Turn columns p and q of `a` (and of `v`) so that they are orthogonal; the cosine that was between them. */
function orthogonalised(a: Float64Array, v: Float64Array, k: number, p: number, q: number): number {
  let [alpha, beta, gamma] = [0, 0, 0]
  for (let i = 0; i < k; i++) {
    const [x, y] = [a[i * k + p]!, a[i * k + q]!]
    alpha += x * x
    beta += y * y
    gamma += x * y
  }
  const cosine = Math.abs(gamma) / Math.sqrt(alpha * beta)
  if (!(cosine > SMALL)) return 0
  const zeta = (beta - alpha) / (2 * gamma)
  const t = (zeta < 0 ? -1 : 1) / (Math.abs(zeta) + Math.hypot(1, zeta))
  const c = 1 / Math.hypot(1, t)
  for (const matrix of [a, v])
    for (let i = 0; i < k; i++) {
      const [x, y] = [matrix[i * k + p]!, matrix[i * k + q]!]
      matrix[i * k + p] = c * (x - t * y)
      matrix[i * k + q] = c * (y + t * x)
    }
  return cosine
}

/** The columns of `a` with a length of 1; in the place of those that are 0, any that are orthogonal to the others. */
function completed(a: Float64Array, singular: readonly number[], k: number): Float64Array {
  const u = new Float64Array(k * k)
  const most = Math.max(...singular)
  const done: number[][] = []
  const put = (j: number, vector: readonly number[]): void => {
    vector.forEach((value, i) => (u[i * k + j] = value))
    done.push([...vector])
  }
  const empty: number[] = []
  singular.forEach((value, j) => {
    if (value > SMALL * most)
      put(
        j,
        column(a, k, j).map((one) => one / value),
      )
    else empty.push(j)
  })
  for (const j of empty) put(j, freeDirection(done, k))
  return u
}

function freeDirection(others: readonly (readonly number[])[], k: number): number[] {
  for (let axis = 0; axis < k; axis++) {
    let vector = Array.from({ length: k }, (_, i): number => (i === axis ? 1 : 0))
    for (const other of others) {
      const along = other.reduce((sum, value, i) => sum + value * vector[i]!, 0)
      vector = vector.map((value, i) => value - along * other[i]!)
    }
    const length = Math.hypot(...vector)
    if (length > 0.5 / k) return vector.map((value) => value / length)
  }
  return Array.from({ length: k }, () => 0)
}

function column(a: Float64Array, k: number, j: number): number[] {
  return Array.from({ length: k }, (_, i) => a[i * k + j]!)
}

function identity(k: number): Float64Array {
  const found = new Float64Array(k * k)
  for (let i = 0; i < k; i++) found[i * k + i] = 1
  return found
}
