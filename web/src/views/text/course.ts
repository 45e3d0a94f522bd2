/** How probabilities moved: of the candidates of one place over the steps of training, or along a generated text. Pure. */

import type { Series } from '../../draw/series/series'
import { surprise, type Answer } from './answers'

export type Along = 'probability' | 'surprise' | 'entropy'

const MOST_LINES = 6

/** A line for each of the likeliest candidates at `shown`, and for the token that was asked for. */
export function candidateLines(
  answers: readonly Answer[],
  shown: Answer,
  name: (id: number, text: string | null) => string,
): Series[] {
  const { asked } = shown
  const listed = shown.candidates.slice(0, MOST_LINES)
  const lines = listed.map(({ id, text }) =>
    line(answers, name(id, text), (answer) => probabilityOf(answer, id)),
  )
  if (asked && !listed.some((candidate) => candidate.id === asked.id))
    lines.push(line(answers, name(asked.id, asked.text), (answer) => probabilityOf(answer, asked.id)))
  return lines
}

/** Null: less likely than those that were recorded. */
function probabilityOf(answer: Answer, id: number): number | null {
  if (answer.asked?.id === id) return finite(answer.asked.probability)
  return answer.candidates.find((candidate) => candidate.id === id)?.probability ?? null
}

/** One line over all answers: what was asked for, or how undecided the model was. */
export function courseLine(answers: readonly Answer[], along: Along, label: string): Series {
  return line(answers, label, (answer) => {
    if (along === 'entropy') return finite(answer.entropy)
    const probability = answer.asked?.probability ?? NaN
    return finite(along === 'surprise' ? surprise(probability) : probability)
  })
}

function line(answers: readonly Answer[], label: string, value: (answer: Answer) => number | null): Series {
  const values = answers.map(value)
  return { label, step: answers.map((answer) => answer.step), min: values, max: values, mean: values }
}

function finite(value: number): number | null {
  return Number.isFinite(value) ? value : null
}
