/** Numbers as people type them: `3`, `0,1`, `0-3,8`. As the command line takes them. */

/** What was read, or what is wrong with it, in a line. */
export type Read<T> = { value: T; problem?: undefined } | { value?: undefined; problem: string }

const MOST = 4096

export interface Bounds {
  low?: number
  high?: number
  /** Of them. */
  most?: number
  /** `-1` counts from the end. */
  negative?: boolean
}

/** A list of whole numbers, without doubles, in the order in which they were said. */
export function readNumbers(
  text: string,
  { high = 1e15, most = MOST, negative = false }: Bounds = {},
): Read<number[]> {
  const found = new Set<number>()
  for (const part of text.split(',').map((word) => word.trim())) {
    const span = /^(\d{1,15})(?:\s*-\s*(\d{1,15}))?$/.exec(part)
    if (!span && negative && /^-\d{1,15}$/.test(part)) {
      found.add(Number(part))
      continue
    }
    if (!span) return { problem: 'Numbers such as 3, or 0,1, or 0-3,8' + (negative ? ', or -1' : '') }
    const first = Number(span[1])
    const last = Number(span[2] ?? span[1])
    if (last < first) return { problem: `${part} ends before it begins` }
    if (last - first >= most || found.size + last - first >= most)
      return { problem: `At most ${most} numbers` }
    if (last > high) return { problem: `${last} is not there: at most ${high}` }
    for (let number = first; number <= last; number++) found.add(number)
  }
  return { value: [...found] }
}

/** One whole number. */
export function readWhole(text: string, { low = 0, high = 1e15 }: Bounds = {}): Read<number> {
  const number = Number(text)
  if (!/^\d{1,15}$/.test(text.trim()) || number < low || number > high) {
    return {
      problem: high < 1e15 ? `A whole number from ${low} to ${high}` : `A whole number from ${low} on`,
    }
  }
  return { value: number }
}

/** One number, such as `0.1` or `1e-3`. */
export function readReal(text: string, { low = -Infinity, high = Infinity }: Bounds = {}): Read<number> {
  const number = Number(text)
  const wanted =
    low > -Infinity && high < Infinity ? ` from ${low} to ${high}` : low > -Infinity ? ` from ${low} on` : ''
  if (!/^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d{1,3})?$/i.test(text.trim()) || !Number.isFinite(number)) {
    return { problem: `A number${wanted}, such as 0.1 or 1e-3` }
  }
  return number < low || number > high ? { problem: `A number${wanted}` } : { value: number }
}

/** First and last step: `120` or `120-122`. */
export function readSpan(text: string, mostSteps: number): Read<[number, number]> {
  const span = /^(\d{1,15})(?:\s*-\s*(\d{1,15}))?$/.exec(text.trim())
  if (!span) return { problem: 'A step, or first-last, for example 120-122' }
  const first = Number(span[1])
  const last = Number(span[2] ?? span[1])
  if (last < first) return { problem: `The last (${last}) is before the first (${first})` }
  const steps = last - first + 1
  if (steps > mostSteps) return { problem: `At most ${mostSteps} steps, not ${steps}` }
  return { value: [first, last] }
}
