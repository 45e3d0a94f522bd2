// @vitest-environment jsdom
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import type { Frame } from '../api/frames'
import { Address } from './address.svelte'
import type { Run, Server, Status } from './server.svelte'
import { Time } from './time.svelte'

const run = (name: string, first: number | null, last: number | null, more: Partial<Run> = {}): Run =>
  ({
    name,
    first_step: first,
    last_step: last,
    live: false,
    error: '',
    label: '',
    unix_ns: 0,
    ...more,
  }) as Run

class FakeServer {
  runs: Run[] = $state.raw([])
  status: Partial<Status> | null = $state.raw({ state: 'recordings' })
  hear: (frames: Frame[]) => void = () => undefined
  onFrames(hear: (frames: Frame[]) => void): () => void {
    this.hear = hear
    return () => undefined
  }
  said(...steps: number[]): void {
    this.hear(steps.map((step) => ({ step }) as Frame))
    vi.advanceTimersByTime(250)
  }
}

let server: FakeServer
let address: Address
let time: Time

function open(search: string, runs: Run[], state: Status['state'] = 'recordings'): void {
  const bar = {
    location: { search, pathname: '/' },
    history: { pushState: () => undefined, replaceState: () => undefined },
    addEventListener: () => undefined,
  }
  server = new FakeServer()
  server.runs = runs
  server.status = { state }
  address = new Address(bar)
  time = new Time(address, server as unknown as Server)
}

const training = () => open('', [run('old', 0, 9), run('job', 0, 100, { live: true })], 'live')

beforeEach(() => void vi.useFakeTimers())
afterEach(() => {
  time.pause()
  vi.useRealTimers()
})

describe('the run', () => {
  it('is the one of the address, else of the job, else the newest that can be read', () => {
    training()
    expect(time.run).toBe('job')
    open('?run=old', server.runs, 'live')
    expect([time.run, time.isLive]).toEqual(['old', false])
    const runs = [
      run('a', 0, 1, { unix_ns: 1 }),
      run('b', 0, 1, { unix_ns: 2 }),
      run('c', null, null, { error: 'x' }),
    ]
    open('', runs)
    expect(time.run).toBe('b')
  })

  it('of a job that has recorded nothing is shown while it trains', () => {
    const runs = [
      run('a', 0, 1),
      run('job', null, null, { live: true, error: 'nothing is recorded there yet' }),
    ]
    open('', runs, 'waiting')
    expect(time.run).toBe('a')
    server.status = { state: 'live' }
    expect([time.run, time.step]).toEqual(['job', null])
  })

  it('may be called live, and may not be there', () => {
    open('?run=live', [run('job', 3, 7, { live: true })], 'live')
    expect([time.about?.name, time.step, time.isLive]).toEqual(['job', 7, true])
    open('?run=gone&step=4', [run('a', 0, 1)])
    expect([time.about, time.first, time.step, time.isLive]).toEqual([null, null, 4, false])
    time.play()
    expect(time.playing).toBe(false)
  })

  it('that vanishes ends the playing', () => {
    open('', [run('a', 0, 100)])
    time.play()
    server.runs = []
    vi.advanceTimersByTime(200)
    expect([time.playing, time.step]).toEqual([false, 0])
  })
})

describe('the step', () => {
  it('is the newest, unless one is chosen, and lies in the recording', () => {
    open('', [run('a', 10, 20)])
    expect([time.step, time.atEdge, time.behind]).toEqual([20, true, 0])
    time.seek(12.4)
    expect([time.step, time.atEdge, time.behind, address.text('run')]).toEqual([12, false, 8, 'a'])
    time.by(-50)
    expect(time.step).toBe(10)
    time.seek(NaN)
    expect(time.step).toBe(10)
    time.toEdge()
    expect(time.step).toBe(20)
  })

  it('that has gone from a long recording gives way to the oldest that is left', () => {
    training()
    time.seek(5)
    server.runs = [run('job', 40, 140, { live: true })]
    expect([time.step, time.behind]).toEqual([40, 100])
  })

  it('follows the job, and stays where it is paused while the job goes on', () => {
    training()
    server.said(101, 103, 102)
    expect([time.step, time.moving]).toEqual([103, true])
    time.toggle()
    server.said(150)
    expect([time.step, time.last, time.behind, time.moving]).toEqual([103, 150, 47, false])
    time.toEdge()
    expect([time.step, time.moving]).toEqual([150, true])
  })

  it('of a new recording of the job does not come from the one before', () => {
    training()
    server.said(500)
    expect(time.last).toBe(500)
    server.runs = [...server.runs, run('again', 0, 2, { live: true })].map((one) =>
      one.name === 'job' ? { ...one, live: false } : one,
    )
    expect([time.run, time.last]).toEqual(['again', 2])
    server.said(3)
    expect(time.last).toBe(3)
  })

  it('is not the job’s while an old run is shown', () => {
    open('?run=old', [run('old', 0, 9), run('job', 0, 100, { live: true })], 'live')
    server.said(120)
    expect([time.last, time.step]).toEqual([9, 9])
  })
})

describe('playing', () => {
  it('begins anew at the end of a recording, and ends there', () => {
    open('', [run('a', 0, 30)])
    time.toggle()
    expect([time.playing, time.step]).toEqual([true, 0])
    vi.advanceTimersByTime(1000)
    expect(time.step).toBe(10)
    vi.advanceTimersByTime(3000)
    expect([time.playing, time.step]).toEqual([false, 30])
  })

  it('goes on from where it was paused, at another speed', () => {
    open('?step=10', [run('a', 0, 1000)])
    time.toggle()
    vi.advanceTimersByTime(1000)
    time.toggle()
    vi.advanceTimersByTime(1000)
    expect(time.step).toBe(20)
    time.speed = 1
    time.toggle()
    vi.advanceTimersByTime(2100)
    expect(time.step).toBe(22)
  })

  it('up to the live edge then follows it', () => {
    training()
    time.seek(90)
    time.toggle()
    vi.advanceTimersByTime(1500)
    expect([time.step, time.playing, time.atEdge]).toEqual([100, false, true])
    server.said(101)
    expect(time.step).toBe(101)
  })

  it('at the live edge itself follows it at once', () => {
    training()
    time.toggle()
    expect(time.atEdge).toBe(false)
    time.toggle()
    expect([time.atEdge, time.playing]).toEqual([true, false])
  })

  it('rests while nobody sees the page, and leaps over no hours of sleep', () => {
    open('?step=0', [run('a', 0, 100_000)])
    time.play()
    const seen = vi.spyOn(document, 'hidden', 'get').mockReturnValue(true)
    vi.advanceTimersByTime(60_000)
    expect(time.step).toBe(0)
    seen.mockRestore()
    const asleep = vi.spyOn(performance, 'now').mockReturnValue(performance.now() + 3_600_000)
    vi.advanceTimersByTime(100)
    expect(time.step).toBe(10)
    asleep.mockRestore()
  })

  it('needs more than one step', () => {
    open('', [run('a', 7, 7)])
    time.toggle()
    expect([time.playing, time.step]).toEqual([false, 7])
  })
})
