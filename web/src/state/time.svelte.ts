/** Which run is looked at, and which step of it: the newest (the live edge), or one that was chosen or is played. */

import type { Address } from './address.svelte'
import type { Run, Server } from './server.svelte'
import { hidden } from './visible'

export const SPEEDS = [1, 2, 5, 10, 25, 50, 100, 250] as const
/** Steps a second at which a recording is played unless chosen otherwise. */
const USUAL_SPEED = 10
const TICK_MS = 100
/** A page that was asleep goes on where it was. */
const LONGEST_TURN_MS = 1000
/** The live edge moves so often at most, however fast the job is. */
const EDGE_MS = 250

export class Time {
  playing: boolean = $state(false)
  speed: number = $state(USUAL_SPEED)
  /** The newest step that frames were seen of, and in which recording; that may be half a second behind. */
  private heard: { run: string; step: number } = $state.raw({ run: '', step: -1 })
  private before = -1
  private edge: ReturnType<typeof setTimeout> | undefined
  private timer: ReturnType<typeof setInterval> | undefined
  private turned = 0
  private carried = 0

  constructor(
    private readonly address: Address,
    private readonly server: Server,
  ) {
    server.onFrames((frames) => frames.forEach((frame) => this.hear(frame.step)))
  }

  /** Name of the run that is shown; empty: there is none. */
  run: string = $derived.by(() => this.address.text('run') || this.usual())

  /** What is known of it; null: nothing yet, or there is no such run. */
  about: Run | null = $derived.by(() => {
    const wanted = this.run
    return this.server.runs.find((run) => run.name === wanted || (wanted === 'live' && run.live)) ?? null
  })

  /** It is still being recorded, as far as is heard. */
  isLive: boolean = $derived.by(() => {
    const { connection, status } = this.server
    if (connection === 'lost' || connection === 'expired') return false
    return (this.about?.live ?? false) && status?.state === 'live'
  })

  /** Of the recording as it is now: of a long one the oldest steps may go. */
  first: number | null = $derived.by(() => this.about?.first_step ?? null)
  last: number | null = $derived.by(() => {
    const recorded = this.about?.last_step ?? null
    if (!this.about?.live || this.heard.run !== this.about.name) return recorded
    return recorded === null ? null : Math.max(recorded, this.heard.step)
  })

  /** The step that is to be shown; null: nothing was recorded. */
  step: number | null = $derived.by(() => {
    const chosen = this.address.whole('step')
    if (this.first === null || this.last === null) return this.about ? null : chosen
    return chosen === null ? this.last : Math.min(Math.max(chosen, this.first), this.last)
  })

  /** The newest step is shown, whatever it is. */
  atEdge: boolean = $derived.by(() => this.address.whole('step') === null)

  /** Steps from the one that is shown to the newest. */
  behind: number = $derived.by(() => (this.step === null || this.last === null ? 0 : this.last - this.step))

  /** Show another run. */
  choose(run: string): void {
    this.pause()
    this.address.set({ run, step: null, first: null, last: null }, { push: true })
  }

  /** Show this step. The address then names the run, too: another one may begin meanwhile. */
  seek(step: number): void {
    if (this.first === null || this.last === null || Number.isNaN(step)) return
    const inside = Math.round(Math.min(Math.max(step, this.first), this.last))
    this.address.set({ run: this.about?.name, step: inside })
  }

  /** So many steps on, or back. */
  by(steps: number): void {
    if (this.step !== null) this.seek(this.step + steps)
  }

  /** Follow the newest step. */
  toEdge(): void {
    this.pause()
    this.address.set({ step: null })
  }

  /** Stay at the step that is shown, while the job goes on. */
  pause(): void {
    clearInterval(this.timer)
    this.playing = false
  }

  /** It moves by itself: it is played, or follows a job that trains. */
  moving: boolean = $derived.by(() => this.playing || (this.atEdge && this.isLive))

  /** Stay, or go on from here; at the end of a recording, from its begin. */
  toggle(): void {
    if (this.playing) this.pause()
    else if (this.moving && this.step !== null) this.seek(this.step)
    else this.play()
  }

  play(): void {
    if (this.first === null || this.last === null || this.first === this.last) return
    if (this.step === null || this.step >= this.last) {
      if (this.isLive) {
        this.toEdge()
        return
      }
      this.seek(this.first)
    }
    this.carried = 0
    this.turned = performance.now()
    this.playing = true
    clearInterval(this.timer)
    this.timer = setInterval(() => this.turn(), TICK_MS)
  }

  /** The job has said something of this step. */
  private hear(step: number): void {
    this.before = Math.max(this.before, step)
    this.edge ??= setTimeout(() => {
      this.edge = undefined
      const run = this.server.runs.find((one) => one.live)?.name ?? ''
      // Another recording has other steps.
      const known = this.heard.run === run ? this.heard.step : -1
      this.heard = { run, step: Math.max(known, this.before) }
      this.before = -1
    }, EDGE_MS)
  }

  private turn(): void {
    const now = performance.now()
    const passed = Math.min(now - this.turned, LONGEST_TURN_MS)
    this.turned = now
    if (hidden()) return
    this.carried += (this.speed * passed) / 1000
    const steps = Math.floor(this.carried)
    if (this.step === null || this.last === null) this.pause()
    else if (steps) this.go(this.step + steps, this.last)
  }

  private go(step: number, last: number): void {
    this.carried -= Math.floor(this.carried)
    if (step < last) this.seek(step)
    else if (this.isLive) this.toEdge()
    else {
      this.seek(last)
      this.pause()
    }
  }

  /** The run of the job if there is one, else the newest that can be read. */
  private usual(): string {
    const { runs } = this.server
    const training = this.server.status?.state === 'live'
    const live = runs.find((run) => run.live && (training || !run.error))
    const readable = runs.filter((run) => !run.error && run.last_step !== null)
    const newest = readable.toSorted((a, b) => b.unix_ns - a.unix_ns)[0]
    return (live ?? newest ?? runs[0])?.name ?? ''
  }
}
