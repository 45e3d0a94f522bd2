/** Frames as the server sends them, see trimtab/scope/frame.py: `tsf1`, header in JSON, little-endian arrays. */

export type Values =
  | Uint8Array
  | Int8Array
  | Uint16Array
  | Int16Array
  | Uint32Array
  | Int32Array
  | Float32Array
  | Float64Array
  | BigInt64Array
  | BigUint64Array

export interface Tensor {
  dtype: string
  shape: number[]
  values: Values
}

export interface Frame {
  tap: string
  what: string
  subscription: string
  step: number
  microbatch: number
  rank: number
  replica: number
  /** [axis, index, count] each. */
  shard: [string, number, number][]
  meta: Record<string, unknown>
  arrays: Record<string, Tensor>
  unixNs: bigint
}

const HEAD_BYTES = 32
const MAGIC = 0x31667374 // "tsf1", little-endian
const ALIGNMENT = 8

type Maker = (buffer: ArrayBuffer, offset: number, length: number) => Values

const MAKERS: Record<string, [bytes: number, make: Maker]> = {
  uint8: [1, (b, o, n) => new Uint8Array(b, o, n)],
  int8: [1, (b, o, n) => new Int8Array(b, o, n)],
  uint16: [2, (b, o, n) => new Uint16Array(b, o, n)],
  int16: [2, (b, o, n) => new Int16Array(b, o, n)],
  uint32: [4, (b, o, n) => new Uint32Array(b, o, n)],
  int32: [4, (b, o, n) => new Int32Array(b, o, n)],
  uint64: [8, (b, o, n) => new BigUint64Array(b, o, n)],
  int64: [8, (b, o, n) => new BigInt64Array(b, o, n)],
  float16: [2, (b, o, n) => halves(new Uint16Array(b, o, n))],
  float32: [4, (b, o, n) => new Float32Array(b, o, n)],
  float64: [8, (b, o, n) => new Float64Array(b, o, n)],
}

/** Frames that follow each other; RangeError for what is cut off or none. Arrays lie in `raw`'s buffer. */
export function decodeAll(raw: Uint8Array): Frame[] {
  const bytes = aligned(raw)
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength)
  const found: Frame[] = []
  for (let at = 0; at < bytes.byteLength;) {
    if (bytes.byteLength - at < HEAD_BYTES || view.getUint32(at, true) !== MAGIC)
      throw new RangeError('no frame, or one that is cut off')
    const header = view.getUint32(at + 4, true)
    const total = view.getUint32(at + 8, true)
    if (HEAD_BYTES + header > total || at + total > bytes.byteLength)
      throw new RangeError('a frame is cut off')
    found.push(frameOf(bytes, view, at, header))
    at += total
  }
  return found
}

function frameOf(bytes: Uint8Array, view: DataView, at: number, header: number): Frame {
  const text = new TextDecoder().decode(bytes.subarray(at + HEAD_BYTES, at + HEAD_BYTES + header))
  const said = JSON.parse(text) as Omit<Frame, 'step' | 'microbatch' | 'arrays' | 'unixNs'> & {
    arrays: [string, string, number[]][]
  }
  const arrays: Record<string, Tensor> = {}
  let place = bytes.byteOffset + at + HEAD_BYTES + header
  for (const [name, dtype, shape] of said.arrays) {
    const made = MAKERS[dtype]
    if (!made) throw new RangeError(`arrays of ${dtype} are not known`)
    const length = shape.reduce((product, side) => product * side, 1)
    arrays[name] = { dtype, shape, values: made[1](bytes.buffer as ArrayBuffer, place, length) }
    place += Math.ceil((length * made[0]) / ALIGNMENT) * ALIGNMENT
  }
  return {
    ...said,
    microbatch: view.getInt32(at + 12, true),
    step: Number(view.getBigInt64(at + 16, true)),
    unixNs: view.getBigInt64(at + 24, true),
    arrays,
  }
}

/** Frames that were cut into pieces (`meta.part`, `meta.shapes`) as the wholes they were; others as they are. */
export function joinPieces(frames: readonly Frame[]): Frame[] {
  return new Pieces().join(frames)
}

