/** From the form to what the API takes, and what is wrong with it, by field. */

import { readBits } from './bits'
import type { Draft } from './draft'
import { dtypeOf, isCommunication, KINDS, whyNot, type Place } from './kinds'
import { readNumbers, readReal, readSpan, readWhole, type Read } from './lists'

export const SOON = -1
const MOST_STEPS = 100_000
const MOST_PAIR_STEPS = 100
const MOST_ELEMENTS = 4096
const LONGEST_PATTERN = 256

/** Body of POST /perturbations. */
export interface Perturbation {
  pattern: string
  kind: string
  first: number
  last: number
  microbatches: number[] | null
  probability: number
  seed: number
  ranks: number[] | null
  layers: number[] | null
  parameters: Record<string, unknown>
}

/** Body of POST /pairs. */
export interface PairSpec {
  perturbations: Perturbation[]
  steps: number
  pattern: string
  tolerance: number
}

export type Problems = Partial<Record<keyof Draft, string>>

export interface Reading {
  /** null: something is wrong. */
  perturbation: Perturbation | null
  /** For a paired run. */
  pair: PairSpec | null
  problems: Problems
}

/** Takes values out of what was read, and remembers what is wrong. */
class Reader {
  readonly problems: Problems = {}

  constructor(readonly draft: Draft) {}

  take<T>(field: keyof Draft, read: Read<T>): T | null {
    if (read.problem !== undefined) {
      this.problems[field] = read.problem
      return null
    }
    return read.value
  }

  /** A list that may be left empty. */
  list(field: keyof Draft, high?: number): number[] | null {
    const text = String(this.draft[field]).trim()
    return text ? this.take(field, readNumbers(text, high === undefined ? {} : { high })) : null
  }
}

export function readForm(draft: Draft, place: Place): Reading {
  const reader = new Reader(draft)
  const kind = KINDS[draft.kind]
  readPattern(reader)
  const not = whyNot(kind, place)
  if (not) reader.problems.kind = `${kind.label} is ${not}`
  const parameters = readParameters(reader, place)
  const [first, last] = draft.mode === 'pair' ? readPairSpan(reader) : readSteps(reader)
  const perturbation: Perturbation = {
    pattern: draft.pattern.trim(),
    kind: draft.kind,
    first,
    last,
    microbatches: reader.list('microbatches'),
    probability: readProbability(reader),
    seed: reader.take('seed', readWhole(draft.seed)) ?? 0,
    ranks: reader.list('ranks'),
    layers: reader.list('layers'),
    parameters,
  }
  const pair = draft.mode === 'pair' ? readPair(reader, perturbation) : null
  const right = !Object.keys(reader.problems).length
  return {
    perturbation: right ? perturbation : null,
    pair: right ? pair : null,
    problems: reader.problems,
  }
}

/** What is asked of the preview: a paired run's steps are not known yet, so it is asked of the next ones. */
export function previewed(perturbation: Perturbation, mode: Draft['mode']): Perturbation {
  if (mode === 'disturb') return perturbation
  return { ...perturbation, first: SOON, last: perturbation.last - perturbation.first }
}

/** Which steps of a pass are disturbed, in words. */
export function passText(perturbation: Pick<Perturbation, 'first' | 'last'> | null): string {
  const { first, last } = perturbation ?? { first: 0, last: 0 }
  if (last === 0) return 'the first of them'
  return first === last
    ? `step ${first} of them, counted from 0`
    : `steps ${first}-${last} of them, counted from 0`
}

function readPattern(reader: Reader): void {
  const pattern = reader.draft.pattern.trim()
  if (!pattern) reader.problems.pattern = 'Say which tensor: a name, or a pattern such as layers.3.mlp.*'
  else if (pattern.length > LONGEST_PATTERN) reader.problems.pattern = `At most ${LONGEST_PATTERN} characters`
  else if (/\s/.test(pattern)) reader.problems.pattern = 'A pattern holds no white space'
}

