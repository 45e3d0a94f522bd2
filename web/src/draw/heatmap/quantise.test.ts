import { describe, expect, it } from 'vitest'
import { FLOATS } from './coding'
import { extremes, quantise, spanOf, type Floats } from './quantise'
import { random, whole } from './random.testing'
import { curveOf, SCALES, type Scale, type Span } from './scale'

function bytesOf(values: Floats, scale: Scale, span: Span | null, missing?: Uint8Array): number[] {
  const area = { row: 0, column: 0, rows: 1, columns: values.length }
  return [...quantise(values, values.length, area, scale, span, missing)]
}

/** What a byte stands for. */
function valueOf(byte: number, scale: Scale, span: Span): number {
  return curveOf(scale, span).value((byte - FLOATS.first) / (FLOATS.last - FLOATS.first))
}

describe('the span of a range', () => {
  const values = Float32Array.of(-3, NaN, 1, Infinity, 5, -Infinity)

  it('is that of the finite values', () => {
    expect(spanOf(values, 'extremes')).toEqual({ low: -3, high: 5 })
    expect(spanOf(values, 'symmetric')).toEqual({ low: -5, high: 5 })
    expect(spanOf(values, [2, -2])).toEqual({ low: -2, high: 2 })
    expect(spanOf(values, [1, 4], 'linear', true)).toEqual({ low: -4, high: 4 })
  })

  it('is nothing where nothing is finite', () => {
    for (const none of [Float32Array.of(), Float32Array.of(NaN, NaN), Float64Array.of(Infinity, -Infinity)]) {
      for (const range of ['extremes', 'robust', 'symmetric'] as const) expect(spanOf(none, range)).toBeNull()
    }
    expect(spanOf(values, [NaN, 1])).toBeNull()
  })

  it('of a logarithm begins above 0, if anything is there', () => {
    expect(spanOf(Float64Array.of(-1, 0, 0.5, 8), 'extremes', 'log')).toEqual({ low: 0.5, high: 8 })
    expect(spanOf(Float64Array.of(-4, 0), 'extremes', 'log')).toEqual({ low: -4, high: 0 })
  })

  it('is robust against single values, unless they are all there is to see', () => {
    const next = random(1)
    const many = Float32Array.from({ length: 300_000 }, () => next())
    many[123_456] = 1e9
    const span = spanOf(many, 'robust')!
    expect(span.low).toBeCloseTo(0.005, 2)
    expect(span.high).toBeCloseTo(0.995, 2)
    const flat = new Float32Array(10_000)
    flat[77] = 3
    expect(spanOf(flat, 'robust')).toEqual({ low: 0, high: 3 })
  })

  it('holds every value: 200 random grids', () => {
    const next = random(2)
    for (let trial = 0; trial < 200; trial++) {
      const size = 10 ** (whole(next, 60) - 30)
      const grid = Float64Array.from({ length: 1 + whole(next, 50) }, () => (next() - 0.5) * size)
      const { low, high } = extremes(grid)!
      expect(low).toBe(Math.min(...grid))
      expect(high).toBe(Math.max(...grid))
    }
  })
})

describe('bytes', () => {
  it('have places of their own for what is not finite, and for what is missing', () => {
    const values = Float32Array.of(0, 1, NaN, Infinity, -Infinity, 7)
    expect(bytesOf(values, 'linear', { low: 0, high: 1 }, Uint8Array.of(0, 0, 0, 0, 0, 1))).toEqual([
      1, 253, 255, 254, 254, 0,
    ])
  })

  it('of values beside the span are those at its ends', () => {
    for (const scale of SCALES) {
      expect(bytesOf(Float32Array.of(-5, 0.5, 100), scale, { low: 0.5, high: 2 })).toEqual([1, 1, 253])
    }
  })

  it('of equal values are in the middle, whatever they are', () => {
    for (const value of [0, -2, 1e300, 5e-324]) {
      for (const scale of SCALES) {
        const bytes = bytesOf(Float64Array.of(value, value, NaN), scale, { low: value, high: value })
        expect(bytes).toEqual([127, 127, 255])
        expect(valueOf(127, scale, { low: value, high: value })).toBe(value)
      }
    }
  })

  it('without a span hold no value', () => {
    expect(bytesOf(Float32Array.of(NaN, Infinity), 'linear', null)).toEqual([255, 254])
    expect(bytesOf(new Float32Array(), 'log', null)).toEqual([])
  })

  it('stand the largest numbers there are', () => {
    const values = Float64Array.of(-Number.MAX_VALUE, 0, Number.MAX_VALUE)
    for (const scale of ['linear', 'sqrt', 'symlog'] as const) {
      expect(bytesOf(values, scale, spanOf(values, 'extremes'))).toEqual([1, 127, 253])
    }
    const tiny = Float64Array.of(0, 5e-324)
    expect(bytesOf(tiny, 'linear', spanOf(tiny, 'extremes'))).toEqual([1, 253])
  })

  it('of an area are those of its rows', () => {
    const values = Float32Array.from({ length: 12 }, (_, at) => at)
    const all = bytesOf(values, 'linear', { low: 0, high: 11 })
    const area = { row: 1, column: 1, rows: 2, columns: 2 }
    const bytes = quantise(values, 4, area, 'linear', { low: 0, high: 11 })
    expect([...bytes]).toEqual([all[5], all[6], all[9], all[10]])
  })

  it.each(SCALES)('%s: keep the order, and give values back to half a level (100 random grids)', (scale) => {
    const next = random(3)
    for (let trial = 0; trial < 100; trial++) {
      const size = 10 ** (whole(next, 12) - 6)
      const sign = scale === 'log' ? 0 : 0.5
      const values = Float64Array.from({ length: 64 }, () => (next() - sign) * size + 1e-12).sort()
      const span = spanOf(values, 'extremes', scale)!
      const bytes = bytesOf(values, scale, span)
      const curve = curveOf(scale, span)
      bytes.forEach((byte, at) => {
        expect(byte).toBeGreaterThanOrEqual(at > 0 ? bytes[at - 1]! : FLOATS.first)
        const back = curve.position(valueOf(byte, scale, span))
        expect(Math.abs(back - curve.position(values[at]!))).toBeLessThan(0.5001 / 252)
      })
      expect(bytes.at(0)).toBe(FLOATS.first)
      expect(bytes.at(-1)).toBe(FLOATS.last)
    }
  })
})

describe('curves', () => {
  it.each(SCALES)('%s: positions and values are inverse', (scale) => {
    const curve = curveOf(scale, { low: scale === 'log' ? 0.01 : -4, high: 9 })
    for (let at = 0; at <= 20; at++) expect(curve.position(curve.value(at / 20))).toBeCloseTo(at / 20, 9)
    expect(curve.value(1)).toBeCloseTo(9, 9)
  })

  it('spread small values out: square roots, logarithms', () => {
    expect(curveOf('sqrt', { low: 0, high: 1 }).position(0.25)).toBeCloseTo(0.5)
    expect(curveOf('log', { low: 0.01, high: 1 }).position(0.1)).toBeCloseTo(0.5)
    expect(curveOf('symlog', { low: -1, high: 1 }).position(0)).toBeCloseTo(0.5)
    expect(curveOf('symlog', { low: -1, high: 1 }).position(0.03)).toBeGreaterThan(0.7)
  })
})
