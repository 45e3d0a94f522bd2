/** What happened in the run that is shown, as marks of charts: the same as those of the timeline. */

import { marks } from '../app/timeline/happened.svelte'
import type { Mark as Told, MarkKind } from '../app/timeline/marks'
import type { Mark } from '../draw/series/series'
import type { Services } from '../state/services'

const KINDS: Readonly<Record<MarkKind, Mark['kind']>> = {
  perturbation: 'perturbation',
  alarm: 'finding',
  finding: 'finding',
  notice: 'note',
}

/** To be called while a component is set up. */
export function runMarks(services: Services): { readonly marks: readonly Mark[] } {
  const told = marks(services)
  const found = $derived(told.all.map(markOf))
  return {
    get marks() {
      return found
    },
  }
}

function markOf({ kind, step, text }: Told): Mark {
  return { kind: KINDS[kind], step, label: text }
}
