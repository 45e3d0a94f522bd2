// @vitest-environment jsdom
import { flushSync, tick } from 'svelte'
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { Api, ApiError } from '../api/client'
import { alike, resource, type Resource } from './resource.svelte'

interface Asked {
  step: number
}

/** A resource of a step, whose answers come when the test says. */
class Bench {
  wanted: Asked | null = $state.raw({ step: 1 })
  readonly asked: {
    step: number
    answer: (value: string) => void
    fail: (error: unknown) => void
    aborted: () => boolean
  }[] = []
  made!: Resource<string, Asked>
  readonly end = $effect.root(() => {
    this.made = resource(
      () => this.wanted,
      ({ step }, signal) =>
        new Promise<string>((answer, fail) => {
          this.asked.push({ step, answer, fail, aborted: () => signal.aborted })
        }),
    )
  })

  constructor() {
    flushSync()
  }

  async want(step: number | null): Promise<void> {
    this.wanted = step === null ? null : { step }
    await tick()
  }

  async settle(call: () => void): Promise<void> {
    call()
    await vi.advanceTimersByTimeAsync(0)
  }

  get steps(): number[] {
    return this.asked.map((one) => one.step)
  }
}

let bench: Bench

beforeEach(() => {
  vi.useFakeTimers()
  bench = new Bench()
})
afterEach(() => {
  bench.end()
  vi.useRealTimers()
})

describe('a resource', () => {
  it('loads what is wanted, and says that it does', async () => {
    expect(bench.made).toMatchObject({ loading: true, value: null })
    await bench.settle(() => bench.asked[0]!.answer('one'))
    expect(bench.made).toMatchObject({ loading: false, value: 'one', of: { step: 1 }, error: null })
  })

  it('asks for one thing at a time, and then for the last that was wanted', async () => {
    for (const step of [2, 3, 4]) await bench.want(step)
    expect(bench.steps).toEqual([1])
    await bench.settle(() => bench.asked[0]!.answer('one'))
    expect(bench.made).toMatchObject({ value: 'one', loading: true })
    await vi.advanceTimersByTimeAsync(60)
    expect(bench.steps).toEqual([1, 4])
    await bench.settle(() => bench.asked[1]!.answer('four'))
    expect(bench.made).toMatchObject({ value: 'four', of: { step: 4 }, loading: false })
  })

  it('leaves a pause between requests', async () => {
    await bench.settle(() => bench.asked[0]!.answer('one'))
    await bench.want(2)
    expect(bench.steps).toEqual([1])
    await vi.advanceTimersByTimeAsync(60)
    expect(bench.steps).toEqual([1, 2])
  })

  it('does not ask again for the same in another object', async () => {
    await bench.settle(() => bench.asked[0]!.answer('one'))
    await bench.want(1)
    await vi.advanceTimersByTimeAsync(1000)
    expect(bench.steps).toEqual([1])
    bench.made.reload()
    expect(bench.steps).toEqual([1, 1])
  })

  it('gives up a slow answer for what has been wanted for a while', async () => {
    await vi.advanceTimersByTimeAsync(1200)
    await bench.want(2)
    await vi.advanceTimersByTimeAsync(300)
    expect(bench.asked[0]!.aborted()).toBe(true)
    expect(bench.steps).toEqual([1, 2])
    await bench.settle(() => bench.asked[0]!.answer('late'))
    expect(bench.made.value).toBeNull()
  })

  it('lets a slow answer come while what is wanted changes all the time', async () => {
    for (let step = 2; step < 20; step++) {
      await vi.advanceTimersByTimeAsync(250)
      await bench.want(step)
    }
    expect(bench.steps).toEqual([1])
    await bench.settle(() => bench.asked[0]!.answer('one'))
    expect(bench.made.value).toBe('one')
  })

  it('holds nothing when nothing is wanted', async () => {
    await bench.want(null)
    expect(bench.asked[0]!.aborted()).toBe(true)
    await bench.settle(() => bench.asked[0]!.answer('one'))
    expect(bench.made).toMatchObject({ value: null, of: null, loading: false, error: null })
  })

  it('keeps what was there when the next cannot be had', async () => {
    await bench.settle(() => bench.asked[0]!.answer('one'))
    await bench.want(2)
    await vi.advanceTimersByTimeAsync(60)
    await bench.settle(() => bench.asked[1]!.fail(new ApiError(404, 'no such tap')))
    expect(bench.made).toMatchObject({
      value: 'one',
      of: { step: 1 },
      error: { status: 404 },
      loading: false,
    })
    await vi.advanceTimersByTimeAsync(10_000)
    expect(bench.steps).toEqual([1, 2])
  })

  it('comes again when the server is too busy, without saying so', async () => {
    await bench.settle(() => bench.asked[0]!.fail(new ApiError(429, 'slow down', 3)))
    expect(bench.made).toMatchObject({ error: null, loading: true })
    await vi.advanceTimersByTimeAsync(2900)
    expect(bench.steps).toEqual([1])
    await vi.advanceTimersByTimeAsync(200)
    expect(bench.steps).toEqual([1, 1])
  })

  it('comes again until the server is back', async () => {
    await bench.settle(() => bench.asked[0]!.fail(new ApiError(0, 'away')))
    expect(bench.made.error?.away).toBe(true)
    await vi.advanceTimersByTimeAsync(2000)
    await bench.settle(() => bench.asked[1]!.answer('one'))
    expect(bench.made).toMatchObject({ value: 'one', error: null })
  })

  it('says what failed in the page itself', async () => {
    await bench.settle(() => bench.asked[0]!.fail(new TypeError('x is undefined')))
    expect(bench.made.error?.message).toContain('x is undefined')
  })

  it('asks for nothing while nobody sees the page, and catches up', async () => {
    await bench.settle(() => bench.asked[0]!.answer('one'))
    const seen = vi.spyOn(document, 'hidden', 'get').mockReturnValue(true)
    await bench.want(2)
    await vi.advanceTimersByTimeAsync(5000)
    expect(bench.steps).toEqual([1])
    seen.mockReturnValue(false)
    document.dispatchEvent(new Event('visibilitychange'))
    expect(bench.steps).toEqual([1, 2])
    seen.mockRestore()
  })

  it('ends with its component', () => {
    bench.end()
    expect(bench.asked[0]!.aborted()).toBe(true)
  })
})

