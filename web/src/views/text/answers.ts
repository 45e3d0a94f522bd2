/** What a model would say next, as frames of the kind `nexttoken` have it. Pure. */

import { numbersOf, type Frame } from '../../api/frames'
import { textsOf } from '../../parts/token'

export interface Candidate {
  id: number
  /** null: nobody has said what text it is. */
  text: string | null
  probability: number
}

/** The token that was drawn, or that a prompt has or is to have there. */
export interface Asked extends Candidate {
  kind: 'chosen' | 'target'
  /** How many tokens are likelier; null: more than were recorded. */
  rank: number | null
}

/** What may come after a token. */
export interface Answer {
  step: number
  /** Of which subscription or probe it is. */
  source: string
  prompt: number
  /** After this token of the text, from 0. */
  position: number
  /** The likeliest first. */
  candidates: Candidate[]
  /** In nats; NaN: not known. */
  entropy: number
  asked: Asked | null
}

/** Where answers come from: a text that is generated, or a probe of a job. */
export interface Source {
  id: string
  kind: 'generation' | 'probe'
}

export function sourceOf(frame: Frame): Source {
  const kind = frame.meta['probe'] === undefined && frame.arrays['chosen'] ? 'generation' : 'probe'
  return { id: frame.subscription, kind }
}

/** All answers of merged frames, in their order; what does not fit together is left out. */
export function answersOf(frames: readonly Frame[]): Answer[] {
  return frames.flatMap((frame) => rowsOf(frame))
}

function rowsOf(frame: Frame): Answer[] {
  const shape = frame.arrays['ids']?.shape
  if (shape?.length !== 2 || !frame.arrays['probabilities']) return []
  const [rows, width] = shape as [number, number]
  const ids = numbersOf(frame, 'ids')
  const probabilities = numbersOf(frame, 'probabilities')
  const texts = rows === 1 ? textsOf(frame) : []
  const one = (name: string, row: number): number | undefined =>
    frame.arrays[name] ? numbersOf(frame, name)[row] : undefined
  return Array.from({ length: rows }, (_, row) => {
    const candidates = Array.from({ length: width }, (_, place) => ({
      id: ids[row * width + place] ?? -1,
      text: texts[place + 1] ?? null,
      probability: probabilities[row * width + place] ?? NaN,
    }))
    return {
      step: frame.step,
      source: frame.subscription,
      prompt: one('prompt', row) ?? 0,
      position: one('position', row) ?? row,
      candidates,
      entropy: one('entropy', row) ?? NaN,
      asked: chosenOf(row, one, candidates, texts[0] ?? null) ?? targetOf(row, one, candidates),
    }
  })
}

type One = (name: string, row: number) => number | undefined

function chosenOf(
  row: number,
  one: One,
  candidates: readonly Candidate[],
  text: string | null,
): Asked | null {
  const id = one('chosen', row)
  if (id === undefined) return null
  const place = candidates.findIndex((candidate) => candidate.id === id)
  const probability = one('chosen_probability', row) ?? candidates[place]?.probability ?? NaN
  return { kind: 'chosen', id, text, probability, rank: place < 0 ? null : place }
}

function targetOf(row: number, one: One, candidates: readonly Candidate[]): Asked | null {
  const id = one('target', row)
  if (id === undefined || id < 0) return null
  const rank = one('target_rank', row) ?? -1
  const text = candidates.find((candidate) => candidate.id === id)?.text ?? null
  const probability = one('target_probability', row) ?? NaN
  return { kind: 'target', id, text, probability, rank: rank < 0 ? null : rank }
}

/** How unexpected something of that probability is, in bits: one more for each halving. */
export function surprise(probability: number): number {
  return probability > 0 ? -Math.log2(probability) : probability === 0 ? Infinity : NaN
}

/** A share as text: never 0 % for what is not 0, nor 100 % for what is not 1. */
export function percent(share: number): string {
  if (Number.isNaN(share)) return 'unknown'
  if (share > 0 && share < 0.0001) return '<0.01 %'
  if (share < 1 && share > 0.9999) return '>99.99 %'
  const value = share * 100
  return `${value >= 10 ? value.toFixed(1) : value.toFixed(2)} %`
}

/** Answers by step, of those of one place, ascending; of several at a step the last. */
export function alongSteps(answers: readonly Answer[], prompt: number, position: number): Answer[] {
  const found = new Map<number, Answer>()
  for (const answer of answers)
    if (answer.prompt === prompt && answer.position === position) found.set(answer.step, answer)
  return [...found.values()].toSorted((a, b) => a.step - b.step)
}

/** The newest step up to `step` that is among those of the answers; null: they begin later. */
export function stepUpTo(answers: readonly Answer[], step: number): number | null {
  let found: number | null = null
  for (const answer of answers)
    if (answer.step <= step && (found === null || answer.step > found)) found = answer.step
  return found
}
