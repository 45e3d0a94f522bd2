/** What the timeline shows of a run: where something was recorded, and what happened. */

import { getContext, setContext } from 'svelte'
import { resource } from '../../state/resource.svelte'
import type { Notice } from '../../state/server.svelte'
import type { Services } from '../../state/services'
import { auditOf, marksOf, type Mark } from './marks'

/** The frames that a view is of; of others statistics, if there are any. */
const SHOWN: Readonly<Record<string, string>> = {
  tensors: 'tiles',
  attention: 'attention',
  histogram: 'histogram',
  pca: 'pca',
  text: 'nexttoken',
}
/** An answer has no more; of more steps each is taken to hold something. */
const MOST_STEPS = 250_000
/** What is newer than the list is taken to hold something, so that it need not come often. */
const STEPS_EVERY_MS = 2000

type Json = Record<string, unknown>

export interface RecordedSteps {
  readonly steps: readonly number[] | null
  /** The newest step when they were listed. */
  readonly listed: number
}

/** Steps at which the tensor of the address was recorded, in order; of none, those at which anything was. */
export function recordedSteps({ api, address, time }: Services): RecordedSteps {
  const taps = resource(
    () =>
      time.run && time.last !== null && address.text('tap')
        ? { run: time.run, tap: address.text('tap') }
        : null,
    ({ run }, signal) => api.get('/runs/{run}/taps', { run }, signal),
  )
  const what = $derived.by(() => {
    const kinds = taps.value?.taps.find((tap) => tap.name === address.text('tap'))?.what
    const shown = SHOWN[address.text('view')] ?? 'statistics'
    return kinds && [shown, 'statistics', ...kinds].find((kind) => kinds.includes(kind))
  })
  const found = resource(
    () => {
      const { run, first, last } = time
      if (first === null || last === null || last - first > MOST_STEPS || taps.loading) return null
      return { run, tap: what ? address.text('tap') : '', what: what ?? 'statistics', last }
    },
    ({ run, tap, what }, signal) => api.get('/runs/{run}/steps', { run, tap, what } as never, signal),
    { pause: STEPS_EVERY_MS },
  )
  return {
    get steps() {
      return found.value?.steps ?? null
    },
    get listed() {
      return found.of?.last ?? -1
    },
  }
}

export interface Marks {
  readonly all: readonly Mark[]
}

const KEY = Symbol('marks')

/** For all of the page, in its outermost component: views show the same marks as the timeline. */
export function provideMarks(services: Services): Marks {
  return setContext(KEY, made(services))
}

/** Marks on the axis of the run that is shown, also of what happens while the job goes on. */
export function marks(services: Services): Marks {
  return getContext<Marks | undefined>(KEY) ?? made(services)
}

function made({ api, server, time }: Services): Marks {
  const run = $derived(time.last === null ? '' : time.run)
  const isLive = $derived(time.about?.live ?? false)
  /** The last that was said of a perturbation: the log of the ranks has grown. */
  const told = $derived(
    isLive ? (server.notices.findLast((notice) => notice['perturbation'])?.unix_ns ?? 0) : 0,
  )
  const notices = resource(
    () => (run ? { run } : null),
    ({ run }, signal) => api.get('/runs/{run}/notices', { run }, signal),
  )
  const audit = resource(
    () => (run ? { run, told } : null),
    ({ run }, signal) => api.get('/runs/{run}/audit', { run }, signal),
    { pause: 1000 },
  )
  const log = resource(
    () => (run ? { run } : null),
    ({ run }, signal) => api.get('/runs/{run}/watch', { run }, signal),
  )
  const watch = resource(
    () => (isLive && server.session?.attached ? { run } : null),
    (_, signal) => api.get('/watch', {}, signal),
  )
  const report = resource(
    () => (run && time.about?.report ? { run } : null),
    ({ run }, signal) => api.get('/runs/{run}/report', { run }, signal),
  )
  const all = $derived.by(() => {
    if (time.first === null || time.last === null) return []
    const said = [...((notices.value?.notices ?? []) as Notice[]), ...(isLive ? server.notices : [])]
    const directory = time.about?.directory
    const alone = server.runs.filter((one) => one.directory === directory).length === 1
    const heard = isLive ? server.watched.map((message) => message['event'] as Json) : []
    const findings = (report.value as { findings?: unknown } | null)?.findings
    return marksOf(
      {
        audit: auditOf((audit.value?.audit ?? []) as Json[], said, alone),
        notices: said,
        events: [
          ...((log.value?.events ?? []) as Json[]),
          ...((watch.value?.events ?? []) as Json[]),
          ...heard,
        ],
        findings: Array.isArray(findings) ? (findings as Json[]) : [],
      },
      { first: time.first, last: time.last },
    )
  })
  return {
    get all() {
      return all
    },
  }
}