describe('what is alike', () => {
  it.each([
    [{ a: 1, b: ['x', 2] }, { a: 1, b: ['x', 2] }, true],
    [{ a: 1 }, { a: 1, b: undefined }, false],
    [{ a: NaN }, { a: NaN }, true],
    [{ a: [1] }, { a: [2] }, false],
    [{ a: {} }, { a: {} }, false],
    [null, null, true],
    ['a', 'b', false],
  ])('%j and %j: %s', (a, b, same) => expect(alike(a, b)).toBe(same))
})

describe('an answer of which more is coming', () => {
  const answering = (headers: Record<string, string>): Response =>
    new Response(JSON.stringify({ runs: [] }), { headers })

  /** How often it was asked within three seconds. */
  async function asked(answers: Record<string, string>[], change?: () => void): Promise<number> {
    let count = 0
    const api = new Api(() => Promise.resolve(answering(answers[count++] ?? {})))
    let wanted = $state.raw({ step: 1 })
    const end = $effect.root(() => {
      resource(
        () => wanted,
        (_, signal) => api.get('/runs', {}, signal),
      )
    })
    flushSync()
    await vi.advanceTimersByTimeAsync(500)
    if (change) {
      wanted = { step: 2 }
      flushSync()
      await vi.advanceTimersByTimeAsync(100)
      change()
    }
    await vi.advanceTimersByTimeAsync(2500)
    end()
    return count
  }

  it('is asked for again when the server says that there will be', async () => {
    expect(await asked([{ 'Retry-After': '1' }, { 'Retry-After': '1' }])).toBe(3)
    expect(await asked([])).toBe(1)
  })

  it('does not hold up another one', async () => {
    const turned = vi.fn()
    expect(await asked([{ 'Retry-After': '1' }], turned)).toBe(2)
    expect(turned).toHaveBeenCalledOnce()
  })
})
