/** Something that is loaded anew whenever what it depends on changes. What was there stays until the new is there. */

import { onDestroy, untrack } from 'svelte'
import { ApiError } from '../api/client'

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
const AGAIN_MS = 1000
/** A request on its way that is older than this is given up for a newer one. */
const PATIENCE_MS = 1500

/**
 * `inputs` is reactive; null: there is nothing to load (yet), and what was there goes. `load` may be called as often as
 * `inputs` changes, one request at a time and with `pause` ms in between, so that following the live edge or scrubbing
 * asks for no more than can be shown. To be called while a component is set up.
 */
export function resource<T, I>(
  inputs: () => I | null,
  load: (inputs: I, signal: AbortSignal) => Promise<T>,
  { pause = 60 } = {},
): Resource<T, I> {
  let wanted: I | null = null
  let current: { controller: AbortController; began: number } | null = null
  let again = false
  let timer: ReturnType<typeof setTimeout> | undefined

  const begin = (): void => {
    clearTimeout(timer)
    if (current && performance.now() - current.began < PATIENCE_MS) {
      again = true
      return
    }
    current?.controller.abort()
    current = null
    again = false
    made.loading = wanted !== null
    if (wanted === null) {
      made.value = made.of = made.error = null
      return
    }
    const asked = wanted
    const controller = new AbortController()
    const mine = (current = { controller, began: performance.now() })
    load(asked, controller.signal).then(
      (value) =>
        mine === current && settled(() => ((made.value = value), (made.of = asked), (made.error = null))),
      (error: unknown) => mine === current && settled(() => failed(error)),
    )
  }
  const settled = (done: () => void): void => {
    current = null
    made.loading = false
    done()
    if (again) timer = setTimeout(begin, pause)
  }
  const failed = (error: unknown): void => {
    const known = error instanceof ApiError ? error : new ApiError(-1, `This page failed: ${String(error)}`)
    made.error = known
    if (known.away) timer = setTimeout(begin, AGAIN_MS)
    if (known.retryAfter !== null) timer = setTimeout(begin, known.retryAfter * 1000)
  }

  const made = new Resource<T, I>(begin)
  $effect(() => {
    wanted = inputs()
    untrack(begin)
  })
  onDestroy(() => {
    clearTimeout(timer)
    current?.controller.abort()
    current = null
  })
  return made
}
