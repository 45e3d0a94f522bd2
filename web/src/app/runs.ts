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
  const label = run.label.length > MOST_LABEL ? `${run.label.slice(0, MOST_LABEL)}…` : run.label
  const state = run.recorded ? (run.error ? 'cannot be read' : '') : 'nothing recorded'
  const notes = [label, run.live ? 'this job' : '', state].filter(Boolean)
  return notes.length ? `${run.name} (${notes.join(', ')})` : run.name
}
