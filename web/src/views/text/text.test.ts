import { describe, expect, it } from 'vitest'
import type { Frame, Tensor } from '../../api/frames'
import { contrast, rgbOfHex } from '../../draw/colours-oklab'
import { alongSteps, answersOf, percent, sourceOf, stepUpTo, surprise, type Answer } from './answers'
import { candidateLines, courseLine } from './course'
import { bodyOf, commandOf, idsOf, problemOf, probesOf, type Draft } from './probes'
import { areBytes, generated, probed, textOf, usualSlot } from './sequence'
import { csvOfSlots } from './table'
import { bitsOf, legendOf, tint } from './tint'

function tensor(values: number[], shape: number[], dtype: 'int32' | 'float64' | 'uint8' = 'float64'): Tensor {
  const Made = { int32: Int32Array, float64: Float64Array, uint8: Uint8Array }[dtype]
  return { dtype, shape, values: Made.from(values) }
}

function frameOf(arrays: Frame['arrays'], more: Partial<Frame> = {}): Frame {
  const about = {
    tap: 'logits',
    what: 'nexttoken',
    subscription: '3',
    step: 0,
    microbatch: 0,
    rank: 0,
    replica: 0,
  }
  return { ...about, shard: [], meta: {}, arrays, unixNs: 0n, ...more }
}

function chosen(step: number, position: number, texts: string[]): Frame {
  const bytes = [...new TextEncoder().encode(JSON.stringify(texts))]
  const arrays = {
    ids: tensor([7, 9], [1, 2], 'int32'),
    probabilities: tensor([0.6, 0.3], [1, 2]),
    entropy: tensor([0.9], [1]),
    prompt: tensor([0], [1], 'int32'),
    position: tensor([position], [1], 'int32'),
    chosen: tensor([9], [1], 'int32'),
    chosen_probability: tensor([0.3], [1]),
    texts: tensor(bytes, [bytes.length], 'uint8'),
  }
  return frameOf(arrays, { step })
}

/** After each token of `text`, whose tokens are its bytes. */
function probe(step: number, text: string, first = 0.5): Frame {
  const ids = [...new TextEncoder().encode(text)]
  const rows = ids.length
  const arrays = {
    ids: tensor(
      ids.flatMap((id) => [id, 32]),
      [rows, 2],
      'int32',
    ),
    probabilities: tensor(
      ids.flatMap(() => [first, 0.2]),
      [rows, 2],
    ),
    entropy: tensor(Array(rows).fill(1), [rows]),
    prompt: tensor(Array(rows).fill(0), [rows], 'int32'),
    position: tensor([...ids.keys()], [rows], 'int32'),
    target: tensor([...ids.slice(1), -1], [rows], 'int32'),
    target_probability: tensor([...ids.slice(1).map(() => 0.01), NaN], [rows]),
    target_rank: tensor([...ids.slice(1).map(() => 12), -1], [rows], 'int32'),
  }
  return frameOf(arrays, { step, subscription: 'n-1', meta: { probe: 'n-1' } })
}

describe('answers', () => {
  it('are read of a generation', () => {
    const [answer] = answersOf([chosen(4, 11, [' b', ' a', ' b'])])
    expect(answer).toMatchObject({ step: 4, position: 11, entropy: 0.9, source: '3' })
    expect(answer!.candidates).toEqual([
      { id: 7, text: ' a', probability: 0.6 },
      { id: 9, text: ' b', probability: 0.3 },
    ])
    expect(answer!.asked).toEqual({ kind: 'chosen', id: 9, text: ' b', probability: 0.3, rank: 1 })
    expect(sourceOf(chosen(0, 0, []))).toEqual({ id: '3', kind: 'generation' })
  })

  it('are read of a probe', () => {
    const found = answersOf([probe(60, 'abc')])
    expect(found.map((answer) => answer.asked?.id)).toEqual([98, 99, undefined])
    expect(found[0]!.asked).toMatchObject({ kind: 'target', probability: 0.01, rank: 12 })
    expect(sourceOf(probe(0, 'a')).kind).toBe('probe')
  })

  it('say that a token is not among those that were recorded', () => {
    const frame = chosen(0, 0, [])
    frame.arrays['chosen'] = tensor([1000], [1], 'int32')
    expect(answersOf([frame])[0]!.asked).toMatchObject({ id: 1000, text: null, rank: null })
  })

  it('are none of a frame whose parts could not be merged', () => {
    const frame = frameOf({ 'ids@0': tensor([1], [1, 1], 'int32') })
    expect(answersOf([frame])).toEqual([])
  })

  it('of a place follow each other', () => {
    const all = answersOf([probe(40, 'ab', 0.9), probe(20, 'ab', 0.1), chosen(0, 0, [])])
    expect(alongSteps(all, 0, 1).map((answer) => answer.candidates[0]!.probability)).toEqual([0.1, 0.9])
    expect([stepUpTo(all, 39), stepUpTo(all.slice(0, 4), 19)]).toEqual([20, null])
  })
})

