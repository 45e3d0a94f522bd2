/** scan's report (schema trimtab.report/1), read from a file that others may have written: each field is checked. */

import { clean } from './clean'

export const SCHEMA = 'trimtab.report/1'
export const VERDICTS = ['healthy', 'straggler', 'imbalance', 'inconclusive'] as const
export const KINDS = [
  'slow_rank',
  'slow_stage',
  'slow_link',
  'workload_imbalance',
  'host_stall',
  'garbage_collection',
  'data_loading',
  'global_slowdown',
] as const
export const PATTERNS = ['persistent', 'rotating', 'transient'] as const

export type Verdict = (typeof VERDICTS)[number]
export type Kind = (typeof KINDS)[number]
export type Pattern = (typeof PATTERNS)[number]
/** A number, or null where it is not known. */
export type Known = number | null

export interface Finding {
  kind: Kind
  ranks: number[]
  host: string | null
  stage: Known
  link: [number, number] | null
  ops: string[]
  ratio: Known
  seconds_lost_per_step: Known
  share_of_slowdown: Known
  pattern: Pattern
  onset: Known
  steps: [number, number]
  confidence: Known
  evidence: string[]
}

export interface WhatIf {
  fix: string
  step_time_s: Known
  seconds_saved_per_step: Known
  asked: boolean
  detail: string
}

export interface Victim {
  rank: number
  waits_for: number[]
  seconds_waited_per_step: Known
}

export interface Report {
  verdict: Verdict
  job: {
    world_size: number
    steps: number
    topology: Record<string, number> | null
    sources: string[]
    device: string
    run_id: string
    oversubscribed: number
  }
  clock: {
    aligned: boolean
    error_us: { p50: Known; max: Known }
    anchors: number
    unconnected: number[]
    device_drift_ppm: Known
  }
  matching: { matched: number; unmatched: number; confidence: Known; by_order: number }
  step_time_s: { actual: Known; replayed: Known; ideal: Known }
  slowdown: Known
  findings: Finding[]
  what_if: WhatIf[]
  windows: { pp_send_s: Known; dp_reduce_s: Known }
  victims: Victim[]
  missing_ranks: number[]
  dropped_events: number
  smallest_detectable: Known
  warnings: string[]
}

/** The report, or an Error with one line that says what is wrong with it. */
export function readReport(value: unknown): Report {
  const top = new Fields(value, 'report.json')
  const schema = top.text('schema')
  if (schema !== SCHEMA)
    throw new Error(
      `report.json: it is of schema ${JSON.stringify(schema.slice(0, 60))}, and this page knows ${SCHEMA}`,
    )
  return {
    verdict: top.word('verdict', VERDICTS),
    job: readJob(top.part('job')),
    clock: readClock(top.part('clock')),
    matching: readMatching(top.part('matching')),
    step_time_s: readKnown(top.part('step_time_s'), ['actual', 'replayed', 'ideal']),
    slowdown: top.known('slowdown'),
    findings: top.list('findings').map(readFinding),
    what_if: top.list('what_if').map(readWhatIf),
    windows: readKnown(top.part('windows'), ['pp_send_s', 'dp_reduce_s']),
    victims: top.list('victims').map(readVictim),
    missing_ranks: top.numbers('missing_ranks'),
    dropped_events: top.number('dropped_events'),
    smallest_detectable: top.known('smallest_detectable'),
    warnings: top.texts('warnings'),
  }
}

function readJob(job: Fields): Report['job'] {
  const sizes = job.maybe('topology')
  return {
    world_size: job.number('world_size'),
    steps: job.number('steps'),
    topology: sizes && sizes.allNumbers(),
    sources: job.texts('sources'),
    device: job.text('device'),
    run_id: job.text('run_id'),
    oversubscribed: job.number('oversubscribed'),
  }
}

function readClock(clock: Fields): Report['clock'] {
  return {
    aligned: clock.truth('aligned'),
    error_us: readKnown(clock.part('error_us'), ['p50', 'max']),
    anchors: clock.number('anchors'),
    unconnected: clock.numbers('unconnected'),
    device_drift_ppm: clock.known('device_drift_ppm'),
  }
}

function readMatching(matching: Fields): Report['matching'] {
  return {
    matched: matching.number('matched'),
    unmatched: matching.number('unmatched'),
    confidence: matching.known('confidence'),
    by_order: matching.part('by').number('order'),
  }
}

