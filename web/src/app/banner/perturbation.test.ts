import { describe, expect, it } from 'vitest'
import { describe as inWords, leftText, standingOf, standings } from './perturbation'
import { troublesOf } from './troubles'
import type { Status } from '../../state/server.svelte'

const FLIP = {
  ...{ kind: 'bit-flip', pattern: 'layers.1.mlp.output', first: -1, last: 2, step: 40, ranks: [0, 1] },
  ...{ parameters: { bits: ['exponent', 3], part: { elements: 1 } }, ended: false, states: {} },
}

describe('how a perturbation stands', () => {
  it.each([
    [38, 'coming', 'begins in 2 steps, at step 40'],
    [40, 'active', '3 steps left, until step 42'],
    [42, 'active', '1 step left, until step 42'],
    [43, 'over', 'over'],
  ])('at step %i it is %s', (step, phase, text) => {
    const standing = standingOf('p-1', FLIP, step)
    expect([standing.phase, leftText(standing)]).toEqual([phase, text])
  })

  it('is over before its time when it was ended', () => {
    expect(standingOf('p-1', { ...FLIP, ended: true }, 41).phase).toBe('over')
  })

  it('is put back once all its ranks have done so', () => {
    const after = (states: object) => standingOf('p-1', { ...FLIP, ended: true, stored: true, states }, 41)
    expect([after({ 0: 'reverted', 1: 'reverted' }).reverted, after({ 0: 'reverted' }).reverted]).toEqual([
      true,
      false,
    ])
    expect(leftText(after({ 0: 'reverted', 1: 'reverted' }))).toBe('over, and put back')
  })

  it('has steps of its own where they were said', () => {
    const standing = standingOf('p-1', { ...FLIP, first: 60, last: 61 }, 50)
    expect([standing.first, standing.last, standing.steps]).toEqual([60, 61, 10])
  })

  it('comes the newest first', () => {
    const found = standings({ a: FLIP, b: { ...FLIP, step: 50 } }, 45)
    expect(found.map((one) => one.id)).toEqual(['b', 'a'])
  })

  it('takes nothing that a job says for what it should be', () => {
    const standing = standingOf('<b>', { kind: 5, parameters: [1], ranks: 'x', states: null, pattern: {} }, 3)
    expect([standing.ranks, standing.states, standing.text]).toEqual([[], {}, '5 of [object Object]'])
  })
})

describe('in words', () => {
  it.each([
    [FLIP, 'flips a random bit of the exponent and bit 3 of 1 element in layers.1.mlp.output'],
    [
      {
        kind: 'gaussian',
        pattern: 'x',
        parameters: { std: 0.1, relative: true, part: { heads: [0, 1], fraction: 0.5 } },
      },
      'adds normal noise of deviation 0.1 times the rms to 0.5 of the elements of heads 0, 1 in x',
    ],
    [
      { kind: 'zero', pattern: 'x', parameters: { where: 'both', revert: true } },
      'zeroes x in both copies, then puts it back',
    ],
    [{ kind: 'delay', pattern: 'p2p.*', parameters: { ms: 5 } }, 'delays p2p.* by 5 ms'],
    [{}, 'begun before this server came: the log says what it did'],
  ])('%o', (about, text) => expect(inWords(about)).toBe(text))
})

describe('what does not run as it should', () => {
  const status = (more: object): Status => ({ state: 'live', error: '', ...more }) as Status
  it('is said in few words', () => {
    const subscriptions = {
      's-1': { state: 'paused' },
      's-2': { state: 'active' },
      's-3': { state: 'failed' },
    }
    expect(troublesOf(status({ subscriptions, missing: [3] }))).toEqual([
      '1 subscription paused: s-1',
      '1 subscription failed on a rank: s-3',
      'nothing is heard of rank 3',
    ])
    expect(troublesOf(status({ recording: { failed: 'disk full' } }))).toEqual([
      'nothing is recorded any more: disk full',
    ])
  })

  it('is nothing where no job runs', () => {
    expect(troublesOf({ state: 'ended', error: '', missing: [1] } as Status)).toEqual([])
  })
})
