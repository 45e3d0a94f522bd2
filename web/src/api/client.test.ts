import { describe, expect, it } from 'vitest'
import { address, Api, ApiError } from './client'

const answering = (status: number, body: unknown, headers: Record<string, string> = {}) =>
  new Api(() => Promise.resolve(new Response(JSON.stringify(body), { status, headers })))

describe('the address of a request', () => {
  it('encodes what comes from elsewhere, and leaves out what is not said', () => {
    const query = { run: 'a/../b?x', tap: 'layers.0 & more', ranks: [1, 2], step: null, format: '' }
    expect(address('/runs/{run}/series', query)).toBe(
      '/api/v1/runs/a%2F..%2Fb%3Fx/series?tap=layers.0+%26+more&ranks=1%2C2',
    )
  })
})

describe('requests', () => {
  it('carry the line with which they were refused', async () => {
    const refused = answering(404, { error: 'run: no such tap' }).get('/runs', {})
    await expect(refused).rejects.toMatchObject({
      status: 404,
      message: 'run: no such tap',
      expired: false,
    })
  })

  it('say so when the session is over, or the server away', async () => {
    await expect(answering(401, { error: 'x' }).get('/runs', {})).rejects.toMatchObject({ expired: true })
    const away = new Api(() => Promise.reject(new TypeError('failed'))).get('/runs', {})
    await expect(away).rejects.toMatchObject({ status: 0, away: true })
  })

  it('know when to try again', async () => {
    const busy = answering(429, { error: 'slow down' }, { 'Retry-After': '3' }).get('/runs', {})
    await expect(busy).rejects.toMatchObject({ retryAfter: 3 })
  })

  it('say what became of an answer that is cut off or nonsense', async () => {
    const giving = (body: BodyInit) => new Api(() => Promise.resolve(new Response(body)))
    await expect(giving('{"runs": [').get('/runs', {})).rejects.toMatchObject({ status: -1 })
    const broken = new ReadableStream({ start: (control) => control.error(new TypeError('network error')) })
    await expect(giving(broken).get('/runs', {})).rejects.toMatchObject({ away: true })
    const frames = giving(new Uint8Array(40)).frames('/runs/{run}/tiles', { run: 'a', tap: 'b' })
    await expect(frames).rejects.toMatchObject({ status: -1, message: expect.stringContaining('no frame') })
  })

  it('survive an answer that is no JSON', async () => {
    const api = new Api(() =>
      Promise.resolve(new Response('<html>', { status: 502, statusText: 'Bad Gateway' })),
    )
    await expect(api.get('/runs', {})).rejects.toEqual(
      new ApiError(502, 'The server answered 502 Bad Gateway'),
    )
  })
})
