/** The WebSocket of the server: connects, comes back when it was lost, and says again what is wanted. */

import { Pieces, type Frame } from './frames'
import { unpack } from './wire'

/** connecting: not yet or again; open; lost: tried again by itself; expired: only a new link helps, and then {@link Live.retry}. */
export type Connection = 'connecting' | 'open' | 'lost' | 'expired'

/** What of the frames is wanted. */
export interface Wish {
  pattern: string
  what?: string | string[]
  ranks?: number[]
  every?: number
}

/** A message in JSON; `type` says which. */
export interface Said {
  type: string
  [field: string]: unknown
}

export interface Listener {
  connection(state: Connection): void
  said(message: Said): void
  frames(frames: Frame[]): void
}

interface Socket {
  binaryType: BinaryType
  onopen: ((event: Event) => void) | null
  onmessage: ((event: MessageEvent) => void) | null
  onclose: ((event: CloseEvent) => void) | null
  send(text: string): void
  close(): void
}

export interface World {
  connect(): Socket
  /** Calls back after so many ms; returns what undoes it. */
  later(call: () => void, milliseconds: number): () => void
}

const EXPIRED = 4401
/** Messages in JSON that are numbered together with frames. */
const NUMBERED = ['notice', 'watch']
const REFUSED = 1008
const LONGEST_WAIT_MS = 10_000
const FIRST_WAIT_MS = 250
/** Heartbeats come every five seconds. */
const SILENCE_MS = 16_000
/** Frames on their way that were not acknowledged: a page that is slow gets fewer frames, not older ones. */
const WINDOW = 256
const ACKNOWLEDGE_MS = 50

export class Live {
  private socket: Socket | null = null
  private readonly wishes = new Map<string, Wish>()
  private names = 0
  private waited = FIRST_WAIT_MS
  private epoch = ''
  private number = 0
  private cancel: (() => void) | null = null
  private acknowledging: (() => void) | null = null
  private ended = false
  private hushed = false
  private pieces = new Pieces()

  constructor(
    private readonly listener: Listener,
    private readonly world: World = browser,
  ) {}

  start(): void {
    this.ended = false
    this.open()
  }

  /** Hang up for good. */
  stop(): void {
    this.ended = true
    this.drop()
  }

  /** Connect at once: the user does not want to wait, or has opened a new link. */
  retry(): void {
    this.waited = FIRST_WAIT_MS
    if (!this.ended) this.open()
  }

  /** The server does not know this session (any more), and would refuse whatever is tried. */
  expire(): void {
    if (this.ended) return
    this.drop()
    this.listener.connection('expired')
  }

  /** Have frames sent; what is returned ends that. */
  want(wish: Wish): () => void {
    const id = `w${++this.names}`
    this.wishes.set(id, wish)
    if (!this.hushed) this.say({ op: 'subscribe', id, ...wish })
    return () => {
      if (this.wishes.delete(id) && !this.hushed) this.say({ op: 'unsubscribe', id })
    }
  }

  /** No frames for a while, or again those that are wanted. */
  hush(hushed: boolean): void {
    if (hushed === this.hushed) return
    this.hushed = hushed
    for (const [id, wish] of this.wishes)
      this.say(hushed ? { op: 'unsubscribe', id } : { op: 'subscribe', id, ...wish })
  }

  private open(): void {
    this.drop()
    this.listener.connection('connecting')
    const socket = this.world.connect()
    this.socket = socket
    socket.binaryType = 'arraybuffer'
    socket.onmessage = (event) => {
      if (socket === this.socket) this.receive(event.data as string | ArrayBuffer)
    }
    socket.onclose = (event) => {
      if (socket === this.socket) this.lost(event)
    }
    this.expectLife()
  }

  private receive(data: string | ArrayBuffer): void {
    this.expectLife()
    try {
      if (typeof data === 'string') this.read(JSON.parse(data) as Said)
      else this.take(data)
    } catch (error) {
      if (!(error instanceof RangeError || error instanceof SyntaxError)) throw error
      this.listener.said({ type: 'error', error: `A message of the server makes no sense: ${error.message}` })
    }
  }

  private take(data: ArrayBuffer): void {
    const { number, frames } = unpack(data)
    this.number = Math.max(this.number, number)
    this.acknowledge()
    const whole = this.pieces.join(frames)
    if (whole.length) this.listener.frames(whole)
  }

  private read(said: Said): void {
    if (said.type === 'hello') this.greeted(said)
    if (typeof said['number'] === 'number' && NUMBERED.includes(said.type))
      this.number = Math.max(this.number, said['number'])
    this.listener.said(said)
  }

  /** Now and then: a connection may say a hundred things a second. */
  private acknowledge(): void {
    this.acknowledging ??= this.world.later(() => {
      this.acknowledging = null
      this.say({ op: 'ack', number: this.number })
    }, ACKNOWLEDGE_MS)
  }

  private greeted(hello: Said): void {
    this.waited = FIRST_WAIT_MS
    this.say({ op: 'window', frames: WINDOW })
    if (!this.hushed) for (const [id, wish] of this.wishes) this.say({ op: 'subscribe', id, ...wish })
    const epoch = String(hello['epoch'])
    if (this.epoch === epoch) this.say({ op: 'resume', epoch, number: this.number })
    else this.number = Number(hello['number'] ?? 0)
    this.epoch = epoch
    this.listener.connection('open')
  }

  private lost(event: { code: number }): void {
    this.drop()
    if (event.code === EXPIRED) {
      this.listener.connection('expired')
      return
    }
    if (event.code === REFUSED) this.waited = LONGEST_WAIT_MS
    this.cancel = this.world.later(() => this.open(), this.waited)
    this.waited = Math.min(this.waited * 2, LONGEST_WAIT_MS)
    this.listener.connection('lost')
  }

  /** A connection over which nothing comes is no connection, whatever the system says. */
  private expectLife(): void {
    this.cancel?.()
    this.cancel = this.world.later(() => this.lost({ code: 0 }), SILENCE_MS)
  }

  /** Nothing of the connection is left, and nothing is waited for. */
  private drop(): void {
    this.cancel?.()
    this.cancel = null
    this.acknowledging?.()
    this.acknowledging = null
    this.pieces = new Pieces()
    const socket = this.socket
    this.socket = null
    if (socket) {
      socket.onclose = null
      socket.close()
    }
  }

  private say(message: object): void {
    try {
      this.socket?.send(JSON.stringify(message))
    } catch {
      // not open yet: all that is wanted is said again when it is
    }
  }
}

const browser: World = {
  connect: () => new WebSocket(`${location.origin.replace(/^http/, 'ws')}/api/v1/live`),
  later: (call, milliseconds) => {
    const timer = setTimeout(call, milliseconds)
    return () => clearTimeout(timer)
  },
}
