/** How values are spread over a range of colours, and back. */

export type Scale = 'linear' | 'sqrt' | 'log' | 'symlog'

export const SCALES: readonly Scale[] = ['linear', 'sqrt', 'log', 'symlog']

/** The values at both ends of the colours, both finite, low <= high. */
export interface Span {
  readonly low: number
  readonly high: number
}

/** A symmetric logarithm is straight below this share of the largest value: three decades are spread out. */
const STRAIGHT = 1e-3

export interface Curve {
  /** 0 (low) to 1 (high); beyond where a value lies outside; a half where low is high. */
  position(value: number): number
  value(position: number): number
}

export function curveOf(scale: Scale, span: Span): Curve {
  if (!(span.low < span.high)) return { position: () => 0.5, value: () => span.low }
  if (scale === 'log') return logarithmic(span)
  const bend = BENDS[scale](span)
  // Halved, so that the span of the largest numbers is none that overflows.
  const [low, high] = [bend.to(span.low) / 2, bend.to(span.high) / 2]
  const width = high - low
  // Neighbours among the numbers: there is nothing between them.
  if (!(width > 0))
    return {
      position: (value) => (value > span.low ? 1 : 0),
      value: (at) => (at < 0.5 ? span.low : span.high),
    }
  return {
    position: (value) => (bend.to(value) / 2 - low) / width,
    value: (position) => bend.from(2 * (low + width * position)),
  }
}

interface Bend {
  to(value: number): number
  from(bent: number): number
}

const BENDS: Record<Exclude<Scale, 'log'>, (span: Span) => Bend> = {
  linear: () => ({ to: (value) => value, from: (bent) => bent }),
  sqrt: () => ({
    to: (value) => Math.sign(value) * Math.sqrt(Math.abs(value)),
    from: (bent) => Math.sign(bent) * bent * bent,
  }),
  symlog: ({ low, high }) => {
    const unit = Math.max(Math.abs(low), Math.abs(high)) * STRAIGHT || Number.MIN_VALUE
    return {
      to: (value) => Math.sign(value) * Math.log1p(Math.abs(value) / unit),
      from: (bent) => Math.sign(bent) * Math.expm1(Math.abs(bent)) * unit,
    }
  },
}

/** Values at or below 0 have no logarithm: they lie below everything. A range that ends below 0 is all below. */
function logarithmic({ low, high }: Span): Curve {
  if (high <= 0) return { position: () => 0, value: () => high }
  const from = low > 0 ? low : Math.max(high * STRAIGHT ** 2, Number.MIN_VALUE)
  const [start, width] = [Math.log(from), Math.log(high) - Math.log(from)]
  if (!(width > 0)) return { position: () => 0.5, value: () => high }
  return {
    position: (value) => (value > 0 ? (Math.log(value) - start) / width : value <= 0 ? -1 : NaN),
    value: (position) => Math.exp(start + width * position),
  }
}
