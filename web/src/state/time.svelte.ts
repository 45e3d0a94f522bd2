/** Which run is looked at, and which step of it: the newest (the live edge), or one that was chosen or is played. */

import type { Address } from './address.svelte'
import type { Run, Server } from './server.svelte'

export const SPEEDS = [1, 2, 5, 10, 25, 50, 100] as const
/** Steps a second at which a recording is played unless chosen otherwise. */
const USUAL_SPEED = 10
const TICK_MS = 100
/** The live edge moves so often at most, however fast the job is. */
const EDGE_MS = 250

export class Time {
  playing: boolean = $state(false)
  speed: number = $state(USUAL_SPEED)
  /** The newest step that frames were seen of; the recording may be half a second behind. */
  private heard: number = $state(-1)
  private before = -1
  private edge: ReturnType<typeof setTimeout> | undefined
  private timer: ReturnType<typeof setInterval> | undefined
  private carried = 0

  constructor(
    private readonly address: Address,
    private readonly server: Server,
  ) {
    server.onFrames((frames) => this.hear(Math.max(...frames.map((frame) => frame.step))))
  }

  /** Name of the run that is shown; empty: there is none. */
  run: string = $derived.by(() => this.address.text('run') || this.usual())

  /** What is known of it; null: nothing yet, or there is no such run. */
  about: Run | null = $derived.by(() => {
    const wanted = this.run
    return this.server.runs.find((run) => run.name === wanted || (wanted === 'live' && run.live)) ?? null
  })

  /** It is still being recorded. */
  isLive: boolean = $derived.by(() => (this.about?.live ?? false) && this.server.status?.state === 'live')

  first: number | null = $derived.by(() => this.about?.first_step ?? null)
  last: number | null = $derived.by(() => {
    const recorded = this.about?.last_step ?? null
    if (!this.about?.live || this.heard < 0) return recorded
    return recorded === null ? this.heard : Math.max(recorded, this.heard)
  })

  /** The step that is to be shown; null: nothing was recorded. */
  step: number | null = $derived.by(() => {
    const chosen = this.address.whole('step')
    if (this.first === null || this.last === null) return chosen
    return chosen === null ? this.last : Math.min(Math.max(chosen, this.first), this.last)
  })

  /** The newest step is shown, whatever it is. */
  atEdge: boolean = $derived.by(() => this.address.whole('step') === null)

  /** Show another run. */
  choose(run: string): void {
    this.pause()
    this.address.set({ run, step: null, first: null, last: null }, { push: true })
  }

  seek(step: number): void {
    if (this.first === null || this.last === null) return
    const inside = Math.round(Math.min(Math.max(step, this.first), this.last))
    this.address.set({ step: inside })
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

  /** Stay, or go on from here; at the end of a recording, from its begin. */
  toggle(): void {
    if (this.playing) this.pause()
    else if (this.atEdge && this.isLive && this.step !== null) this.seek(this.step)
    else this.play()
  }

  play(): void {
    if (this.first === null || this.last === null) return
    if (this.step === null || this.step >= this.last) this.seek(this.first)
    this.carried = 0
    this.playing = true
    clearInterval(this.timer)
    this.timer = setInterval(() => this.turn(), TICK_MS)
  }

  /** The job has said something of this step. */
  private hear(step: number): void {
    this.before = Math.max(this.before, step)
    this.edge ??= setTimeout(() => {
      this.edge = undefined
      this.heard = this.before
    }, EDGE_MS)
  }

  private turn(): void {
    this.carried += (this.speed * TICK_MS) / 1000
    const steps = Math.floor(this.carried)
    if (!steps || this.step === null || this.last === null) return
    this.carried -= steps
    if (this.step + steps < this.last) this.by(steps)
    else if (this.isLive) this.toEdge()
    else {
      this.seek(this.last)
      this.pause()
    }
  }

  /** The run of the job if there is one, else the newest that can be read. */
  private usual(): string {
    const { runs } = this.server
    const live = runs.find((run) => run.live)
    const readable = runs.filter((run) => !run.error && run.last_step !== null)
    const newest = readable.toSorted((a, b) => b.unix_ns - a.unix_ns)[0]
    return (live ?? newest ?? runs[0])?.name ?? ''
  }
}
