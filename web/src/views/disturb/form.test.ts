import { describe, expect, it } from 'vitest'
import { EMPTY, readDraft, writeDraft, type Draft } from './draft'
import { partOf, previewed, readForm } from './form'
import { KIND_NAMES, KINDS, placeOf, whyNot, type Place, type Tap } from './kinds'

const tap = (about: Partial<Tap>): Tap => ({
  ...{ name: 'layers.1.mlp.output', kind: 'activation', layer: 1, labels: ['s', 'b', 'h'] },
  ...{ shape: null, dtype: 'bfloat16', heads: null, ranks: [0, 1] },
  ...about,
})
const ACTIVATION = placeOf('layers.1.mlp.output', [tap({})])
const QUERIES = placeOf('q', [tap({ labels: ['s', 'b', 'n', 'd'], heads: [0, 2, 4] })])
const WEIGHT = placeOf('parameters.w', [
  tap({ name: 'parameters.w', kind: 'parameter', labels: ['out', 'in'] }),
])
const COMMUNICATION = placeOf('collectives.tp.all_reduce', [])

const read = (changes: Partial<Draft>, place: Place = ACTIVATION) =>
  readForm({ ...EMPTY, pattern: 'layers.1.mlp.output', ...changes }, place)
const parameters = (changes: Partial<Draft>, place?: Place) => read(changes, place).perturbation?.parameters

describe('from the form to the API', () => {
  it.each<[Partial<Draft>, Record<string, unknown>]>([
    [
      { kind: 'gaussian', std: '0.5', relative: true },
      { std: 0.5, relative: true },
    ],
    [
      { kind: 'uniform', low: '0.5', high: '1.5' },
      { low: 0.5, high: 1.5 },
    ],
    [{ kind: 'offset', offset: '-1e-3' }, { value: -0.001 }],
    [
      { kind: 'bit-flip', bits: '14, exponent[2]' },
      { bits: [14, 'exponent[2]'], part: { elements: 1 } },
    ],
    [
      { kind: 'bit-flip', bits: 'sign', part: 'all' },
      { bits: ['sign'], part: { fraction: 1 } },
    ],
    [{ kind: 'zero', part: 'fraction', fraction: '0.25' }, { part: { fraction: 0.25 } }],
    [
      { kind: 'scale', factor: '3', part: 'indices', indices: '0,4-6' },
      { factor: 3, part: { indices: [0, 4, 5, 6] } },
    ],
    [
      { kind: 'mask', tokens: '0-2', share: '0.5' },
      { value: 0, part: { tokens: [0, 1, 2], fraction: 0.5 } },
    ],
    [
      { kind: 'stuck', value: '7', elements: '3' },
      { value: 7, part: { elements: 3 } },
    ],
    [{ kind: 'stale' }, {}],
  ])('%o', (changes, expected) => expect(parameters(changes)).toEqual(expected))

  it('delays communication, whatever is left in the fields of a part', () => {
    expect(parameters({ kind: 'delay', ms: '20', part: 'indices', indices: 'x' }, COMMUNICATION)).toEqual({
      ms: 20,
    })
  })

  it('says where a parameter is disturbed, and nowhere else', () => {
    const stored = { kind: 'zero', where: 'both', revert: true } as const
    expect(parameters(stored, WEIGHT)).toEqual({ where: 'both', revert: true })
    expect(parameters(stored, ACTIVATION)).toEqual({})
  })

  it('begins soon, or at its steps', () => {
    expect(read({ count: '3' }).perturbation).toMatchObject({ first: -1, last: 2 })
    expect(read({ when: 'steps', steps: '120-122' }).perturbation).toMatchObject({ first: 120, last: 122 })
    expect(read({ ranks: '2', layers: '0-3', microbatches: '', seed: '7' }).perturbation).toMatchObject({
      ...{ ranks: [2], layers: [0, 1, 2, 3], microbatches: null, seed: 7, probability: 1 },
    })
  })

  it('makes a paired run, and previews it as of the next steps', () => {
    const { pair, perturbation } = read({ mode: 'pair', pairSteps: '4', pairSpan: '1-2', tolerance: '1e-2' })
    expect(pair).toMatchObject({ steps: 4, pattern: 'layers.*.output', tolerance: 0.01 })
    expect(pair?.perturbations).toEqual([perturbation])
    expect(perturbation).toMatchObject({ first: 1, last: 2 })
    expect(previewed(perturbation!, 'pair')).toMatchObject({ first: -1, last: 1 })
    expect(previewed(perturbation!, 'disturb')).toBe(perturbation)
  })
})

