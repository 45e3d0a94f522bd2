/** What the report says, in words: the same that the terminal and report.html use. */

import { counted, seconds } from '../../parts/numbers'
import type { Finding, Kind, Known, Report, Victim } from './report'

const UNKNOWN = 'unknown'

/** A duration. */
export function duration(value: Known): string {
  return value === null ? UNKNOWN : value < 0 ? `−${seconds(-value)}` : seconds(value)
}

/** A ratio: `1.50×`. */
export function times(value: Known): string {
  return value === null ? UNKNOWN : `${value.toFixed(2)}×`
}

/** A share: `94 %`, small ones `1.2 %`. */
export function percent(value: Known): string {
  if (value === null) return UNKNOWN
  return `${(100 * value).toFixed(Math.abs(value) >= 0.1 || value === 0 ? 0 : 1).replace('-', '−')} %`
}

/** A difference as a share, with its sign: `+49 %`. */
export function excess(value: Known): string {
  if (value === null) return UNKNOWN
  return value >= 0 ? `+${percent(value)}` : percent(value)
}

/** A confidence, which never claims certainty: `over 99.99 %`. */
export function sureness(value: Known): string {
  if (value === null) return UNKNOWN
  return value > 0.9999 ? 'over 99.99 %' : `${Math.floor(value * 1e4) / 1e2} %`
}

