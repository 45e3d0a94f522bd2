/** What several fixes together would give, as far as the report says: bounds, an estimate, and how to have it exactly. */

import type { Known, Report, WhatIf } from './report'

/** The row of the report in which all that was found is undone at once. */
const ALL = 'fix all findings'
/** Fixes whose names are questions for `--what-if`; nothing in them means anything to a shell. */
const ASKABLE = /^fix (ranks? \d+(, \d+)*|link \d+-\d+)$/

export interface Fixes {
  /** Asked for with `--what-if`. */
  asked: WhatIf[]
  /** Those of the findings, which can be combined. */
  single: WhatIf[]
  /** All of them at once, if there are several. */
  all: WhatIf | null
}

export interface Together {
  /** A step takes no longer: as with the best of the fixes alone. */
  atMost: number
  /** It takes no less: as with all findings fixed; null: that was not replayed. */
  atLeast: Known
  /** If each fix gave as much beside the others as it does alone, within these bounds. */
  addedUp: number
  /** The fixes are all that there are, or one: this was replayed. */
  exact: Known
  /** The question that a replay answers exactly; null: one of the fixes is none that can be asked for. */
  question: string | null
}

export function fixesOf(report: Report): Fixes {
  const found = report.what_if.filter((fix) => !fix.asked)
  return {
    asked: report.what_if.filter((fix) => fix.asked),
    single: found.filter((fix) => fix.fix !== ALL),
    all: found.find((fix) => fix.fix === ALL) ?? null,
  }
}

/** Null: nothing is chosen, or nothing is known. */
export function together(report: Report, chosen: readonly WhatIf[]): Together | null {
  const now = report.step_time_s.replayed
  const saved = chosen.map((fix) => fix.seconds_saved_per_step)
  if (now === null || !chosen.length || saved.some((seconds) => seconds === null)) return null
  const known = saved as number[]
  const { single, all } = fixesOf(report)
  const atMost = now - Math.max(...known)
  const atLeast = all?.step_time_s ?? null
  const summed = now - known.reduce((a, b) => a + b)
  return {
    atMost,
    atLeast,
    addedUp: Math.min(atMost, Math.max(summed, atLeast ?? 0)),
    exact: chosen.length === 1 ? atMost : chosen.length === single.length ? atLeast : null,
    question: chosen.every((fix) => ASKABLE.test(fix.fix))
      ? chosen.map((fix) => fix.fix).join(' and ')
      : null,
  }
}

/** Part of a step that a fix gives back. */
export function shareSaved(fix: WhatIf, report: Report): Known {
  const now = report.step_time_s.replayed
  return now && fix.seconds_saved_per_step !== null ? fix.seconds_saved_per_step / now : null
}