function readParameters(reader: Reader, place: Place): Record<string, unknown> {
  const { draft } = reader
  const kind = KINDS[draft.kind]
  const found: Record<string, unknown> = {}
  for (const { field, name, low, high } of kind.amounts) {
    const bounds = { ...(low === undefined ? {} : { low }), ...(high === undefined ? {} : { high }) }
    found[name] = reader.take(field, readReal(draft[field], bounds))
  }
  if (kind.name === 'uniform' && Number(found['high']) < Number(found['low'])) {
    reader.problems.high ??= 'The highest factor is below the lowest'
  }
  if (kind.relative && draft.relative) found['relative'] = true
  if (kind.name === 'bit-flip') {
    found['bits'] = reader.take('bits', readBits(draft.bits, dtypeOf(place, whereOf(draft, place))))
  }
  if (kind.name === 'delay') return found
  const part = readPart(reader, place)
  if (part) found['part'] = part
  if (place.stored && kind.name !== 'stale') {
    const where = whereOf(draft, place)
    if (where !== 'copy') found['where'] = where
    if (draft.revert) found['revert'] = true
  }
  return found
}

function whereOf(draft: Draft, place: Place): Draft['where'] {
  return place.kinds.includes('parameter') ? draft.where : 'copy'
}

/** Which part is meant where nothing was chosen. */
export function partOf(draft: Draft): Exclude<Draft['part'], ''> {
  if (draft.part) return draft.part
  const usual = KINDS[draft.kind].usual
  return usual === 'one' ? 'elements' : usual === 'none' ? 'slices' : 'all'
}

function readPart(reader: Reader, place: Place): Record<string, unknown> | null {
  const { draft } = reader
  switch (partOf(draft)) {
    case 'all':
      // Where the API means one element, or none, unless told otherwise.
      return KINDS[draft.kind].usual === 'all' ? null : { fraction: 1 }
    case 'elements':
      return { elements: reader.take('elements', readWhole(draft.elements, { low: 1, high: MOST_ELEMENTS })) }
    case 'fraction':
      return { fraction: readShare(reader, 'fraction') }
    case 'indices':
      return { indices: reader.take('indices', readNumbers(draft.indices)) }
    case 'slices':
      return readSlices(reader, place)
  }
}

function readShare(reader: Reader, field: 'fraction' | 'share'): number | null {
  return reader.take(field, readReal(reader.draft[field], { low: 0, high: 1 }))
}

function readSlices(reader: Reader, place: Place): Record<string, unknown> {
  const found: Record<string, unknown> = {}
  for (const name of ['tokens', 'heads', 'channels'] as const) {
    const numbers = reader.list(name, name === 'heads' && place.heads ? place.heads - 1 : undefined)
    if (numbers) found[name] = numbers
  }
  if (found['tokens'] && !place.hasTokens) reader.problems.tokens = 'This tensor has no dimension of tokens'
  if (found['heads'] && place.heads === null) reader.problems.heads = 'This tensor has no heads'
  const said = ['tokens', 'heads', 'channels'].some((name) => reader.draft[name as 'tokens'].trim())
  if (!said) reader.problems.tokens = 'Say which tokens, heads or channels'
  const share = readShare(reader, 'share')
  if (share !== null && share < 1) found['fraction'] = share
  return found
}

function readProbability(reader: Reader): number {
  const found = reader.take('probability', readReal(reader.draft.probability, { low: 0, high: 1 }))
  if (found === 0) reader.problems.probability = 'Above 0, at most 1'
  return found ?? 1
}

function readSteps(reader: Reader): [number, number] {
  const { draft } = reader
  if (draft.when === 'next') {
    const count = reader.take('count', readWhole(draft.count, { low: 1, high: MOST_STEPS }))
    return [SOON, (count ?? 1) - 1]
  }
  return reader.take('steps', readSpan(draft.steps, MOST_STEPS)) ?? [SOON, 0]
}

function readPairSpan(reader: Reader): [number, number] {
  const steps = reader.take('pairSteps', readWhole(reader.draft.pairSteps, { low: 1, high: MOST_PAIR_STEPS }))
  const span = reader.take('pairSpan', readSpan(reader.draft.pairSpan, MOST_PAIR_STEPS))
  if (steps !== null && span && span[1] >= steps) {
    reader.problems.pairSpan = `Steps of the pair count from 0: at most ${steps - 1}`
  }
  return span ?? [0, 0]
}

function readPair(reader: Reader, perturbation: Perturbation): PairSpec {
  const { draft } = reader
  const pattern = draft.pairPattern.trim()
  if (!pattern || pattern.length > LONGEST_PATTERN || isCommunication(pattern)) {
    reader.problems.pairPattern = 'Say which tensors are compared, for example layers.*.output'
  }
  return {
    perturbations: [perturbation],
    steps: Number(draft.pairSteps),
    pattern,
    tolerance: reader.take('tolerance', readReal(draft.tolerance, { low: 0 })) ?? 0,
  }
}
