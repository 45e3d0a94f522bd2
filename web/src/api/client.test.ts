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

  it('survive an answer that is no JSON', async () => {
    const api = new Api(() =>
      Promise.resolve(new Response('<html>', { status: 502, statusText: 'Bad Gateway' })),
    )
    await expect(api.get('/runs', {})).rejects.toEqual(
      new ApiError(502, 'The server answered 502 Bad Gateway'),
    )
  })
})
