/** Something that is loaded anew whenever what it depends on changes. What was there stays until the new is there. */

import { untrack } from 'svelte'
import { ApiError, moreIn } from '../api/client'
import { hidden, onVisibility } from './visible'

export class Resource<T, I> {
  value: T | null = $state.raw(null)
  /** What `value` was loaded for: it may be older than what is wanted now. */
  of: I | null = $state.raw(null)
  error: ApiError | null = $state.raw(null)
  /** Something is on its way. */
  loading: boolean = $state(false)

  constructor(
    /** Loads again. */
    readonly reload: () => void,
  ) {}
}

/** Asked once more after a request that could not reach the server. */
const AGAIN_MS = 2000
/** A request on its way that is older than this is given up for another one ... */
const PATIENCE_MS = 1000
/** ... if that has been wanted for so long: while one follows the live edge, slow requests still come to their end. */
const SETTLED_MS = 300

/**
 * `inputs` is reactive; null: there is nothing to load (yet), and what was there goes. `load` is called when `inputs` has
 * changed in any of its fields, one request at a time and with `pause` ms in between, so that following the live edge or
 * scrubbing asks for no more than can be shown; not in a page that nobody sees. To be called while a component is set up.
 */
export function resource<T, I>(
  inputs: () => I | null,
  load: (inputs: I, signal: AbortSignal) => Promise<T>,
  { pause = 60 } = {},
): Resource<T, I> {
  const loader = new Loader(load, pause)
  $effect(() => {
    const wanted = inputs()
    untrack(() => loader.want(wanted))
  })
  $effect(() => () => loader.end())
  return loader.made
}

class Loader<T, I> {
  readonly made = new Resource<T, I>(() => this.begin())
  private wanted: I | null = null
  private flying: { of: I; controller: AbortController; began: number } | null = null
  private rested = -Infinity
  private timer: ReturnType<typeof setTimeout> | undefined
  private readonly unlisten = onVisibility((gone) => this.seen(gone))

  constructor(
    private readonly load: (inputs: I, signal: AbortSignal) => Promise<T>,
    private readonly pause: number,
  ) {}

  /** Something else is wanted now, or the same as before. */
  want(inputs: I | null): void {
    if (inputs !== null && this.wanted !== null && alike(inputs, this.wanted)) return
    this.wanted = inputs
    if (inputs === null) this.clear()
    else if (this.flying) this.lose(Math.max(this.flying.began + PATIENCE_MS - performance.now(), SETTLED_MS))
    else this.later(this.rested + this.pause - performance.now())
  }

  end(): void {
    this.wanted = null
    this.unlisten()
    this.abort()
  }

  private clear(): void {
    this.abort()
    this.made.loading = false
    this.made.value = this.made.of = this.made.error = null
  }

  private abort(): void {
    clearTimeout(this.timer)
    this.flying?.controller.abort()
    this.flying = null
  }

  /** Give up what is on its way, unless it comes first or something else is wanted by then. */
  private lose(milliseconds: number): void {
    clearTimeout(this.timer)
    this.timer = setTimeout(() => this.begin(), milliseconds)
  }

  private later(milliseconds: number): void {
    clearTimeout(this.timer)
    clearTimeout(this.timer)
    this.made.loading = true
    if (milliseconds <= 0) this.begin()
    else this.timer = setTimeout(() => this.begin(), milliseconds)
  }

  private lookAgain(seconds: number | null): void {
    if (seconds !== null) this.timer = setTimeout(() => this.begin(), seconds * 1000)
  }

  private begin(): void {
    this.abort()
    if (this.wanted === null || hidden()) return
    const asked = this.wanted
    const mine = (this.flying = { of: asked, controller: new AbortController(), began: performance.now() })
    this.made.loading = true
    const settled = (done: () => number | null): void => {
      if (mine !== this.flying) return
      clearTimeout(this.timer)
      this.flying = null
      this.rested = performance.now()
      this.made.loading = false
      const again = done()
      if (!alike(this.wanted, asked)) this.later(Math.max(again ?? 0, this.pause))
      else if (again !== null) this.later(again)
      // A step was still coming in: nothing that is asked for here changes when all of it has come.
      else if (this.made.error === null) this.lookAgain(moreIn(mine.controller.signal))
    }
    started(() => this.load(asked, mine.controller.signal)).then(
      (value) => settled(() => this.loaded(value, asked)),
      (error: unknown) => settled(() => this.failed(error)),
    )
  }

  private loaded(value: T, of: I): null {
    this.made.value = value
    this.made.of = of
    this.made.error = null
    return null
  }

  /** After how many ms to ask again; null: no. */
  private failed(error: unknown): number | null {
    const known = error instanceof ApiError ? error : new ApiError(-1, `This page failed: ${String(error)}`)
    // Too fast: it comes a little later, and is no news.
    if (known.retryAfter !== null) return known.retryAfter * 1000
    this.made.error = known
    return known.away ? AGAIN_MS : null
  }

  private seen(gone: boolean): void {
    const missed = this.wanted !== null && (this.made.of === null || !alike(this.wanted, this.made.of))
    if (!gone && !this.flying && (missed || this.made.error?.away)) this.begin()
  }
}

/** Also what `load` throws before it has made a promise is a failure of it. */
async function started<T>(load: () => Promise<T>): Promise<T> {
  return await load()
}

/** The same, or objects or lists whose members are: new objects are made all the time, and mean nothing new. */
export function alike(a: unknown, b: unknown): boolean {
  if (Object.is(a, b)) return true
  if (typeof a !== 'object' || typeof b !== 'object' || a === null || b === null) return false
  if (Array.isArray(a) !== Array.isArray(b)) return false
  const keys = Object.keys(a)
  if (keys.length !== Object.keys(b).length) return false
  return keys.every((key) => {
    const [x, y] = [(a as Record<string, unknown>)[key], (b as Record<string, unknown>)[key]]
    return Object.is(x, y) || (Array.isArray(x) && Array.isArray(y) && alike(x, y))
  })
}
