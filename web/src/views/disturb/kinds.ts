/** The kinds of disturbance: what each does, takes, and can be done to. See docs/scope-perturb.md. */

export const KIND_NAMES = [
  'gaussian',
  'uniform',
  'offset',
  'bit-flip',
  'zero',
  'scale',
  'mask',
  'stuck',
  'stale',
  'delay',
] as const
export type KindName = (typeof KIND_NAMES)[number]
export type TapKind = 'activation' | 'gradient' | 'parameter' | 'optimizer' | 'communication' | 'attention'

export interface Amount {
  /** In the form. */
  field: 'std' | 'low' | 'high' | 'offset' | 'factor' | 'value' | 'ms'
  /** In the API. */
  name: string
  label: string
  low?: number
  high?: number
  unit?: string
}

export interface Kind {
  name: KindName
  label: string
  /** What becomes of the tensor, in a sentence. */
  does: string
  /** ... and of its gradient. */
  gradient: string
  places: readonly TapKind[]
  amounts: readonly Amount[]
  /** `std` and `value` may be multiples of the root mean square. */
  relative: boolean
  /** Elements that are meant where nothing is said of the part. */
  usual: 'all' | 'one' | 'none'
}

const VALUES: readonly TapKind[] = ['activation', 'gradient', 'parameter', 'optimizer', 'communication']
const PLAIN = { places: VALUES, amounts: [], relative: false, usual: 'all' } as const

export const KINDS: Readonly<Record<KindName, Kind>> = {
  gaussian: {
    ...PLAIN,
    name: 'gaussian',
    label: 'Gaussian noise',
    does: 'Adds normal noise of this deviation to each element.',
    gradient: 'passes as it is',
    amounts: [{ field: 'std', name: 'std', label: 'Deviation', low: 0 }],
    relative: true,
  },
  uniform: {
    ...PLAIN,
    name: 'uniform',
    label: 'Random factors',
    does: 'Multiplies each element by a factor drawn evenly between the two.',
    gradient: 'is multiplied, too',
    amounts: [
      { field: 'low', name: 'low', label: 'Lowest factor' },
      { field: 'high', name: 'high', label: 'Highest factor' },
    ],
  },
  offset: {
    ...PLAIN,
    name: 'offset',
    label: 'Offset',
    does: 'Adds this value to each element.',
    gradient: 'passes as it is',
    amounts: [{ field: 'offset', name: 'value', label: 'Value' }],
    relative: true,
  },
  'bit-flip': {
    ...PLAIN,
    name: 'bit-flip',
    label: 'Bit flip',
    does: 'Inverts the chosen bits of each element.',
    gradient: 'passes as it is',
    usual: 'one',
  },
  zero: { ...PLAIN, name: 'zero', label: 'Zero', does: 'Sets each element to 0.', gradient: 'is none' },
  scale: {
    ...PLAIN,
    name: 'scale',
    label: 'Scale',
    does: 'Multiplies each element by this factor.',
    gradient: 'is multiplied, too',
    amounts: [{ field: 'factor', name: 'factor', label: 'Factor' }],
  },
  mask: {
    ...PLAIN,
    name: 'mask',
    label: 'Mask',
    does: 'Sets a part of the tensor to this value: a head, some tokens, some channels.',
    gradient: 'is none',
    amounts: [{ field: 'value', name: 'value', label: 'Value' }],
    usual: 'none',
  },
  stuck: {
    ...PLAIN,
    name: 'stuck',
    label: 'Stuck',
    does: 'Holds the same elements at this value, as a broken cell would.',
    gradient: 'is none',
    amounts: [{ field: 'value', name: 'value', label: 'Value' }],
    usual: 'one',
  },
  stale: {
    ...PLAIN,
    name: 'stale',
    label: 'Stale',
    does: 'Gives what was there the time before.',
    gradient: 'passes as it is',
    places: ['activation', 'gradient', 'communication'],
  },
  delay: {
    ...PLAIN,
    name: 'delay',
    label: 'Delay',
    does: 'Lets a communication arrive so much later; its values stay.',
    gradient: 'passes as it is',
    places: ['communication'],
    amounts: [{ field: 'ms', name: 'ms', label: 'Delay', low: 0, high: 60_000, unit: 'ms' }],
  },
}

/** What is known of the tensors that are chosen. */
export interface Place {
  kinds: readonly TapKind[]
  dtypes: readonly string[]
  /** Tensors that match; 0: none, or they are not known. */
  taps: number
  hasTokens: boolean
  /** Heads of the whole model; null: a tensor has none, 0: not known. */
  heads: number | null
  /** Parameters, gradients that are accumulated, optimizer state: what is written in place and can be put back. */
  stored: boolean
}

export interface Tap {
  name: string
  kind: string
  layer: number
  labels: string[]
  shape: number[] | null
  dtype: string
  heads: number[] | null
  ranks: number[]
}

const OF_COMMUNICATION = ['collectives.', 'p2p.']
const STORED = ['parameters.', 'optimizer.']

/** Communication is known only once it has happened: its names say what it is. */
export function isCommunication(pattern: string): boolean {
  return OF_COMMUNICATION.some((begin) => pattern.startsWith(begin))
}

export function placeOf(pattern: string, taps: readonly Tap[]): Place {
  const meant = taps.filter((tap) => tap.kind !== 'attention')
  const kinds = [...new Set(meant.map((tap) => tap.kind as TapKind))]
  if (isCommunication(pattern) && !kinds.length) kinds.push('communication')
  const heads = meant.map((tap) => tap.heads?.[2] ?? (tap.labels.length ? null : 0))
  return {
    kinds,
    dtypes: [...new Set(meant.map((tap) => tap.dtype).filter(Boolean))],
    taps: meant.length,
    hasTokens: meant.every(
      (tap) => !tap.labels.length || tap.labels.includes('s') || tap.labels.includes('t'),
    ),
    heads: heads.includes(null) ? null : heads.length ? Math.max(...heads.map(Number)) : 0,
    stored: STORED.some((begin) => pattern.startsWith(begin)) || meant.some((tap) => isStored(tap.name)),
  }
}

function isStored(name: string): boolean {
  return STORED.some((begin) => name.startsWith(begin))
}

const OF_SEVERAL: Readonly<Record<TapKind, string>> = {
  activation: 'activations',
  gradient: 'gradients',
  parameter: 'parameters',
  optimizer: 'states of the optimizer',
  attention: 'attention maps',
  communication: 'communication',
}

/** Why a kind cannot be done there, as what follows its name; '': it can. */
export function whyNot(kind: Kind, place: Place): string {
  const wrong = place.kinds.find((found) => !kind.places.includes(found))
  if (!wrong) return ''
  return `for ${listed(kind.places.map((one) => OF_SEVERAL[one]))} only, not for ${OF_SEVERAL[wrong]}`
}

function listed(words: readonly string[]): string {
  return words.length > 1 ? `${words.slice(0, -1).join(', ')} and ${words.at(-1)}` : words.join('')
}

/** The type whose bits are flipped; '': several, or it is not known. */
export function dtypeOf(place: Place, where: string): string {
  if (where === 'master' && place.kinds.includes('parameter')) return 'float32'
  return place.dtypes.length === 1 ? place.dtypes[0]! : ''
}
