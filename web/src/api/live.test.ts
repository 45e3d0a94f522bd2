import { beforeEach, describe, expect, it } from 'vitest'
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
  pass(): number {
    const entry = this.waiting.shift() as { call: () => void; ms: number }
    entry.call()
    return entry.ms
  }
}

let world: FakeWorld
let states: Connection[]
let said: Said[]
let live: Live

beforeEach(() => {
  world = new FakeWorld()
  states = []
  said = []
  live = new Live(
    {
      connection: (state) => states.push(state),
      said: (message) => said.push(message),
      frames: () => undefined,
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

  it('stops for good', () => {
    live.stop()
    live.retry()
    expect(world.sockets).toHaveLength(1)
    expect(world.last.closed).toBe(true)
  })
})
