import { beforeEach, describe, expect, it } from 'vitest'
import { encoded, floats } from './encoded.fixture'
import { numbersOf, type Frame } from './frames'
import { Live, type Connection, type Said } from './live'

class FakeSocket {
  binaryType: BinaryType = 'blob'
  onopen: ((event: Event) => void) | null = null
  onmessage: ((event: MessageEvent) => void) | null = null
  onclose: ((event: CloseEvent) => void) | null = null
  readonly sent: Record<string, unknown>[] = []
  closed = false
  send(text: string): void {
    this.sent.push(JSON.parse(text) as Record<string, unknown>)
  }
  close(): void {
    this.closed = true
  }
  say(message: object): void {
    this.onmessage?.({ data: JSON.stringify(message) } as MessageEvent)
  }
  sendBytes(number: number, frame: Uint8Array): void {
    const message = new Uint8Array(16 + frame.length)
    message.set(new TextEncoder().encode('tsl1'))
    const view = new DataView(message.buffer)
    view.setUint32(4, 1, true)
    view.setBigUint64(8, BigInt(number), true)
    message.set(frame, 16)
    this.onmessage?.({ data: message.buffer } as MessageEvent)
  }
  end(code: number): void {
    this.onclose?.({ code } as CloseEvent)
  }
}

class FakeWorld {
  sockets: FakeSocket[] = []
  waiting: { call: () => void; ms: number }[] = []
  connect(): FakeSocket {
    const made = new FakeSocket()
    this.sockets.push(made)
    return made
  }
  later(call: () => void, ms: number): () => void {
    const entry = { call, ms }
    this.waiting.push(entry)
    return () => {
      this.waiting = this.waiting.filter((one) => one !== entry)
    }
  }
  get last(): FakeSocket {
    return this.sockets.at(-1) as FakeSocket
  }
  passAfter(ms: number): void {
    const entry = this.waiting.find((one) => one.ms === ms)
    this.waiting = this.waiting.filter((one) => one !== entry)
    entry?.call()
  }
  pass(): number {
    const entry = this.waiting.shift() as { call: () => void; ms: number }
    entry.call()
    return entry.ms
  }
}

let world: FakeWorld
let states: Connection[]
let said: Said[]
let heard: Frame[]
let live: Live

beforeEach(() => {
  world = new FakeWorld()
  states = []
  said = []
  heard = []
  live = new Live(
    {
      connection: (state) => states.push(state),
      said: (message) => said.push(message),
      frames: (frames) => heard.push(...frames),
    },
    world,
  )
  live.start()
})

describe('the live connection', () => {
  it('says what is wanted when it is greeted, and again after it was lost', () => {
    live.want({ pattern: 'layers.*' })
    world.last.say({ type: 'hello', epoch: 'a', number: 5 })
    expect(states).toEqual(['connecting', 'open'])
    expect(world.last.sent.at(-1)).toMatchObject({ op: 'subscribe', pattern: 'layers.*' })
    world.last.end(1006)
    expect(states.at(-1)).toBe('lost')
    world.pass()
    world.last.say({ type: 'hello', epoch: 'a', number: 9 })
    expect(world.last.sent.map((one) => one['op'])).toEqual(['window', 'subscribe', 'resume'])
    expect(world.last.sent.at(-1)).toEqual({ op: 'resume', epoch: 'a', number: 5 })
  })

  it('does not resume what another server said', () => {
    world.last.say({ type: 'hello', epoch: 'a', number: 5 })
    world.last.end(1006)
    world.pass()
    world.last.say({ type: 'hello', epoch: 'b', number: 1 })
    expect(world.last.sent.map((one) => one['op'])).toEqual(['window'])
  })

  it('waits longer each time, up to a limit', () => {
    const waits = Array.from({ length: 8 }, () => {
      world.last.end(1006)
      return world.pass()
    })
    expect(waits.slice(0, 3)).toEqual([250, 500, 1000])
    expect(waits.at(-1)).toBe(10_000)
  })

  it('ends when the session is over', () => {
    world.last.end(4401)
    expect(states.at(-1)).toBe('expired')
    expect(world.waiting).toEqual([])
  })

  it('takes silence for a loss', () => {
    world.last.say({ type: 'hello', epoch: 'a', number: 0 })
    world.pass()
    expect(states.at(-1)).toBe('lost')
    expect(world.sockets[0]?.closed).toBe(true)
  })

  it('forgets what is wanted no more', () => {
    const end = live.want({ pattern: 'logits' })
    world.last.say({ type: 'hello', epoch: 'a', number: 0 })
    end()
    expect(world.last.sent.at(-1)).toEqual({ op: 'unsubscribe', id: 'w1' })
    world.last.end(1006)
    world.pass()
    world.last.say({ type: 'hello', epoch: 'b', number: 0 })
    expect(world.last.sent.map((one) => one['op'])).toEqual(['window'])
  })

  it('tries nothing more when the session is not known, until a new link was opened', () => {
    world.last.end(1006)
    live.expire()
    expect(states.at(-1)).toBe('expired')
    expect(world.waiting).toEqual([])
    live.retry()
    world.last.say({ type: 'hello', epoch: 'b', number: 0 })
    expect(states.slice(-2)).toEqual(['connecting', 'open'])
  })

  it('has no frames sent to a page that nobody sees, also over a new connection', () => {
    live.want({ pattern: 'logits' })
    world.last.say({ type: 'hello', epoch: 'a', number: 0 })
    live.hush(true)
    expect(world.last.sent.at(-1)).toEqual({ op: 'unsubscribe', id: 'w1' })
    const end = live.want({ pattern: 'loss' })
    world.last.end(1006)
    world.pass()
    world.last.say({ type: 'hello', epoch: 'a', number: 0 })
    expect(world.last.sent.map((one) => one['op'])).toEqual(['window', 'resume'])
    end()
    live.hush(false)
    expect(world.last.sent.slice(2)).toEqual([{ op: 'subscribe', id: 'w1', pattern: 'logits' }])
  })

  it('puts pieces of a frame together that come in several messages', () => {
    world.last.say({ type: 'hello', epoch: 'a', number: 0 })
    const piece = (index: number, values: number[]) => {
      const meta = { part: [index, 2], shapes: { x: [3] } }
      return encoded({ meta, arrays: [['x', 'float32', [values.length]]] }, floats(...values))
    }
    world.last.sendBytes(7, piece(0, [1, 2]))
    expect(heard).toEqual([])
    world.last.sendBytes(8, piece(1, [3]))
    expect(heard.map((frame) => Array.from(numbersOf(frame, 'x')))).toEqual([[1, 2, 3]])
    world.passAfter(50)
    expect(world.last.sent.at(-1)).toEqual({ op: 'ack', number: 8 })
  })

  it('says that a message makes no sense, and goes on', () => {
    world.last.onmessage?.({ data: '{"type"' } as MessageEvent)
    world.last.onmessage?.({ data: new ArrayBuffer(3) } as MessageEvent)
    world.last.onmessage?.({ data: new ArrayBuffer(64) } as MessageEvent)
    expect(said.map((one) => one.type)).toEqual(['error', 'error', 'error'])
    world.last.say({ type: 'hello', epoch: 'a', number: 0 })
    expect(states.at(-1)).toBe('open')
  })

  it('stops for good', () => {
    live.stop()
    live.retry()
    expect(world.sockets).toHaveLength(1)
    expect(world.last.closed).toBe(true)
  })
})