describe('a generated text', () => {
  const answers = answersOf([chosen(0, 1, [' c', ' a', ' c']), chosen(1, 2, ['<img src=x>', ' a', ''])])

  it('has the tokens of the prompt first, and answers from then on', () => {
    const slots = generated({ prompt_tokens: 2, tokens: ['A', ' b', ' c', '<img src=x>'] }, answers)
    expect(slots.map((slot) => slot.kind)).toEqual(['prompt', 'prompt', 'generated', 'generated'])
    expect(slots.map((slot) => slot.answer?.step)).toEqual([undefined, undefined, 0, 1])
    expect(slots[3]).toMatchObject({ text: '<img src=x>', id: 9 })
  })

  it('is shown while its end, or all of its texts, are not there yet', () => {
    const begun = generated({ prompt_tokens: 2, tokens: ['A', ' b'] }, answers)
    expect(begun.map((slot) => slot.text)).toEqual(['A', ' b', ' c', '<img src=x>'])
    const bare = generated({ prompt_tokens: 0, tokens: [] }, answers)
    expect(bare.map((slot) => [slot.kind, slot.text])).toEqual([
      ['prompt', null],
      ['prompt', null],
      ['generated', ' c'],
      ['generated', '<img src=x>'],
    ])
    expect(generated({ prompt_tokens: 0, tokens: [] }, [])).toEqual([])
  })
})

describe('a probed prompt', () => {
  const answers = answersOf([probe(60, 'abc')])

  it('has a place after its last token', () => {
    const slots = probed(answers, { text: 'abc', tokens: [], target: null }, 'bytes')
    expect(slots.map((slot) => slot.text)).toEqual(['a', 'b', 'c', null])
    expect(slots.map((slot) => slot.kind)).toEqual(['prompt', 'prompt', 'prompt', 'open'])
    expect(slots.map((slot) => slot.answer?.position)).toEqual([undefined, 0, 1, 2])
    expect(usualSlot(slots, null)).toBe(3)
    expect([usualSlot(slots, 1), usualSlot(slots, 99)]).toEqual([1, 3])
  })

  it('shows what is known of tokens: ids that were given, else the expected ones', () => {
    const given = { text: '', tokens: [5, 6, 7], target: null }
    expect(probed(answers, given, 'ids').map((slot) => slot.id)).toEqual([5, 6, 7, null])
    expect(probed(answers, null, 'ids').map((slot) => [slot.id, slot.text])).toEqual([
      [null, null],
      [98, null],
      [99, null],
      [null, null],
    ])
  })

  it('is of bytes where there are as many tokens as bytes', () => {
    const said = { text: 'abc', tokens: [], target: null }
    expect(areBytes(answers, said, 'auto')).toBe(true)
    expect(areBytes(answers, { ...said, text: 'abcd' }, 'auto')).toBe(false)
    expect(areBytes(answers, said, 'job')).toBe(false)
    expect(areBytes(answers, null, 'auto')).toBe(false)
    expect([
      textOf(65, 'bytes'),
      textOf(10, 'bytes'),
      textOf(7, 'bytes'),
      textOf(226, 'bytes'),
      textOf(65, 'ids'),
    ]).toEqual(['A', '\n', '<0x07>', '<0xE2>', null])
  })
})

describe('probabilities over steps', () => {
  it('are followed for each candidate, and unknown where one was not recorded', () => {
    const all = answersOf([probe(20, 'ab', 0.1), probe(40, 'xb', 0.9)])
    const place = alongSteps(all, 0, 0)
    const lines = candidateLines(place, place[1]!, (id) => `#${id}`)
    expect(lines.map((line) => line.label)).toEqual(['#120', '#32', '#98'])
    expect(lines[0]!.mean).toEqual([null, 0.9])
    expect(lines[2]!.mean).toEqual([0.01, 0.01])
    expect(courseLine(place, 'entropy', 'e').mean).toEqual([1, 1])
    expect(courseLine(place, 'surprise', 's').mean[0]).toBeCloseTo(6.64, 2)
  })
})

