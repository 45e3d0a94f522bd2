/** What the server says of itself, the job and the recordings, kept up to date. */

import type { Answer, Api } from '../api/client'
import { ApiError } from '../api/client'
import type { Frame } from '../api/frames'
import { Live, type Connection, type Said, type World } from '../api/live'
import { hidden, onVisibility } from './visible'

export type Session = Answer<'/session'>
export type Run = Answer<'/runs/{run}'>
export type JobState = 'recordings' | 'waiting' | 'live' | 'ended' | 'away'

/** The last sign of life of a rank. */
export interface Beat {
  step: number
  microbatch: number
  seconds_per_step: number
  /** Share of the training time that goes into what it is asked to send. */
  overhead: number
  /** Frames that it could not send in time. */
  dropped: number
  /** State of each subscription: `active`, or why it is not. */
  subscriptions: Record<string, string>
  coordinates: Record<string, number>
  [field: string]: unknown
}

/** How the job stands, as the server says it once a second. */
export interface Status {
  state: JobState
  error: string
  step?: number
  world_size?: number
  seconds_per_step?: number | null
  missing?: number[]
  /** Of more than 64 ranks up to ten seconds old. */
  ranks?: Record<string, Beat>
  subscriptions?: Record<string, Record<string, unknown>>
  perturbations?: Record<string, Record<string, unknown>>
  probes?: Record<string, Record<string, unknown>>
  [field: string]: unknown
}

/** What a rank or the collector has to say. */
export interface Notice {
  kind: string
  text: string
  rank: number
  step: number
  unix_ns: number
  /** What it is about, by id; empty: no such thing. */
  subscription?: string
  perturbation?: string
  details?: unknown
}

const MOST_NOTICES = 500
const RUNS_EVERY_MS = 5000
/** What the ranks of a large job say comes on request only. */
const RANKS_EVERY_MS = 10_000

export class Server {
  session: Session | null = $state.raw(null)
  status: Status | null = $state.raw(null)
  runs: readonly Run[] = $state.raw([])
  /** Were the runs ever listed? */
  listed: boolean = $state(false)
  notices: readonly Notice[] = $state.raw([])
  /** The last events of watch, as it says them. */
  watched: readonly Said[] = $state.raw([])
  connection: Connection = $state('connecting')
  /** Frames that this page did not get because it, or the connection, was too slow. */
  dropped: number = $state(0)
  /** How often the connection was away for so long that not all was said again. The recording has it. */
  gaps: number = $state(0)
  /** Until a new link is needed, as of the last sign of life. */
  sessionSeconds: number | null = $state(null)
  /** Why nothing can be had from the server; null: something can. */
  error: ApiError | null = $state.raw(null)

  readonly live: Live
  private readonly hearers = new Set<(frames: Frame[]) => void>()
  private readonly sayers = new Set<(message: Said) => void>()
  private ends: (() => void)[] = []
  private droppedBefore = 0
  private ranksAsked = -Infinity
  private looking = false
  private away = false

  constructor(
    readonly api: Api,
    world?: World,
  ) {
    this.live = new Live(
      {
        connection: (state) => this.connected(state),
        said: (message) => this.hear(message),
        frames: (frames) => this.hearers.forEach((hear) => hear(frames)),
      },
      world,
    )
  }

  start(): void {
    this.live.start()
    void this.refresh()
    const timer = setInterval(() => this.look(), RUNS_EVERY_MS)
    const unlisten = onVisibility((gone) => this.seen(gone))
    this.ends = [() => clearInterval(timer), unlisten, () => this.live.stop()]
  }

  stop(): void {
    this.ends.forEach((end) => end())
    this.ends = []
  }

  /** May this page disturb the job now? */
  get mayDisturb(): boolean {
    return this.session?.control ?? false
  }

  /** `hear` gets the frames that come; what is returned ends that. Which come, `live.want` says. */
  onFrames(hear: (frames: Frame[]) => void): () => void {
    this.hearers.add(hear)
    return () => this.hearers.delete(hear)
  }

