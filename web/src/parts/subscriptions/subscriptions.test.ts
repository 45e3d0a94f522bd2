import { describe, expect, it } from 'vitest'
import { chosenOf, proposalsOf, tapText, type Tap } from './offered.svelte'
import { matcherOf } from './pattern'
import { alreadyThere, overheadOf, standingOf, stateText } from './standing'
import { bodyOf, commandOf, costOf, frameBytes, quoted } from './wish'
import type { Status } from '../../state/server.svelte'

const tap = (name: string, about: Partial<Tap> = {}): Tap => ({
  ...{ name, kind: 'activation', layer: 0, labels: ['s', 'b', 'h'], shape: [32, 1, 64], dtype: 'bfloat16' },
  ...{ heads: null, ranks: [0, 1], on: {} },
  ...about,
})

describe('patterns, as the job understands them', () => {
  it.each([
    ['layers.*.output', 'layers.3.output', true],
    ['layers.*.output', 'layers.3.mlp.output', false],
    ['layers.**', 'layers.3.mlp.output', true],
    ['**', 'loss', true],
    ['**.output', 'output', true],
    ['layers.0-3.output', 'layers.3.output', true],
    ['layers.[0-3].output', 'layers.4.output', false],
    ['layers.{1,3}.{mlp,attention}.output', 'layers.3.attention.output', true],
    ['parameters.**.weight', 'parameters.decoder.layers.0.weight.grad', false],
    ['layers.3.att*n.q*', 'layers.3.attention.q', true],
    ['**.a*b*c.**.x', 'p.aXbYc.q.r.x', true],
  ])('%s and %s', (pattern, name, expected) => {
    const matches = matcherOf(pattern)
    expect(typeof matches === 'function' && matches(name)).toBe(expected)
  })

  it.each(['', 'a b', 'a..b', '{a', 'a}', 'layers.3-1.x', 'layers.[x]', '{a,b}'.repeat(9), 'x'.repeat(513)])(
    '%s is none',
    (pattern) => expect(typeof matcherOf(pattern)).toBe('string'),
  )
})

describe('what the job offers', () => {
  const taps = [
    tap('layers.0.mlp.output'),
    tap('layers.1.mlp.output', { dtype: 'float32', shape: null }),
    tap('loss'),
  ]
  it('is chosen by a pattern, and proposed by parts of names', () => {
    expect(chosenOf('layers.*.mlp.output', taps).taps).toHaveLength(2)
    expect(chosenOf('nope', taps)).toEqual({ taps: [], problem: 'No tensor of this job matches' })
    expect(proposalsOf('MLP 1', taps).map((one) => one.name)).toEqual(['layers.1.mlp.output'])
    expect(tapText(taps[1]!)).toBe('activation · float32 · shape not seen yet · ranks 0-1')
  })
})

describe('a subscription', () => {
  it('is asked for with what was said only', () => {
    const wish = {
      pattern: 'a',
      what: 'tiles',
      every: 5,
      parameters: { grid: [8, 8] },
      heads: [],
      keep: true,
    } as const
    expect(bodyOf(wish)).toEqual({
      ...{ pattern: 'a', what: 'tiles', when: { every: 5 }, parameters: { grid: [8, 8] }, keep: true },
    })
  })

  it('is a command that a shell takes for what it is', () => {
    const parameters = { grid: [8, 16], tokens: [-1, 2], batch: 1 }
    const wish = {
      pattern: "layers.*.x'; rm -rf /",
      what: 'tokens',
      every: 2,
      heads: [0, 1],
      parameters,
    } as const
    expect(commandOf(wish, '/runs/a b')).toBe(
      `trimtab scope stream '/runs/a b' --tap 'layers.*.x'\\''; rm -rf /' --what tokens --every 2 --heads 0,1 ` +
        '--grid=8x16 --tokens=-1,2 --record',
    )
    expect(quoted('$(x)')).toBe("'$(x)'")
  })

  it.each([
    ['statistics', {}, 96],
    ['histogram', {}, 2144],
    ['tiles', { grid: [10, 20] }, 200],
    ['rows', { rows: [0, 1] }, 256],
    ['tokens', { tokens: [0, 1, 2] }, 384],
    ['raw', { bytes: 100 }, 100],
    ['raw', {}, 4096],
    ['pca', { components: 2 }, 256],
  ] as const)('%s %o takes about so many bytes', (what, parameters, size) =>
    expect(frameBytes(what, parameters, tap('x'))).toBe(size),
  )

  it('costs on all ranks together', () => {
    expect(costOf('statistics', {}, [tap('a'), tap('b', { ranks: [2, 3] })])).toBe(
      '2 tensors on 4 ranks, about 384 B a microbatch',
    )
    expect(costOf('raw', {}, [tap('a', { shape: null })])).toBe('1 tensor on 2 ranks')
  })
})

describe('how one stands', () => {
  const about = {
    ...{ pattern: 'a', what: 'tiles', when: { every: 4 }, step: 12, ranks: [0, 1], state: 'paused' },
    ...{ states: { 0: 'budget', 1: 'budget' }, parameters: { grid: [8, 8], reduction: 'mean' } },
  }
  const status = { state: 'live', error: '', subscriptions: { 's-1': about } } as unknown as Status

  it('is said with its reason', () => {
    expect(stateText(standingOf('s-1', about))).toBe('paused: over the budget (scope.budget) on ranks 0, 1')
    expect(stateText(standingOf('s-1', { state: { odd: 1 } }))).toBe('active')
  })

  it('gives what is wanted already, if kind and parameters are the same', () => {
    expect(alreadyThere(status, { pattern: 'a', what: 'tiles', parameters: { grid: [8, 8] } })?.id).toBe(
      's-1',
    )
    expect(alreadyThere(status, { pattern: 'a', what: 'tiles', parameters: { grid: [4, 4] } })).toBeNull()
    expect(alreadyThere(status, { pattern: 'a', what: 'raw' })).toBeNull()
  })

  it('takes the share of the rank on which it is most', () => {
    const ranks = { 0: { overhead: 0.01 }, 1: { overhead: 0.02 } }
    expect(overheadOf({ state: 'live', error: '', ranks } as unknown as Status)).toBe(0.02)
    expect(overheadOf(null)).toBeNull()
  })
})