describe('the form', () => {
  const draft: Draft = {
    text: 'The "cat"',
    as: 'text',
    tokenizer: 'auto',
    target: '',
    every: 10,
    top: 5,
    all: true,
  }

  it('becomes what the job takes', () => {
    expect(problemOf(draft)).toBe('')
    expect(bodyOf(draft)).toEqual({
      prompts: [{ text: 'The "cat"', tokens: [], target: null }],
      every: 10,
      top: 5,
      positions: 'all',
      tokenizer: 'auto',
    })
    const ids: Draft = { ...draft, as: 'ids', text: '464, 3139', target: '7', all: false }
    expect(bodyOf(ids)).toMatchObject({
      prompts: [{ text: '', tokens: [464, 3139], target: 7 }],
      positions: 'last',
    })
  })

  it.each<[Partial<Draft>, RegExp]>([
    [{ text: '' }, /Give a text/],
    [{ text: '', as: 'ids' }, /Give the ids/],
    [{ text: '1, x', as: 'ids' }, /whole numbers/],
    [{ target: '1 2' }, /one id/],
    [{ every: 0 }, /from 1 on/],
    [{ every: NaN }, /from 1 on/],
    [{ top: 257 }, /From 1 to 256/],
  ])('says what is wrong: %o', (change, problem) =>
    expect(problemOf({ ...draft, ...change })).toMatch(problem),
  )

  it('becomes a command that a shell takes as it is meant', () => {
    expect(commandOf({ ...draft, text: "it's $HOME" }, '/runs/my run')).toBe(
      "trimtab scope probe '/runs/my run' --prompt 'it'\\''s $HOME' --all --top 5 --every 10 --record",
    )
    expect(commandOf({ ...draft, as: 'ids', text: '1,2' }, 'RUN_DIR')).toContain('--ids 1,2')
  })

  it('takes ids with commas or spaces, and no others', () => {
    expect(idsOf(' 1, 2 3\n4 ')).toEqual([1, 2, 3, 4])
    expect([idsOf('-1'), idsOf('1.5'), idsOf(''), idsOf('3000000000')]).toEqual([null, null, null, null])
  })
})

it('knows probes from the status and from what a recording says', () => {
  const body = { id: 'n-1', prompts: [{ text: 'a', tokens: [], target: null }], every: 5, tokenizer: 'bytes' }
  const notices = [
    { kind: 'agreed', details: { kind: 'probe', body } },
    { kind: 'agreed', details: { kind: 'probe', body: { prompts: 7 } } },
    { kind: 'error', details: null },
  ]
  const found = probesOf({ 'n-2': { ...body, state: 'active' }, 'n-3': { prompts: [null] } }, notices)
  expect([...found.keys()]).toEqual(['n-1', 'n-2', 'n-3'])
  expect(found.get('n-1')).toMatchObject({ state: 'recorded', tokenizer: 'bytes', prompts: [{ text: 'a' }] })
  expect(found.get('n-2')!.state).toBe('active')
})

describe('colours of tokens', () => {
  it.each([
    ['dark', '#e8eef3'],
    ['light', '#15202a'],
  ] as const)('leave text a contrast of 4.5 to 1: %s', (theme, text) => {
    for (let bits = 0; bits <= 12; bits += 0.25)
      expect(contrast(rgbOfHex(tint(bits, theme))!, rgbOfHex(text)!)).toBeGreaterThanOrEqual(4.5)
  })

  it('tell what is expected from what is not', () => {
    const answer = answersOf([chosen(0, 0, [])])[0]!
    expect(bitsOf(answer, 'surprise')).toBeCloseTo(surprise(0.3), 10)
    expect(bitsOf(answer, 'entropy')).toBeCloseTo(0.9 / Math.LN2, 10)
    expect([bitsOf(null, 'surprise'), bitsOf(answer, 'none')]).toEqual([null, null])
    expect(bitsOf({ ...answer, asked: null }, 'surprise')).toBeNull()
    expect(tint(0, 'dark')).not.toBe(tint(3, 'dark'))
    expect(legendOf('surprise')[0]!.label).toBe('100 %')
  })
})

it.each([
  [0.5, '50.0 %'],
  [0.01234, '1.23 %'],
  [1, '100.0 %'],
  [0.999999, '>99.99 %'],
  [0.00000001, '<0.01 %'],
  [0, '0.00 %'],
  [NaN, 'unknown'],
])('writes %s as %s', (share, text) => expect(percent(share)).toBe(text))

it('makes a table of candidates, in which no token is a formula', () => {
  const answers: Answer[] = answersOf([chosen(3, 0, ['=1', '=1', ' b'])])
  const slots = generated({ prompt_tokens: 1, tokens: ['A', '=1'] }, answers)
  const lines = csvOfSlots(slots, (_, text) => text ?? '').split('\r\n')
  expect(lines[1]).toBe("3,1,9,'=1,0.9,0,7,'=1,0.6")
  expect(lines).toHaveLength(4)
})