function readFinding(value: unknown, place: number): Finding {
  const said = new Fields(value, `report.json: findings[${place}]`)
  const [first, last] = said.numbers('steps', 2)
  const link = said.isNull('link') ? null : said.numbers('link', 2)
  return {
    kind: said.word('kind', KINDS),
    ranks: said.numbers('ranks'),
    host: said.isNull('host') ? null : said.text('host'),
    stage: said.known('stage'),
    link: link && [link[0] as number, link[1] as number],
    ops: said.texts('ops'),
    ratio: said.known('ratio'),
    seconds_lost_per_step: said.known('seconds_lost_per_step'),
    share_of_slowdown: said.known('share_of_slowdown'),
    pattern: said.word('pattern', PATTERNS),
    onset: said.known('onset'),
    steps: [first as number, last as number],
    confidence: said.known('confidence'),
    evidence: said.texts('evidence'),
  }
}

function readWhatIf(value: unknown, place: number): WhatIf {
  const said = new Fields(value, `report.json: what_if[${place}]`)
  return {
    fix: said.text('fix'),
    step_time_s: said.known('step_time_s'),
    seconds_saved_per_step: said.known('seconds_saved_per_step'),
    asked: said.truth('asked'),
    detail: said.text('detail'),
  }
}

function readVictim(value: unknown, place: number): Victim {
  const said = new Fields(value, `report.json: victims[${place}]`)
  return {
    rank: said.number('rank'),
    waits_for: said.numbers('waits_for'),
    seconds_waited_per_step: said.known('seconds_waited_per_step'),
  }
}

function readKnown<N extends string>(said: Fields, names: readonly N[]): Record<N, Known> {
  return Object.fromEntries(names.map((name) => [name, said.known(name)])) as Record<N, Known>
}

/** One object of the file. */
class Fields {
  private readonly values: Record<string, unknown>

  constructor(
    value: unknown,
    private readonly what: string,
  ) {
    if (typeof value !== 'object' || value === null || Array.isArray(value))
      throw new Error(`${what}: expected an object`)
    this.values = value as Record<string, unknown>
  }

  isNull(name: string): boolean {
    return this.values[name] === null
  }

  part(name: string): Fields {
    return new Fields(this.values[name], `${this.what}: ${name}`)
  }

  maybe(name: string): Fields | null {
    return this.isNull(name) ? null : this.part(name)
  }

  text(name: string): string {
    const value = this.values[name]
    if (typeof value !== 'string') throw this.wrong(name, 'a text')
    return clean(value)
  }

  truth(name: string): boolean {
    const value = this.values[name]
    if (typeof value !== 'boolean') throw this.wrong(name, 'true or false')
    return value
  }

  number(name: string): number {
    const value = this.values[name]
    if (!isNumber(value)) throw this.wrong(name, 'a number')
    return value
  }

  known(name: string): Known {
    const value = this.values[name]
    if (value !== null && !isNumber(value)) throw this.wrong(name, 'a number or null')
    return value
  }

  word<W extends string>(name: string, words: readonly W[]): W {
    const value = this.values[name]
    const found = words.find((word) => word === value)
    if (found === undefined) throw this.wrong(name, `one of ${words.join(', ')}`)
    return found
  }

  list(name: string): unknown[] {
    const value = this.values[name]
    if (!Array.isArray(value)) throw this.wrong(name, 'a list')
    return value
  }

  /** `length`: as many as there have to be. */
  numbers(name: string, length?: number): number[] {
    const value = this.list(name)
    if (!value.every(isNumber) || (length !== undefined && value.length !== length))
      throw this.wrong(name, length === undefined ? 'a list of numbers' : `${length} numbers`)
    return value
  }

  texts(name: string): string[] {
    const value = this.list(name)
    if (!value.every((one) => typeof one === 'string')) throw this.wrong(name, 'a list of texts')
    return value.map(clean)
  }

  allNumbers(): Record<string, number> {
    for (const name of Object.keys(this.values)) this.number(name)
    return this.values as Record<string, number>
  }

  private wrong(name: string, expected: string): Error {
    const found = JSON.stringify(this.values[name]) ?? 'nothing'
    return new Error(
      `${this.what}: ${clean(name.slice(0, 60))} is to be ${expected}, not ${clean(found.slice(0, 60))}`,
    )
  }
}

function isNumber(value: unknown): value is number {
  return typeof value === 'number' && Number.isFinite(value)
}
