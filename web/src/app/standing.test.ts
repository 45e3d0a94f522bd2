import { describe, expect, it } from 'vitest'
import type { Beat, Status } from '../state/server.svelte'
import { labelled } from './runs'
import {
  connectionWords,
  droppedOf,
  endsSoon,
  jobWords,
  overheadOf,
  pausedOf,
  percent,
  recordingWords,
  total,
} from './standing'

const beat = (overhead: number, dropped = 0) => ({ overhead, dropped }) as Beat
const live: Status = {
  state: 'live',
  error: '',
  missing: [],
  ranks: { '0': beat(0.004, 2), '1': beat(0.021, 1) },
  subscriptions: {
    's-1': { pattern: 'layers.*.output', state: 'active', states: {} },
    's-2': { pattern: 'logits', state: 'paused', states: { '0': 'budget', '1': 'budget', '2': 'active' } },
    's-3': { pattern: 'loss', state: 'failed', states: { '0': 'error' } },
  },
  recording: { name: 'r', frames: 1200, bytes: 2500, dropped: 4, failed: '' },
}

describe('how things stand', () => {
  it.each(['connecting', 'open', 'lost', 'expired'] as const)('says what %s means', (state) =>
    expect(connectionWords(state, '/runs/a b').more).toMatch(/\.$/),
  )

  it.each([
    [null, 'job unknown'],
    [{ state: 'recordings', error: '' }, 'recordings only'],
    [{ state: 'waiting', error: '' }, 'waiting for the job'],
    [live, 'job runs'],
    [{ ...live, missing: [3] }, '1 rank missing'],
    [{ state: 'ended', error: '' }, 'job ended'],
    [{ state: 'away', error: 'no answer' }, 'job away'],
  ] as [Status | null, string][])('of %j is %s', (status, text) => expect(jobWords(status).text).toBe(text))

  it('names ranks that are missing, and why the job is away', () => {
    const missing = Array.from({ length: 20 }, (_, rank) => rank)
    expect(jobWords({ ...live, missing }).more).toContain('rank 0, 1, 2, 3, 4, 5, 6, 7, ...')
    expect(jobWords({ state: 'away', error: 'no answer' }).more).toContain('no answer')
  })

  it('counts what scope costs on the rank where it costs most', () => {
    expect(overheadOf(live)).toEqual({ share: 0.021, rank: 1 })
    expect([overheadOf(null), overheadOf({ ...live, ranks: undefined })]).toEqual([null, null])
    expect([0, 0.0001, 0.0042, 0.021, 0.25].map(percent)).toEqual([
      '0 %',
      '< 0.1 %',
      '0.4 %',
      '2.1 %',
      '25 %',
    ])
  })

  it('says which subscriptions rest, and why', () =>
    expect(pausedOf(live)).toEqual([
      { id: 's-2', pattern: 'logits', why: 'over the budget' },
      { id: 's-3', pattern: 'loss', why: 'it failed' },
    ]))

  it('adds up what was lost on the way', () => {
    expect(droppedOf(live, 7, 5)).toEqual({ ranks: 3, server: 7, recording: 4, page: 5 })
    expect(total(droppedOf(live, 7, 5))).toBe(19)
    expect(total(droppedOf(null, 0, 0))).toBe(0)
  })

  it('says how the recording goes', () => {
    expect(recordingWords(live)).toBe('1,200 frames, 2.50 kB')
    expect(recordingWords({ ...live, recording: { failed: 'disk full' } })).toBe('it has failed: disk full')
    expect(recordingWords({ ...live, recording: null })).toBeNull()
  })

  it('says what a run is, whatever its label is', () => {
    const run = { name: 'a.1', label: 'clean', live: false, recorded: true, error: '' }
    expect(labelled(run)).toBe('a.1 (clean)')
    expect(labelled({ ...run, label: '', live: true, error: 'cut off' })).toBe(
      'a.1 (this job, cannot be read)',
    )
    expect(labelled({ ...run, label: '', recorded: false, error: 'x' })).toBe('a.1 (nothing recorded)')
    expect(labelled({ ...run, label: `\u202ex\n${'y'.repeat(99)}` })).toBe(`a.1 (x ${'y'.repeat(38)}…)`)
  })

  it('warns before a session ends', () =>
    expect([null, 40_000, 600, -3].map(endsSoon)).toEqual([
      null,
      null,
      'session ends in 10 min',
      'session ends in 0 s',
    ]))
})
