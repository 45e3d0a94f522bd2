/** What the server says of itself, the job and the recordings, kept up to date. */

import type { Answer, Api } from '../api/client'
import { ApiError } from '../api/client'
import type { Frame } from '../api/frames'
import { Live, type Connection, type Said } from '../api/live'

export type Session = Answer<'/session'>
export type Run = Answer<'/runs/{run}'>
export type JobState = 'recordings' | 'waiting' | 'live' | 'ended' | 'away'

/** How the job stands, as the server says it once a second. */
export interface Status {
  state: JobState
  error: string
  step?: number
  world_size?: number
  seconds_per_step?: number | null
  missing?: number[]
  subscriptions?: Record<string, Record<string, unknown>>
  perturbations?: Record<string, Record<string, unknown>>
  probes?: Record<string, Record<string, unknown>>
  ranks?: Record<string, Record<string, unknown>>
  [field: string]: unknown
}

/** What a rank or the collector has to say. */
export interface Notice {
  kind: string
  text: string
  rank: number
  step: number
  unix_ns: number
  details?: unknown
}

const MOST_NOTICES = 500
const RUNS_EVERY_MS = 5000

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
  /** Until a new link is needed, as of the last sign of life. */
  sessionSeconds: number | null = $state(null)
  /** Why nothing can be had from the server; null: something can. */
  error: ApiError | null = $state.raw(null)

  readonly live: Live
  private readonly hearers = new Set<(frames: Frame[]) => void>()
  private readonly sayers = new Set<(message: Said) => void>()
  private timer: ReturnType<typeof setInterval> | undefined

  constructor(readonly api: Api) {
    this.live = new Live({
      connection: (state) => this.connected(state),
      said: (message) => this.hear(message),
      frames: (frames) => this.hearers.forEach((hear) => hear(frames)),
    })
  }

  start(): void {
    this.live.start()
    void this.refresh()
    this.timer = setInterval(() => void this.refreshRuns(), RUNS_EVERY_MS)
  }

  stop(): void {
    clearInterval(this.timer)
    this.live.stop()
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
    await this.asking(async () => (this.session = await this.api.get('/session', {})))
  }

  private async refreshStatus(): Promise<void> {
    await this.asking(async () => (this.status = (await this.api.get('/status', {})) as Status))
  }

  private async refreshRuns(): Promise<void> {
    await this.asking(async () => {
      const { runs } = await this.api.get('/runs', {})
      if (JSON.stringify(runs) !== JSON.stringify(this.runs)) this.runs = runs
      this.listed = true
    })
  }

  private async asking(ask: () => Promise<unknown>): Promise<void> {
    try {
      await ask()
      this.error = null
    } catch (error) {
      this.error = error instanceof ApiError ? error : new ApiError(-1, String(error))
      if (this.error.expired) this.connection = 'expired'
    }
  }

  private connected(state: Connection): void {
    const back = state === 'open' && this.connection !== 'open'
    this.connection = state
    if (back) void this.refresh()
    // A server that was started again does not know this session: the WebSocket cannot tell that from one that is away.
    if (state === 'lost') void this.refreshSession()
  }

  private hear(message: Said): void {
    if (message.type === 'status') this.status = rest(message) as unknown as Status
    else if (message.type === 'notice')
      this.notices = [...this.notices, rest(message) as unknown as Notice].slice(-MOST_NOTICES)
    else if (message.type === 'watch') this.watched = [...this.watched, message].slice(-MOST_NOTICES)
    else if (message.type === 'heartbeat') {
      this.dropped = Number(message['dropped'])
      this.sessionSeconds = Number(message['session_seconds'])
    }
    this.sayers.forEach((hear) => hear(message))
  }
}

function rest(message: Said): Record<string, unknown> {
  const { type: _type, ...fields } = message
  return fields
}
