/** A text, token by token, and what was thought to come at each place. Pure. */

import type { Answer } from './answers'
import type { Prompt } from './probes'

/** A place in the text: a token, or what would come after the last one. */
export interface Slot {
  index: number
  id: number | null
  text: string | null
  /** `open`: nothing is there yet. */
  kind: 'prompt' | 'generated' | 'open'
  /** What was thought to come here; null: nobody has asked. */
  answer: Answer | null
}

/** How tokens are told whose text nobody has said: by number, or as the bytes that they are where tokens are bytes. */
export type Reading = 'ids' | 'bytes'

/** The texts of the tokens of a generation: those of the prompt first. */
export interface Written {
  prompt_tokens: number
  tokens: readonly string[]
}

/** A generated text: what is known of its tokens, and an answer for each that was generated. */
export function generated(written: Written, answers: readonly Answer[]): Slot[] {
  const last = answers.reduce(
    (most, answer) => Math.max(most, answer.position + 1),
    written.tokens.length - 1,
  )
  const begun = answers.reduce((least, answer) => Math.min(least, answer.position + 1), Infinity)
  const prompt = written.tokens.length ? written.prompt_tokens : begun
  const slots: Slot[] = Array.from({ length: last + 1 }, (_, index) => ({
    index,
    id: null,
    text: written.tokens[index] ?? null,
    kind: index < prompt ? 'prompt' : 'generated',
    answer: null,
  }))
  for (const answer of answers) {
    const slot = slots[answer.position + 1]
    if (!slot) continue
    slot.answer = answer
    slot.id = answer.asked?.id ?? null
    slot.text ??= answer.asked?.text ?? null
  }
  return slots
}

/** A prompt of a probe at one step, and the place after it; `said`: the prompt as it was asked for, where it is known. */
export function probed(answers: readonly Answer[], said: Prompt | null, reading: Reading): Slot[] {
  const length = answers.reduce((most, answer) => Math.max(most, answer.position + 1), 0)
  const known = tokensOf(said, length)
  const slots: Slot[] = Array.from({ length: length + 1 }, (_, index) => ({
    index,
    id: index < length ? (known[index] ?? null) : null,
    text: null,
    kind: index < length ? 'prompt' : 'open',
    answer: null,
  }))
  for (const answer of answers) {
    const slot = slots[answer.position + 1]
    if (!slot) continue
    slot.answer = answer
    if (slot.kind === 'prompt') slot.id ??= answer.asked?.id ?? null
  }
  for (const slot of slots) slot.text = textOf(slot.id, reading)
  return slots
}

/** The ids of a prompt's tokens: as they were given, or its bytes where there are as many tokens as bytes. */
function tokensOf(said: Prompt | null, length: number): readonly number[] {
  if (!said) return []
  if (said.tokens.length) return said.tokens
  const bytes = new TextEncoder().encode(said.text)
  return bytes.length === length ? [...bytes] : []
}

/** Are the tokens of these answers bytes, as far as can be told? */
export function areBytes(answers: readonly Answer[], said: Prompt | null, tokenizer: string): boolean {
  if (tokenizer === 'bytes') return true
  if (!said?.text || said.tokens.length || tokenizer === 'job') return false
  const length = answers.reduce((most, answer) => Math.max(most, answer.position + 1), 0)
  const ids = answers.flatMap((answer) => answer.candidates.map((candidate) => candidate.id))
  return new TextEncoder().encode(said.text).length === length && ids.every((id) => id < 256)
}

/** The text of a token of which only the id is known; null: none is known. */
export function textOf(id: number | null, reading: Reading): string | null {
  if (id === null || reading === 'ids' || id > 255) return null
  const shown = [9, 10, 13].includes(id) || (id >= 32 && id < 127)
  return shown ? String.fromCharCode(id) : `<0x${id.toString(16).toUpperCase().padStart(2, '0')}>`
}

/** What is to be chosen where nothing was, or where what was chosen is not there: the last place that has an answer. */
export function usualSlot(slots: readonly Slot[], wanted: number | null): number {
  if (wanted !== null && slots[wanted]) return wanted
  const last = slots.findLast((slot) => slot.answer)
  return last?.index ?? slots.length - 1
}
