/** The tokens of a tensor along its principal components, as frames of the kind `pca` have them. Pure. */

import { numbersOf, type Frame } from '../../api/frames'

export interface Cloud {
  tap: string
  /** null: the tensor is of no layer. */
  layer: number | null
  step: number
  microbatch: number
  /** Which part of the data; empty: all of it. */
  part: string
  count: number
  /** Components, at most three. */
  components: number
  /** (count, components); NaN for tokens that hold a NaN or an infinity. */
  coordinates: Float32Array
  /** Along each component. */
  variance: number[]
  total: number
  /** Place of each token in the tensor: the same token has the same one in other layers. */
  ids: Int32Array
  /** Place in the sequence. */
  positions: Int32Array
  /** Which sequence (or head) a token is of. */
  groups: Int32Array
  groupCount: number
  groupName: (group: number) => string
}

const MOST_COMPONENTS = 3

/** Null for a frame whose parts could not be put together. */
export function cloudOf(frame: Frame): Cloud | null {
  const shape = frame.arrays['coordinates']?.shape
  if (shape?.length !== 2 || !frame.arrays['variance'] || !frame.arrays['index']) return null
  const [count, followed] = shape as [number, number]
  const said = frame.meta['components']
  const components = Math.min(followed, typeof said === 'number' ? said : followed, MOST_COMPONENTS)
  const whole = numbersOf(frame, 'coordinates')
  const coordinates = new Float32Array(count * components)
  for (let token = 0; token < count; token++)
    for (let axis = 0; axis < components; axis++)
      coordinates[token * components + axis] = whole[token * followed + axis]!
  return {
    tap: frame.tap,
    layer: layerOf(frame.tap),
    step: frame.step,
    microbatch: frame.microbatch,
    part: frame.shard.map(([axis, index]) => `${axis} ${index}`).join(', '),
    count,
    components,
    coordinates,
    variance: [...numbersOf(frame, 'variance')].slice(0, components),
    total: frame.arrays['total'] ? (numbersOf(frame, 'total')[0] ?? NaN) : NaN,
    ...placesOf(frame, count),
  }
}

type Places = Pick<Cloud, 'ids' | 'positions' | 'groups' | 'groupCount' | 'groupName'>

/** Which token of the sequence each is, and of which sequence. */
function placesOf(frame: Frame, count: number): Places {
  const index = numbersOf(frame, 'index')
  const ranks = frame.arrays['rank'] ? numbersOf(frame, 'rank') : null
  const { sides, sequence, names } = layoutOf(frame)
  // Chosen tokens come with an index for each position, and a point for each sequence.
  const several = index.length ? Math.max(1, Math.round(count / index.length)) : 1
  const chosen = several > 1
  const ids = new Int32Array(count)
  const positions = new Int32Array(count)
  const groups = new Int32Array(count)
  const local = sides.reduce((product, side) => product * side, 1)
  let part = 0
  for (let token = 0; token < count; token++) {
    // Parts of the sequence that lie on several ranks follow each other.
    if (ranks && token && ranks[token] !== ranks[token - 1]) part++
    const at = index[chosen ? Math.floor(token / several) : token] ?? token
    const [position, group] = chosen ? [at, token % several] : unfolded(at, sides, sequence)
    positions[token] = position + part * (sides[sequence] ?? 0)
    groups[token] = group
    ids[token] = chosen ? at * several + group : at + part * local
  }
  const others = names.filter((_, place) => place !== sequence)
  const otherSides = sides.filter((_, place) => place !== sequence)
  return {
    ids,
    positions,
    groups,
    groupCount: groups.reduce((most, group) => Math.max(most, group + 1), 1),
    groupName: (group) => nameOf(group, otherSides, others),
  }
}

interface Layout {
  /** Of the dimensions but the last. */
  sides: number[]
  /** Which of them is the sequence. */
  sequence: number
  names: string[]
}

function layoutOf(frame: Frame): Layout {
  const { labels, shape } = frame.meta
  const sides = Array.isArray(shape) ? shape.slice(0, -1).map(Number) : []
  const names = Array.isArray(labels) ? labels.slice(0, -1).map(String) : []
  if (!sides.length || sides.length !== names.length || !sides.every((side) => side > 0))
    return { sides: [], sequence: 0, names: ['s'] }
  return { sides, sequence: Math.max(names.indexOf('s'), 0), names }
}

/** Position in the sequence, and all other dimensions as one number. */
function unfolded(at: number, sides: readonly number[], sequence: number): [position: number, group: number] {
  let rest = at
  let position = at
  let group = 0
  let weight = 1
  for (let place = sides.length - 1; place >= 0; place--) {
    const here = rest % sides[place]!
    rest = Math.floor(rest / sides[place]!)
    if (place === sequence) position = here
    else {
      group += here * weight
      weight *= sides[place]!
    }
  }
  return [position, group]
}

const NAMES: Readonly<Record<string, string>> = { b: 'sequence', n: 'head' }

function nameOf(group: number, sides: readonly number[], names: readonly string[]): string {
  let rest = group
  const parts: string[] = []
  for (let place = sides.length - 1; place >= 0; place--) {
    parts.unshift(`${NAMES[names[place] ?? ''] ?? names[place] ?? 'part'} ${rest % sides[place]!}`)
    rest = Math.floor(rest / sides[place]!)
  }
  return parts.join(', ') || 'sequence 0'
}

export function layerOf(tap: string): number | null {
  const found = /(?:^|\.)layers\.(\d+)\./.exec(tap)
  return found ? Number(found[1]) : null
}

/** Taps that are this one's in the other layers, in the order of the layers; itself among them. */
export function familyOf(tap: string, taps: readonly string[]): string[] {
  const layer = layerOf(tap)
  if (layer === null) return [tap]
  const part = (name: string): string => name.replace(/(^|\.)layers\.\d+\./, '$1layers.*.')
  return taps
    .filter((name) => layerOf(name) !== null && part(name) === part(tap))
    .toSorted((a, b) => layerOf(a)! - layerOf(b)!)
}

/** Share of all variance that each component has; NaN where the whole is not known. */
export function shares(cloud: Cloud): number[] {
  return cloud.variance.map((variance) => (cloud.total > 0 ? variance / cloud.total : NaN))
}

/** Places of tokens without coordinates. */
export function unplaced(cloud: Cloud): number[] {
  const found: number[] = []
  for (let token = 0; token < cloud.count; token++) if (!placed(cloud, token)) found.push(token)
  return found
}

export function placed({ coordinates, components }: Cloud, token: number): boolean {
  for (let axis = 0; axis < components; axis++)
    if (!Number.isFinite(coordinates[token * components + axis]!)) return false
  return components > 0
}
