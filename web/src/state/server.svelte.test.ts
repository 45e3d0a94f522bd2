// @vitest-environment jsdom
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { Api } from '../api/client'
import { Server } from './server.svelte'

class FakeSocket {
  binaryType: BinaryType = 'blob'
  onopen = null
  onmessage: ((event: MessageEvent) => void) | null = null
  onclose: ((event: CloseEvent) => void) | null = null
  send(): void {
    // what it is told is tested with the live connection
  }
  close(): void {
    // nobody minds
  }
}

const job = { name: 'job', live: true, error: '', first_step: 0, last_step: 5, label: '', unix_ns: 1 }

/** A server: what it answers, what it was asked, and the sockets to it. */
class FakeWorld {
  sockets: FakeSocket[] = []
  asked: string[] = []
  answers: Record<string, unknown> = {
    '/session': { control: false, session_seconds: 3600 },
    '/status': { state: 'live', error: '', step: 5, ranks: { '0': { overhead: 0.01 } } },
    '/runs': { runs: [job] },
    '/runs/job': { ...job, last_step: 9 },
  }
  refused: number | null = null
  readonly api = new Api((address) => {
    const path = String(address).replace('/api/v1', '')
    this.asked.push(path)
    if (this.refused === 0) return Promise.reject(new TypeError('failed'))
    const body = JSON.stringify(this.refused ? { error: 'refused' } : this.answers[path])
    return Promise.resolve(new Response(body, { status: this.refused ?? 200 }))
  })
  connect(): FakeSocket {
    const made = new FakeSocket()
    this.sockets.push(made)
    return made
  }
  later(call: () => void, milliseconds: number): () => void {
    const timer = setTimeout(call, milliseconds)
    return () => clearTimeout(timer)
  }
  async say(message: object): Promise<void> {
    this.sockets.at(-1)?.onmessage?.({ data: JSON.stringify(message) } as MessageEvent)
    await pass(0)
  }
  async end(code: number): Promise<void> {
    this.sockets.at(-1)?.onclose?.({ code } as CloseEvent)
    await pass(0)
  }
  /** What was asked since. */
  news(): string[] {
    return this.asked.splice(0).toSorted()
  }
}

const EVERYTHING = ['/runs', '/session', '/status']
const pass = (milliseconds: number) => vi.advanceTimersByTimeAsync(milliseconds)
let world: FakeWorld
let server: Server

beforeEach(async () => {
  vi.useFakeTimers()
  world = new FakeWorld()
  server = new Server(world.api, world)
  server.start()
  await world.say({ type: 'hello', epoch: 'a', number: 0 })
})
afterEach(() => {
  server.stop()
  vi.useRealTimers()
})

describe('the server', () => {
  it('is asked for everything once, and then for the runs', async () => {
    expect(world.news()).toEqual(EVERYTHING)
    expect(server).toMatchObject({ connection: 'open', listed: true, error: null, sessionSeconds: 3600 })
    await pass(10_000)
    expect(world.news()).toEqual(['/runs', '/runs'])
  })

  it('says how the job stands, and its recording grows with it', async () => {
    world.news()
    await world.say({ type: 'status', state: 'live', error: '', step: 9 })
    expect(world.news()).toEqual(['/runs/job'])
    expect(server.status).toEqual({ state: 'live', error: '', step: 9 })
    expect(server.runs[0]?.last_step).toBe(9)
    await world.say({ type: 'status', state: 'live', error: '', step: 9 })
    expect(world.news()).toEqual([])
  })

  it('is asked for the ranks of a large job now and then', async () => {
    world.news()
    const said = { type: 'status', state: 'live', error: '', step: 5, ranks: null, ranks_left_out: true }
    await world.say(said)
    expect(server.status?.ranks).toEqual({ '0': { overhead: 0.01 } })
    expect(world.news()).toEqual([])
    await pass(11_000)
    world.news()
    await world.say(said)
    expect(world.news()).toEqual(['/status'])
  })

  it('that comes back after it was lost is asked again, and what was dropped adds up', async () => {
    await world.say({ type: 'heartbeat', dropped: 3, session_seconds: 90 })
    world.news()
    await world.end(1006)
    expect(server.connection).toBe('lost')
    expect(world.news()).toEqual(['/session'])
    await pass(250)
    await world.say({ type: 'hello', epoch: 'b', number: 0 })
    expect(world.news()).toEqual(EVERYTHING)
    await world.say({ type: 'heartbeat', dropped: 2, session_seconds: 80 })
    expect(server).toMatchObject({ connection: 'open', dropped: 5, sessionSeconds: 80 })
  })

  it('that was started again and does not know the session is not asked any more', async () => {
    world.refused = 401
    await world.end(1006) // of a handshake that is refused the browser says no more
    expect(server).toMatchObject({ connection: 'expired', error: { expired: true } })
    world.news()
    await pass(60_000)
    expect([world.news(), world.sockets.length]).toEqual([[], 1])
    world.refused = null
    server.live.retry()
    await world.say({ type: 'hello', epoch: 'b', number: 0 })
    expect(server).toMatchObject({ connection: 'open', error: null })
  })

  it('may be away for a while', async () => {
    world.refused = 0
    await pass(5000)
    expect(server.error?.away).toBe(true)
    world.refused = null
    await pass(5000)
    expect(server.error).toBeNull()
  })

  it('keeps what it was told, the last of it', async () => {
    for (let step = 0; step < 600; step++)
      server.live['listener'].said({ type: 'notice', kind: 'error', text: 'x', rank: 0, step, unix_ns: step })
    expect(server.notices).toHaveLength(500)
    expect(server.notices.at(-1)).toEqual({ kind: 'error', text: 'x', rank: 0, step: 599, unix_ns: 599 })
    await world.say({ type: 'watch', number: 1, event: { event: 'alarm' } })
    expect(server.watched).toHaveLength(1)
    await world.say({ type: 'resumed', from: 4, to: 9, complete: false })
    expect(server.gaps).toBe(1)
  })

  it('lists a recording when it begins', async () => {
    world.news()
    await world.say({ type: 'notice', kind: 'recording', text: '', rank: -1, step: -1, unix_ns: 1 })
    expect(world.news()).toEqual(['/runs'])
  })

  it('is not asked by a page that nobody sees, which catches up', async () => {
    world.news()
    const seen = vi.spyOn(document, 'hidden', 'get').mockReturnValue(true)
    document.dispatchEvent(new Event('visibilitychange'))
    await pass(15_000)
    await world.say({ type: 'status', state: 'live', error: '', step: 50 })
    expect(world.news()).toEqual([])
    seen.mockRestore()
    document.dispatchEvent(new Event('visibilitychange'))
    await pass(0)
    expect(world.news()).toEqual(EVERYTHING)
  })
})