describe('what is wrong', () => {
  it.each<[Partial<Draft>, keyof Draft, RegExp, Place?]>([
    [{ pattern: ' ' }, 'pattern', /which tensor/],
    [{ pattern: 'a b' }, 'pattern', /white space/],
    [{ kind: 'gaussian', std: '-1' }, 'std', /from 0 on/],
    [{ kind: 'gaussian', std: '1,5' }, 'std', /A number/],
    [{ kind: 'uniform', low: '2', high: '1' }, 'high', /below/],
    [{ bits: '16' }, 'bits', /bfloat16 has 0 to 15/],
    [{ bits: '' }, 'bits', /1 to 64/],
    [{ elements: '4097' }, 'elements', /4096/],
    [{ kind: 'zero', part: 'fraction', fraction: '1.1' }, 'fraction', /from 0 to 1/],
    [{ kind: 'mask' }, 'tokens', /which tokens/],
    [{ kind: 'mask', heads: '0' }, 'heads', /no heads/],
    [{ kind: 'mask', heads: '4' }, 'heads', /at most 3/, QUERIES],
    [{ kind: 'mask', tokens: '0' }, 'tokens', /no dimension/, WEIGHT],
    [{ kind: 'stale' }, 'kind', /not for parameters/, WEIGHT],
    [{ kind: 'delay' }, 'kind', /communication only/],
    [{ count: '0' }, 'count', /from 1 to 100000/],
    [{ when: 'steps', steps: '9-3' }, 'steps', /before the first/],
    [{ when: 'steps', steps: '0-100000' }, 'steps', /At most 100000/],
    [{ probability: '0' }, 'probability', /Above 0/],
    [{ seed: '-1' }, 'seed', /from 0 on/],
    [{ ranks: '0;1' }, 'ranks', /Numbers such as/],
    [{ mode: 'pair', pairSteps: '3', pairSpan: '3' }, 'pairSpan', /at most 2/],
    [{ mode: 'pair', pairPattern: '' }, 'pairPattern', /compared/],
  ])('%o', (changes, field, line, place) => {
    const { problems, perturbation, pair } = read(changes, place)
    expect(problems[field]).toMatch(line)
    expect([perturbation, pair]).toEqual([null, null])
  })

  it('says of each kind where it cannot be done', () => {
    const offered = (place: Place) => KIND_NAMES.filter((name) => !whyNot(KINDS[name], place))
    expect(offered(ACTIVATION)).toEqual(KIND_NAMES.filter((name) => name !== 'delay'))
    expect(offered(WEIGHT)).toEqual(KIND_NAMES.filter((name) => name !== 'delay' && name !== 'stale'))
    expect(offered(COMMUNICATION)).toEqual(KIND_NAMES)
  })
})

describe('the draft in the address', () => {
  it('comes back as it was', () => {
    const draft: Draft = { ...EMPTY, pattern: 'layers.*.output', kind: 'mask', heads: '0,3', relative: true }
    expect(readDraft(writeDraft(draft), draft.pattern)).toEqual(draft)
    expect(writeDraft(EMPTY)).toBe('')
  })

  it.each([
    '{',
    '[1]',
    'null',
    '{"kind":"explode","std":5,"relative":"yes","__proto__":{"a":1},"other":"x"}',
  ])('what somebody else wrote is passed over: %s', (text) => expect(readDraft(text, '')).toEqual(EMPTY))

  it('means the usual part of a kind unless one was chosen', () => {
    expect(partOf(EMPTY)).toBe('elements')
    expect(partOf({ ...EMPTY, kind: 'mask' })).toBe('slices')
    expect(partOf({ ...EMPTY, kind: 'zero' })).toBe('all')
    expect(partOf({ ...EMPTY, kind: 'zero', part: 'indices' })).toBe('indices')
  })
})