  /** `hear` gets every message in JSON; what is returned ends that. */
  onSaid(hear: (message: Said) => void): () => void {
    this.sayers.add(hear)
    return () => this.sayers.delete(hear)
  }

  /** Ask for everything again. */
  async refresh(): Promise<void> {
    await Promise.all([this.refreshSession(), this.refreshStatus(), this.refreshRuns()])
  }

  async refreshSession(): Promise<void> {
    await this.asking(async () => {
      this.session = await this.api.get('/session', {})
      this.sessionSeconds = this.session.session_seconds
    })
  }

  private async refreshStatus(): Promise<void> {
    this.ranksAsked = performance.now()
    await this.asking(async () => (this.status = (await this.api.get('/status', {})) as Status))
  }

  private async refreshRuns(): Promise<void> {
    await this.asking(async () => {
      const { runs } = await this.api.get('/runs', {})
      if (JSON.stringify(runs) !== JSON.stringify(this.runs)) this.runs = runs
      this.listed = true
    })
  }

  /** The run of the job alone: it grows. */
  private async refreshLive(): Promise<void> {
    const known = this.runs.find((run) => run.live)
    if (this.looking || known === undefined) return
    this.looking = true
    await this.asking(async () => {
      const now = await this.api.get('/runs/{run}', { run: known.name })
      this.runs = this.runs.map((run) => (run.name === now.name ? now : run))
    })
    this.looking = false
  }

  private async asking(ask: () => Promise<unknown>): Promise<void> {
    try {
      await ask()
      this.error = null
    } catch (error) {
      this.error = error instanceof ApiError ? error : new ApiError(-1, String(error))
      if (this.error.expired) this.live.expire()
    }
  }

  private connected(state: Connection): void {
    this.connection = state
    if (state === 'open' && this.away) {
      this.away = false
      this.droppedBefore = this.dropped // it is counted anew for each connection
      void this.refresh()
    }
    this.away ||= state === 'lost' || state === 'expired'
    // A server that was started again does not know this session: the WebSocket cannot tell that from one that is away.
    if (state === 'lost') void this.refreshSession()
  }

  /** A page that nobody sees asks for nothing; one that is seen again catches up. */
  private seen(gone: boolean): void {
    this.live.hush(gone)
    if (gone) return
    if (this.away)
      this.live.retry() // a new link may have been opened in another tab
    else void this.refresh()
  }

  private look(): void {
    if (!hidden() && this.connection !== 'expired') void this.refreshRuns()
  }

  private hear(message: Said): void {
    if (message.type === 'status') this.stand(rest(message))
    else if (message.type === 'notice') this.note(rest(message) as unknown as Notice)
    else if (message.type === 'watch') this.watched = [...this.watched, message].slice(-MOST_NOTICES)
    else if (message.type === 'heartbeat') {
      this.dropped = this.droppedBefore + Number(message['dropped'])
      this.sessionSeconds = Number(message['session_seconds'])
    } else if (message.type === 'resumed' && message['complete'] === false) this.gaps += 1
    this.sayers.forEach((hear) => hear(message))
  }

  private note(notice: Notice): void {
    this.notices = [...this.notices, notice].slice(-MOST_NOTICES)
    if (notice.kind === 'recording') this.look()
  }

  private stand(said: Record<string, unknown>): void {
    const before = this.status
    const now = said as unknown as Status
    const leftOut = said['ranks_left_out'] === true
    this.status = leftOut ? { ...now, ranks: before?.ranks } : now
    if (hidden()) return
    if (leftOut && performance.now() - this.ranksAsked > RANKS_EVERY_MS) void this.refreshStatus()
    if (now.step !== before?.step || now.state !== before?.state) void this.refreshLive()
  }
}

function rest(message: Said): Record<string, unknown> {
  const { type: _type, ...fields } = message
  return fields
}
