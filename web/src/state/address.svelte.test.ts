// @vitest-environment jsdom
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { Address, type Bar } from './address.svelte'

/** A window's bar, with the entries of its history. */
class FakeBar implements Bar {
  readonly entries: string[]
  at = 0
  writes = 0
  private readonly listeners: Record<string, () => void> = {}

  constructor(search: string) {
    this.entries = [search]
  }
  get location() {
    return { pathname: '/', search: this.entries[this.at] ?? '' }
  }
  readonly history = {
    pushState: (_: unknown, __: string, url?: string | URL | null) => {
      this.writes++
      this.entries.splice(++this.at, Infinity, String(url).slice(1))
    },
    replaceState: (_: unknown, __: string, url?: string | URL | null) => {
      this.writes++
      this.entries[this.at] = String(url).slice(1)
    },
  }
  addEventListener(name: string, listener: () => void): void {
    this.listeners[name] = listener
  }
  fire(name: string): void {
    this.listeners[name]?.()
  }
  back(): void {
    this.at--
    this.fire('popstate')
  }
}

let bar: FakeBar
const opened = (search: string) => new Address((bar = new FakeBar(search)))

beforeEach(() => void vi.useFakeTimers())
afterEach(() => void vi.useRealTimers())

describe('what the address says', () => {
  it('is read, with a fallback for what makes no sense', () => {
    const address = opened('?step=12&scale=log&rank=-3&layer=1.5&head=1e999&mb=&on=1&rows=1,2,x,-4,5')
    expect(address.whole('step')).toBe(12)
    expect(address.word('scale', ['linear', 'log'], 'linear')).toBe('log')
    expect(address.word('scale', ['linear', 'sqrt'], 'linear')).toBe('linear')
    expect([address.whole('rank'), address.whole('layer'), address.whole('head')]).toEqual([null, null, null])
    expect([address.number('layer'), address.number('mb'), address.number('none')]).toEqual([1.5, null, null])
    expect(address.wholes('rows')).toEqual([1, 2, 5])
    expect([address.flag('on'), address.flag('off'), address.text('off', 'x')]).toEqual([true, false, 'x'])
  })

  it('may be hostile, and stays text', () => {
    const address = opened('?__proto__=1&constructor=2&tap=%3Cimg%20src=x%3E&step=%00&run=%E0%A4%A')
    expect(address.text('tap')).toBe('<img src=x>')
    expect(address.whole('step')).toBeNull()
    expect(address.text('toString', 'nothing')).toBe('nothing')
    expect(({} as Record<string, unknown>)['1']).toBeUndefined()
    expect(address.link({ tap: '"><&?#' })).toContain('tap=%22%3E%3C%26%3F%23')
  })
})

describe('a change', () => {
  it('is there at once, and in the bar within a moment, however many there are', () => {
    const address = opened('?view=ranks&step=1')
    for (let step = 2; step <= 200; step++) {
      address.set({ step })
      vi.advanceTimersByTime(10)
    }
    expect(address.whole('step')).toBe(200)
    expect(bar.writes).toBeLessThan(8)
    vi.advanceTimersByTime(400)
    expect(bar.entries).toEqual(['?view=ranks&step=200'])
  })

  it('that is pushed can be gone back from, to what was shown last', () => {
    const address = opened('?view=ranks')
    address.set({ step: 5 })
    address.set({ step: 6 })
    address.set({ view: 'layers' }, { push: true })
    expect(bar.entries).toEqual(['?view=ranks&step=6', '?view=layers&step=6'])
    address.set({ step: 7 })
    bar.back()
    expect(address.link({})).toBe('?view=ranks&step=6')
    vi.advanceTimersByTime(1000)
    expect(bar.entries[0]).toBe('?view=ranks&step=6')
  })

  it('to the same is none', () => {
    const address = opened('?step=1')
    address.set({ step: 1, tap: null }, { push: true })
    expect(bar.writes).toBe(0)
  })

  it('takes away what is null or empty', () => {
    const address = opened('?step=1&tap=a&run=b')
    address.set({ step: null, tap: '', run: undefined }, { push: true })
    expect(address.link({})).toBe('?')
  })

  it('is not lost when the page is left', () => {
    const address = opened('?step=1')
    address.set({ step: 2 })
    bar.fire('pagehide')
    expect(bar.entries).toEqual(['?step=2'])
  })
})
