/** Runs in words. */

interface Named {
  name: string
  label: string
  live: boolean
  recorded: boolean
  error: string
}

const MOST_LABEL = 40

/** A run for a list: what it is called, and which of several it is. */
export function labelled(run: Named): string {
  // Without signs that turn or hide what follows: labels come from whoever recorded.
  const clean = run.label.replace(/[\s\p{Cc}\p{Cf}]+/gu, ' ').trim()
  const label = clean.length > MOST_LABEL ? `${clean.slice(0, MOST_LABEL)}…` : clean
  const state = run.recorded ? (run.error ? 'cannot be read' : '') : 'nothing recorded'
  const notes = [label, run.live ? 'this job' : '', state].filter(Boolean)
  return notes.length ? `${run.name} (${notes.join(', ')})` : run.name
}
