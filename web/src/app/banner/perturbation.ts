/** A perturbation as the server says it once a second: what it does, in words, and how it stands. */

export interface Standing {
  id: string
  /** In a line: `flips exponent of 1 element in layers.1.mlp.output`. */
  text: string
  pattern: string
  kind: string
  /** Its steps. */
  first: number
  last: number
  /** coming: before its first step; active; over. */
  phase: 'coming' | 'active' | 'over'
  /** Steps until it begins, or that it still lasts with the one that runs. */
  steps: number
  ranks: number[]
  /** By rank, what became of it there: expired, reverted, error. */
  states: Record<string, string>
  /** Something is stored that can be put back. */
  stored: boolean
  /** All ranks have put it back. */
  reverted: boolean
  probability: number
}

type Fields = Readonly<Record<string, unknown>>

/** `step`: that of the job. Nothing that a job says is taken to be of the type that it should be. */
export function standingOf(id: string, about: Fields, step: number): Standing {
  const agreed = Number(about['step'] ?? -1)
  const said = Number(about['first'] ?? -1)
  const first = said < 0 ? agreed : said // -1: not known either
  const last = said < 0 ? agreed + Number(about['last'] ?? 0) : Number(about['last'] ?? first)
  const ended = about['ended'] === true || about['state'] === 'ended'
  const phase = ended || step > last ? 'over' : step < first ? 'coming' : 'active'
  const ranks = arrayOf(about['ranks']).map(Number)
  const states = Object.fromEntries(
    Object.entries(objectOf(about['states'])).map(([rank, why]) => [rank, String(why)]),
  )
  return {
    id,
    text: describe(about),
    pattern: String(about['pattern'] ?? ''),
    kind: String(about['kind'] ?? ''),
    first,
    last,
    phase,
    steps: phase === 'coming' ? first - step : phase === 'active' ? last - step + 1 : 0,
    ranks,
    states,
    stored: about['stored'] === true,
    reverted: ranks.length > 0 && ranks.every((rank) => states[rank] === 'reverted'),
    probability: Number(about['probability'] ?? 1),
  }
}

/** All of them, the newest first. */
export function standings(found: Readonly<Record<string, Fields>> | undefined, step: number): Standing[] {
  return Object.entries(found ?? {})
    .map(([id, about]) => standingOf(id, about, step))
    .sort((a, b) => b.first - a.first)
}

/** `steps 120-122`, `step 120`. */
export function stepsText(first: number, last: number): string {
  return first === last ? `step ${first}` : `steps ${first}-${last}`
}

/** In how far it is to come, or still lasts. */
export function leftText(standing: Standing): string {
  const steps = `${standing.steps} step${standing.steps === 1 ? '' : 's'}`
  if (standing.phase === 'coming') return `begins in ${steps}, at step ${standing.first}`
  if (standing.phase === 'active') return `${steps} left, until step ${standing.last}`
  return standing.reverted ? 'over, and put back' : 'over'
}

/** What a perturbation does, in a line, as the audit log words it. */
export function describe(about: Fields): string {
  if (!about['kind']) return 'begun before this server came: the log says what it did'
  const said = objectOf(about['parameters'])
  const layers = arrayOf(about['layers'])
  const place =
    partText(said) + String(about['pattern'] ?? '') + (layers.length ? ` of layers ${layers.join(', ')}` : '')
  const where =
    { master: " in the optimizer's original", both: ' in both copies' }[String(said['where'])] ?? ''
  return (
    actText(String(about['kind'] ?? ''), said, place) +
    where +
    (said['revert'] === true ? ', then puts it back' : '')
  )
}

function actText(kind: string, said: Fields, place: string): string {
  const amount = (name: string) => `${String(said[name])}${said['relative'] === true ? ' times the rms' : ''}`
  switch (kind) {
    case 'gaussian':
      return `adds normal noise of deviation ${amount('std')} to ${place}`
    case 'uniform':
      return `multiplies ${place} by random factors from ${amount('low')} to ${amount('high')}`
    case 'offset':
      return `adds ${amount('value')} to ${place}`
    case 'bit-flip':
      return `flips ${bitsText(arrayOf(said['bits']))} of ${place}`
    case 'zero':
      return `zeroes ${place}`
    case 'scale':
      return `multiplies ${place} by ${amount('factor')}`
    case 'mask':
      return `masks ${place}${Number(said['value']) ? ` with ${amount('value')}` : ''}`
    case 'stuck':
      return `holds ${place} at ${amount('value')}`
    case 'stale':
      return `repeats the content before in ${place}`
    case 'delay':
      return `delays ${place} by ${amount('ms')} ms`
    default:
      return `${kind} of ${place}`
  }
}

function bitsText(bits: readonly unknown[]): string {
  const names = bits.slice(0, 8).map((bit) => {
    if (typeof bit === 'number') return `bit ${bit}`
    if (bit === 'random') return 'a random bit'
    return bit === 'exponent' || bit === 'mantissa' ? `a random bit of the ${bit}` : String(bit)
  })
  return names.join(' and ') + (bits.length > 8 ? ' and others' : '')
}

function partText(said: Fields): string {
  const part = objectOf(said['part'])
  if ('elements' in part) return `${String(part['elements'])} element${part['elements'] === 1 ? '' : 's'} in `
  const words: string[] = []
  if ('fraction' in part && part['fraction'] !== 1) words.push(`${String(part['fraction'])} of the elements`)
  for (const name of ['indices', 'tokens', 'heads', 'channels']) {
    const numbers = arrayOf(part[name])
    if (numbers.length)
      words.push(`${name} ${numbers.slice(0, 6).join(', ')}${numbers.length > 6 ? ', ...' : ''}`)
  }
  return words.length ? `${words.join(' of ')} in ` : ''
}

function objectOf(value: unknown): Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
    ? (value as Record<string, unknown>)
    : {}
}

function arrayOf(value: unknown): unknown[] {
  return Array.isArray(value) ? value : []
}
