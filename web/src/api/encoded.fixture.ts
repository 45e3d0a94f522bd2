/** For tests. */

/** A frame as trimtab/scope/frame.py makes it. */
export function encoded(said: object, payload: Uint8Array, step = 7, microbatch = 1): Uint8Array {
  let text = JSON.stringify({
    tap: 'a',
    what: 'raw',
    subscription: '',
    rank: 0,
    shard: [],
    replica: 0,
    meta: {},
    arrays: [],
    ...said,
  })
  text += ' '.repeat((8 - (text.length % 8)) % 8)
  const size = payload.length + ((8 - (payload.length % 8)) % 8)
  const raw = new Uint8Array(32 + text.length + size)
  const view = new DataView(raw.buffer)
  raw.set(new TextEncoder().encode('tsf1'))
  view.setUint32(4, text.length, true)
  view.setUint32(8, raw.length, true)
  view.setInt32(12, microbatch, true)
  view.setBigInt64(16, BigInt(step), true)
  view.setBigInt64(24, 5n, true)
  raw.set(new TextEncoder().encode(text), 32)
  raw.set(payload, 32 + text.length)
  return raw
}

/** As the payload of a frame. */
export const floats = (...values: number[]) => new Uint8Array(new Float32Array(values).buffer)
