import { describe, expect, it } from 'vitest'
import { readReport, type Finding, type Report, type WhatIf } from './report'
import { fixesOf, together } from './whatif'
import {
  cautions,
  clocks,
  detectable,
  duration,
  excess,
  headline,
  layout,
  matched,
  percent,
  rankList,
  sureness,
  title,
  waiting,
  when,
} from './words'

const finding = {
  kind: 'slow_rank',
  ranks: [3],
  host: 'node-1',
  stage: 0,
  link: null,
  ops: ['forward'],
  ratio: 1.502,
  seconds_lost_per_step: 0.0412,
  share_of_slowdown: 0.941,
  pattern: 'persistent',
  onset: 8,
  steps: [8, 15],
  confidence: 0.9996,
  evidence: ['forward of rank 3 took longer'],
}
const document = {
  schema: 'trimtab.report/1',
  verdict: 'straggler',
  job: {
    world_size: 8,
    steps: 15,
    topology: { tp: 2, cp: 1, dp: 2, pp: 2 },
    sources: ['a'],
    device: 'cpu',
    run_id: 'x',
    oversubscribed: 0,
  },
  clock: {
    aligned: true,
    error_us: { p50: 4.2, max: 21 },
    anchors: 1824,
    unconnected: [],
    device_drift_ppm: null,
    scatter_us: null,
  },
  matching: { matched: 3210, unmatched: 0, confidence: 1, by: { sequence_numbers: 3210, order: 0 } },
  step_time_s: { actual: 0.2931, replayed: 0.2902, ideal: 0.2464 },
  slowdown: 1.178,
  findings: [finding],
  what_if: [
    { fix: 'fix rank 3', step_time_s: 0.249, seconds_saved_per_step: 0.0412, asked: false, detail: '' },
    {
      fix: 'fix data loading on rank 1',
      step_time_s: 0.2802,
      seconds_saved_per_step: 0.01,
      asked: false,
      detail: '',
    },
  ],
  windows: { pp_send_s: 0.0021, dp_reduce_s: null },
  victims: [
    { rank: 1, waits_for: [3], seconds_waited_per_step: 0.03 },
    { rank: 7, waits_for: [3, 5], seconds_waited_per_step: 0.05 },
    { rank: 2, waits_for: [3], seconds_waited_per_step: 0.036 },
  ],
  missing_ranks: [],
  dropped_events: 0,
  smallest_detectable: 1.04,
  warnings: [],
}
const report = readReport(document)

function changed(changes: object): Report {
  return readReport({ ...document, ...changes })
}

function found(changes: object): Finding {
  return changed({ findings: [{ ...finding, ...changes }] }).findings[0] as Finding
}

describe('readReport', () => {
  it('reads what scan writes, and passes over fields of later versions', () => {
    expect(report.findings[0]?.ranks).toEqual([3])
    expect(changed({ later: 1 }).slowdown).toBe(1.178)
    expect(changed({ slowdown: null }).slowdown).toBeNull()
  })

  it.each([
    [null, 'report.json: expected an object'],
    [[], 'report.json: expected an object'],
    [{ verdict: 'healthy' }, 'report.json: schema is to be a text, not nothing'],
    [{ ...document, schema: 'trimtab.report/2' }, 'it is of schema "trimtab.report/2"'],
    [{ ...document, verdict: 'guilty' }, 'verdict is to be one of healthy'],
    [{ ...document, findings: {} }, 'findings is to be a list, not {}'],
    [{ ...document, findings: [{ ...finding, steps: [1] }] }, 'findings[0]: steps is to be 2 numbers'],
    [{ ...document, findings: [{ ...finding, link: [1, 'x'] }] }, 'findings[0]: link is to be 2 numbers'],
    [{ ...document, findings: [{ ...finding, ratio: '<b>' }] }, 'ratio is to be a number or null, not "<b>"'],
    [{ ...document, warnings: [1] }, 'warnings is to be a list of texts'],
    [{ ...document, job: null }, 'job: expected an object'],
    [{ ...document, victims: ['x'] }, 'victims[0]: expected an object'],
  ])('says in one line what is wrong (%#)', (value, says) => {
    expect(() => readReport(value)).toThrow(says)
  })

  it('takes out of texts what would hide or reorder them, and cuts them', () => {
    expect(found({ host: 'a\u202eb\u0000\nc' }).host).toBe('a\ufffdb\ufffd c')
    expect(found({ evidence: ['x'.repeat(9999)] }).evidence[0]).toHaveLength(2001)
    expect(found({ host: '<img src=x>' }).host).toBe('<img src=x>')
  })
})

