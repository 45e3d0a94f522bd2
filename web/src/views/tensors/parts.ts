/** The tensors of a layer, in the order in which they come to be. Pure. */

export interface Part {
  /** Of the tap's name, behind `layers.N.`. */
  readonly name: string
  readonly title: string
}

export const PARTS: readonly Part[] = [
  { name: 'input', title: 'Input' },
  { name: 'attention.q', title: 'Queries' },
  { name: 'attention.k', title: 'Keys' },
  { name: 'attention.v', title: 'Values' },
  { name: 'attention.core', title: 'Attention, by head' },
  { name: 'attention.output', title: 'Attention output' },
  { name: 'residual', title: 'Residual' },
  { name: 'mlp.hidden', title: 'MLP hidden' },
  { name: 'mlp.output', title: 'MLP output' },
  { name: 'output', title: 'Output' },
]

const GRADIENT = '.grad'
const LAYER = /^layers\.(\d{1,9})\./

export function tapName(layer: number, part: Part, gradient: boolean): string {
  return `layers.${layer}.${part.name}${gradient ? GRADIENT : ''}`
}

/** What the tensors of a layer are asked for by. */
export function layerPattern(layer: number | string, gradient: boolean): string {
  return `layers.${layer}.{${PARTS.map((part) => part.name).join(',')}}${gradient ? GRADIENT : ''}`
}

/** What a tap is called on its card; its own name for one that is none of a layer's usual tensors. */
export function titleOf(tap: string): string {
  const bare = tap.endsWith(GRADIENT) ? tap.slice(0, -GRADIENT.length) : tap
  const part = PARTS.find((one) => bare.replace(LAYER, '') === one.name && LAYER.test(bare))
  return part ? part.title + (bare === tap ? '' : ', gradient') : tap
}

/** The layer that a tap is of; null: of none. */
export function layerOf(tap: string): number | null {
  const found = LAYER.exec(tap)
  return found ? Number(found[1]) : null
}

/** Layers of which there is any of these tensors, in order. */
export function layersOf(taps: readonly string[]): number[] {
  const found = new Set<number>()
  for (const tap of taps) {
    const layer = layerOf(tap)
    if (layer !== null) found.add(layer)
  }
  return [...found].sort((a, b) => a - b)
}