/** Frames whose pieces are not all there yet; of a stream that loses some, those that wait longest are given up. */
const MOST_WAITING = 64

/** Puts pieces together that come one after the other. */
export class Pieces {
  private readonly waiting = new Map<string, Frame[]>()

  /** What is whole with these. */
  join(frames: readonly Frame[]): Frame[] {
    return frames.flatMap((frame) => (frame.meta['part'] ? (this.take(frame) ?? []) : frame))
  }

  private take(frame: Frame): Frame | null {
    const [place, count] = frame.meta['part'] as [number, number]
    const { tap, what, subscription, step, microbatch, rank, shard } = frame
    const key = JSON.stringify([tap, what, subscription, step, microbatch, rank, shard])
    const pieces = this.waiting.get(key)?.filter((piece) => partOf(piece) !== place) ?? []
    pieces.push(frame)
    this.waiting.delete(key)
    if (pieces.length === count) return joined(pieces)
    this.waiting.set(key, pieces)
    const [oldest] = this.waiting.keys()
    if (this.waiting.size > MOST_WAITING && oldest !== undefined) this.waiting.delete(oldest)
    return null
  }
}

function joined(pieces: Frame[]): Frame {
  const ordered = pieces.toSorted((a, b) => partOf(a) - partOf(b))
  const first = ordered[0] as Frame
  const shapes = first.meta['shapes'] as Record<string, number[]>
  const arrays: Record<string, Tensor> = {}
  for (const [name, shape] of Object.entries(shapes)) {
    const parts = ordered.flatMap((piece) => piece.arrays[name] ?? [])
    if (parts[0])
      arrays[name] = { dtype: parts[0].dtype, shape, values: concatenated(parts.map((p) => p.values)) }
  }
  const { part: _part, shapes: _shapes, ...meta } = first.meta
  return { ...first, arrays, meta }
}

function partOf(frame: Frame): number {
  return (frame.meta['part'] as [number, number])[0]
}

function concatenated(parts: Values[]): Values {
  const Whole = (parts[0] as Values).constructor as new (length: number) => Values
  const made = new Whole(parts.reduce((sum, part) => sum + part.length, 0))
  let at = 0
  for (const part of parts) {
    ;(made as Uint8Array).set(part as Uint8Array, at)
    at += part.length
  }
  return made
}

/** Typed arrays need a begin that is a multiple of their size. */
function aligned(raw: Uint8Array): Uint8Array {
  return raw.byteOffset % ALIGNMENT ? raw.slice() : raw
}

/** Float16 as numbers: browsers have no array of it everywhere. */
function halves(bits: Uint16Array): Float32Array {
  return Float32Array.from(bits, (half) => {
    const sign = half & 0x8000 ? -1 : 1
    const exponent = (half >> 10) & 31
    const mantissa = half & 1023
    if (exponent === 31) return mantissa ? NaN : sign * Infinity
    return exponent
      ? sign * 2 ** (exponent - 15) * (1 + mantissa / 1024)
      : sign * 2 ** -14 * (mantissa / 1024)
  })
}

/** bfloat16, as bits that `meta.dtypes` says are such, as numbers. */
export function fromBfloat16(bits: Uint16Array): Float32Array {
  const wide = new Uint32Array(bits.length)
  for (let i = 0; i < bits.length; i++) wide[i] = (bits[i] as number) << 16
  return new Float32Array(wide.buffer)
}

/** Values as numbers, whatever they are stored as; raises RangeError for a type that this page cannot show. */
export function numbersOf(frame: Frame, name: string): Float64Array | Float32Array {
  const tensor = frame.arrays[name]
  if (!tensor) throw new RangeError(`${frame.tap}: this frame has no ${name}`)
  const { values } = tensor
  const real = (frame.meta['dtypes'] as Record<string, string> | undefined)?.[name]
  if (real === 'bfloat16' && values instanceof Uint16Array) return fromBfloat16(values)
  if (real !== undefined && real !== tensor.dtype)
    throw new RangeError(`${name} is ${real}, which is not shown here`)
  if (values instanceof Float32Array || values instanceof Float64Array) return values
  return Float64Array.from(values as Iterable<number | bigint>, Number)
}