describe('words', () => {
  it('says who is slow and what it costs', () => {
    expect(headline(report)).toBe(
      'Rank 3 computes 1.50× as long as its peers: 41.2 ms of each 293 ms step lost.',
    )
    expect(headline(changed({ findings: [finding, finding, finding] }))).toMatch(/2 more findings below\.$/)
    expect(headline(changed({ verdict: 'healthy', findings: [] }))).toMatch(/^No rank/)
    expect(headline(changed({ verdict: 'inconclusive', findings: [] }))).toMatch(/too little data/)
  })

  it.each([
    [{ kind: 'slow_stage', stage: 1 }, 'Stage 1 has 1.50× the work of the others'],
    [{ kind: 'slow_link', link: [0, 1] }, 'Link 0 to 1 is slow: 1.50× the time expected'],
    [{ kind: 'slow_rank', ranks: [1, 2, 3], ratio: null }, 'Ranks 1–3 compute longer than the peers'],
    [{ kind: 'workload_imbalance' }, 'Some microbatches of rank 3 take longer than the others'],
    [{ kind: 'host_stall', ranks: [] }, 'The host of no rank stalls and leaves its device idle'],
    [{ kind: 'garbage_collection' }, 'Garbage collection pauses rank 3'],
    [{ kind: 'data_loading', ranks: [0, 4] }, 'Ranks 0, 4 wait for training data'],
    [{ kind: 'global_slowdown', ranks: [] }, 'The whole job became slower: 1.50× the step time'],
  ])('has a title for each kind (%#)', (changes, says) => {
    expect(title(found(changes))).toBe(says)
  })

  it('says when', () => {
    expect(when(found({}))).toBe('persistent, from step 8 on (steps 8 to 15)')
    expect(when(found({ onset: null, pattern: 'transient', steps: [4, 4] }))).toBe('transient, step 4')
  })

  it('draws ranks together', () => {
    expect(rankList([7, 3, 0, 1, 2, 2])).toBe('0–3, 7')
    expect(rankList([0, 2, 4, 6, 8, 9], 2)).toBe('0, 2 and 4 more')
  })

  it('shows what is not known as such, and never claims certainty', () => {
    expect([duration(null), percent(null), sureness(null), excess(null)]).toEqual(Array(4).fill('unknown'))
    expect(sureness(1)).toBe('over 99.99 %')
    expect(sureness(0.99239)).toBe('99.23 %')
    expect(excess(-0.052)).toBe('−5.2 %')
    expect(excess(0.49)).toBe('+49 %')
    expect(duration(-0.01)).toBe('−10 ms')
  })

  it('tells layout, clocks and matching', () => {
    expect(layout({ dp: 2, pp: 2, tp: 2, vpp: 1 })).toBe('TP2 × PP2 × DP2')
    expect(layout(null)).toBe('layout unknown')
    expect(clocks(report.clock)).toBe('aligned, error 4.2 µs median, 21 µs at most, 1,824 anchors')
    expect(clocks({ ...report.clock, anchors: 0, error_us: { p50: 0, max: 0 } })).toBe(
      'one clock for all ranks',
    )
    expect(matched(report.matching)).toBe('3,210 matched, 0 not; 100 % complete and sure')
  })

  it('says what limits the answer', () => {
    const limited = changed({ missing_ranks: [2], dropped_events: 17, warnings: ['clocks apart'] })
    expect(cautions(limited)).toHaveLength(3)
    expect(detectable(report)).toBe('')
    expect(detectable(changed({ findings: [] }))).toContain('1.04×')
  })

  it('groups victims by whom they wait for', () => {
    expect(waiting(report.victims)).toMatchObject([
      { ranks: [7], waitsFor: [3, 5], waits: '50 ms' },
      { ranks: [1, 2], waitsFor: [3], waits: '30 ms to 36 ms' },
    ])
  })
})

describe('together', () => {
  const all = {
    fix: 'fix all findings',
    step_time_s: 0.242,
    seconds_saved_per_step: 0.0482,
    asked: false,
    detail: '',
  }
  const link = {
    fix: 'fix link 0-1',
    step_time_s: 0.2852,
    seconds_saved_per_step: 0.005,
    asked: false,
    detail: '',
  }
  const three = changed({ what_if: [all, ...document.what_if, link] })
  const { single } = fixesOf(three)
  const [rank, data] = single as [WhatIf, WhatIf]

  it('tells apart what was asked for, what was found, and all at once', () => {
    expect(single.map((fix) => fix.fix)).toEqual(['fix rank 3', 'fix data loading on rank 1', 'fix link 0-1'])
    expect(fixesOf(three).all?.step_time_s).toBe(0.242)
    expect(fixesOf(changed({ what_if: [{ ...link, asked: true }] })).asked).toHaveLength(1)
  })

  it('is between the best alone and all at once', () => {
    const two = together(three, [rank, data])
    expect(two).toMatchObject({ atMost: expect.closeTo(0.249), atLeast: 0.242, exact: null, question: null })
    expect(two?.addedUp).toBeCloseTo(0.242) // the sum would be less than all at once
    expect(together(report, report.what_if)?.addedUp).toBeCloseTo(0.239)
  })

  it('is exact where it was replayed', () => {
    expect(together(three, [data])?.exact).toBeCloseTo(0.2802)
    expect(together(three, single)?.exact).toBe(0.242)
    expect(together(report, report.what_if)?.exact).toBeNull()
  })

  it('gives the question that a replay answers, and a shell nothing that it might take for a command', () => {
    expect(together(three, [rank, link])?.question).toBe('fix rank 3 and fix link 0-1')
    const hostile = { ...rank, fix: 'fix rank 3"; rm -rf ~ #' }
    expect(together(report, [hostile])?.question).toBeNull()
  })

  it('says nothing of nothing', () => {
    expect(together(report, [])).toBeNull()
    const unknown = changed({ step_time_s: { actual: null, replayed: null, ideal: null } })
    expect(together(unknown, report.what_if)).toBeNull()
  })
})