/** Ranks with runs drawn together: `0–3, 7`; after `longest` runs only how many are left. */
export function rankList(ranks: readonly number[], longest = 8): string {
  const runs: [number, number][] = []
  for (const rank of [...new Set(ranks)].sort((a, b) => a - b)) {
    const last = runs.at(-1)
    if (last && rank === last[1] + 1) last[1] = rank
    else runs.push([rank, rank])
  }
  const said = runs
    .slice(0, longest)
    .map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`))
  const left = runs.slice(longest).reduce((sum, [first, last]) => sum + last - first + 1, 0)
  return said.join(', ') + (left ? ` and ${counted(left)} more` : '')
}

/** `rank 3`, `ranks 0–3, 7` or `no rank`. */
export function ranksNamed(ranks: readonly number[]): string {
  if (!ranks.length) return 'no rank'
  return `${new Set(ranks).size > 1 ? 'ranks' : 'rank'} ${rankList(ranks)}`
}

/** The parallel layout without the dimensions of size 1: `TP2 × PP2 × DP2`. */
export function layout(topology: Report['job']['topology']): string {
  if (!topology) return 'layout unknown'
  const order = ['tp', 'cp', 'pp', 'vpp', 'dp', 'ep']
  const sizes = Object.entries(topology).filter(([, size]) => size > 1)
  sizes.sort(([a], [b]) => ((order.indexOf(a) + 99) % 99) - ((order.indexOf(b) + 99) % 99))
  return sizes.map(([name, size]) => `${name.toUpperCase()}${size}`).join(' × ') || 'a single rank'
}

/** Who or what a finding is about. */
export function subject(finding: Finding): string {
  if (finding.link) return `link ${finding.link[0]} to ${finding.link[1]}`
  if (finding.kind === 'slow_stage' && finding.stage !== null) return `stage ${finding.stage}`
  if (finding.kind === 'global_slowdown') return 'all ranks'
  return ranksNamed(finding.ranks)
}

/** One sentence, without a full stop, that says what is wrong. */
export function title(finding: Finding): string {
  return capital(TITLES[finding.kind](finding))
}

const TITLES: Record<Kind, (finding: Finding) => string> = {
  slow_rank: (f) =>
    `${subject(f)} ${several(f, 'computes', 'compute')} ` +
    factor(f, '', ` as long as ${several(f, 'its', 'their')} peers`, 'longer than the peers'),
  slow_stage: (f) => `${subject(f)} has ${factor(f, '', ' the work of the others', 'more work')}`,
  slow_link: (f) => `${subject(f)} is slow${factor(f, ': ', ' the time expected', '')}`,
  workload_imbalance: (f) => `some microbatches of ${subject(f)} take longer than the others`,
  host_stall: (f) =>
    `the host of ${subject(f)} stalls and leaves ${several(f, 'its device', 'their devices')} idle`,
  garbage_collection: (f) => `garbage collection pauses ${subject(f)}`,
  data_loading: (f) => `${subject(f)} ${several(f, 'waits', 'wait')} for training data`,
  global_slowdown: (f) => `the whole job became slower${factor(f, ': ', ' the step time', '')}`,
}

function several(finding: Finding, one: string, many: string): string {
  return new Set(finding.ranks).size > 1 ? many : one
}

function factor(finding: Finding, before: string, after: string, otherwise: string): string {
  return finding.ratio !== null && finding.ratio > 0 ? before + times(finding.ratio) + after : otherwise
}

/** How a finding behaves over the steps. */
export function when(finding: Finding): string {
  const [first, last] = finding.steps
  const steps = first === last ? `step ${first}` : `steps ${first} to ${last}`
  if (finding.onset !== null) return `${finding.pattern}, from step ${finding.onset} on (${steps})`
  return `${finding.pattern}, ${steps}`
}

export const PATTERN_MEANING: Record<Finding['pattern'], string> = {
  persistent: 'The same ranks in most steps from the onset on',
  rotating: 'Different ranks in different steps',
  transient: 'Few steps only',
}

/** The answer in one or two sentences. */
export function headline(report: Report): string {
  const step = duration(report.step_time_s.actual)
  if (report.verdict === 'healthy') return 'No rank, stage or link costs this job time worth speaking of.'
  if (report.verdict === 'inconclusive') return 'There is too little data to decide.'
  const first = report.findings[0]
  if (!first) return `A step takes ${step}.`
  const others = report.findings.length - 1
  const more = others ? ` ${others === 1 ? 'One more finding' : `${others} more findings`} below.` : ''
  return `${title(first)}: ${duration(first.seconds_lost_per_step)} of each ${step} step lost.${more}`
}

/** What this data could have shown, for verdicts that find nothing; empty where that is unknown. */
export function detectable(report: Report): string {
  if (report.findings.length || report.smallest_detectable === null) return ''
  return `A rank that computes ${times(report.smallest_detectable)} as long as its peers throughout would have been seen.`
}

/** How well the clocks agree. */
export function clocks(clock: Report['clock']): string {
  const drift = clock.device_drift_ppm
  const drifting =
    drift === null ? '' : `; GPU clocks drift by up to ${Number(drift.toPrecision(2))} ppm (corrected)`
  if (clock.aligned && !clock.anchors && clock.error_us.max === 0) return `one clock for all ranks${drifting}`
  const state = clock.aligned ? 'aligned' : 'not aligned'
  const error = `error ${microseconds(clock.error_us.p50)} median, ${microseconds(clock.error_us.max)} at most`
  const lost = clock.unconnected.length ? `; ${ranksNamed(clock.unconnected)} not connected` : ''
  return `${state}, ${error}, ${counted(clock.anchors)} anchors${lost}${drifting}`
}

function microseconds(value: Known): string {
  return duration(value === null ? null : value * 1e-6)
}

/** How the communications were matched across ranks. */
export function matched(matching: Report['matching']): string {
  const { matched: found, unmatched, by_order: order } = matching
  const how = !order ? '' : order === found ? ' by order' : ` (${counted(order)} of them by order)`
  return `${counted(found)} matched${how}, ${counted(unmatched)} not; ${percent(matching.confidence)} complete and sure`
}

const DEVICES: Record<string, string> = {
  cpu: 'CPU',
  cuda: 'GPU',
  emulated: 'emulated (compute padded to a set time)',
}

export function device(name: string): string {
  return Object.hasOwn(DEVICES, name) ? (DEVICES[name] as string) : name
}

/** All that limits the answer, one line each. */
export function cautions(report: Report): string[] {
  const lines: string[] = []
  if (report.missing_ranks.length) lines.push(`Nothing was recorded of ${ranksNamed(report.missing_ranks)}`)
  if (report.dropped_events)
    lines.push(
      `${counted(report.dropped_events)} events were dropped by the recorder, which had no room for them`,
    )
  if (report.job.oversubscribed)
    lines.push(
      `${counted(report.job.oversubscribed)} emulated durations were overrun by the real arithmetic: ` +
        'this machine is too busy, or the durations are too short',
    )
  return [...lines, ...report.warnings]
}

/** Victims that wait for the same ranks. */
export interface Waiting {
  ranks: number[]
  waitsFor: number[]
  /** How long a step, from the least to the most. */
  waits: string
}

/** Victims by whom they wait for, those that wait longest first. */
export function waiting(victims: readonly Victim[]): Waiting[] {
  const groups = new Map<string, Victim[]>()
  for (const victim of victims) {
    const key = victim.waits_for.join()
    groups.set(key, [...(groups.get(key) ?? []), victim])
  }
  const rows = [...groups.values()].map((group) => {
    const waited = group.map((victim) => victim.seconds_waited_per_step ?? 0)
    const [least, most] = [duration(Math.min(...waited)), duration(Math.max(...waited))]
    return {
      most: Math.max(...waited),
      ranks: group.map((victim) => victim.rank),
      waitsFor: group[0]?.waits_for ?? [],
      waits: least === most ? most : `${least} to ${most}`,
    }
  })
  return rows.sort((a, b) => b.most - a.most)
}

export function capital(text: string): string {
  return text.slice(0, 1).toUpperCase() + text.slice(1)
}
