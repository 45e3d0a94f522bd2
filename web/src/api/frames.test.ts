import { describe, expect, it } from 'vitest'
import { encoded, floats } from './encoded.fixture'
import { decodeAll, fromBfloat16, joinPieces, numbersOf } from './frames'

describe('frames', () => {
  it('come one after the other, with their arrays', () => {
    const one = encoded({ arrays: [['x', 'float32', [3]]] }, floats(1, 2, NaN))
    const two = encoded(
      { tap: 'b', arrays: [['n', 'int64', [1]]] },
      new Uint8Array(new BigInt64Array([-4n]).buffer),
      8,
    )
    const both = new Uint8Array([...one, ...two])
    const [a, b] = decodeAll(both)
    expect(a).toMatchObject({ tap: 'a', step: 7, microbatch: 1, unixNs: 5n })
    expect(Array.from(numbersOf(a!, 'x'))).toEqual([1, 2, NaN])
    expect(b?.step).toBe(8)
    expect(Array.from(numbersOf(b!, 'n'))).toEqual([-4])
  })

  it('may lie anywhere in a buffer', () => {
    const one = encoded({ arrays: [['x', 'float64', [1]]] }, new Uint8Array(new Float64Array([0.5]).buffer))
    const shifted = new Uint8Array(one.length + 3)
    shifted.set(one, 3)
    expect(Array.from(numbersOf(decodeAll(shifted.subarray(3))[0]!, 'x'))).toEqual([0.5])
  })

  it('that are cut off or nonsense are refused', () => {
    const one = encoded({ arrays: [['x', 'float32', [1]]] }, floats(1))
    for (const length of [1, 31, one.length - 8])
      expect(() => decodeAll(one.subarray(0, length))).toThrow(RangeError)
    expect(() => decodeAll(new Uint8Array(64))).toThrow(RangeError)
    expect(() => decodeAll(encoded({ arrays: [['x', 'complex64', [1]]] }, floats(1, 2)))).toThrow(/complex64/)
  })

  it('in pieces are put together in order, whatever order they came in', () => {
    const piece = (index: number, values: number[]) =>
      encoded(
        {
          meta: { keep: 1, part: [index, 2], shapes: { x: [2, 2] } },
          arrays: [['x', 'float32', [values.length]]],
        },
        floats(...values),
      )
    const found = joinPieces(decodeAll(new Uint8Array([...piece(1, [4]), ...piece(0, [1, 2, 3])])))
    expect(found).toHaveLength(1)
    expect(found[0]?.arrays['x']).toMatchObject({ shape: [2, 2], values: new Float32Array([1, 2, 3, 4]) })
    expect(found[0]?.meta).toEqual({ keep: 1 })
  })

  it('of half precision are numbers', () => {
    expect(Array.from(fromBfloat16(new Uint16Array([0x3f80, 0xc000, 0x7f80])))).toEqual([1, -2, Infinity])
    const half = new Uint8Array(new Uint16Array([0x3c00, 0xc000, 0x7c00, 0x0001]).buffer)
    const [frame] = decodeAll(encoded({ arrays: [['x', 'float16', [4]]] }, half))
    expect(Array.from(numbersOf(frame!, 'x'))).toEqual([1, -2, Infinity, 2 ** -24])
  })

  it('of a type that is not shown are refused by name', () => {
    const meta = { dtypes: { x: 'float8_e4m3fn' } }
    const [frame] = decodeAll(encoded({ meta, arrays: [['x', 'uint8', [1]]] }, new Uint8Array([1])))
    expect(() => numbersOf(frame!, 'x')).toThrow(/float8_e4m3fn/)
  })
})
