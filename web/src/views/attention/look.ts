/** What of attention is shown, as the address says it. */

import type { Scale } from '../../draw/heatmap/scale'
import type { Address } from '../../state/address.svelte'

export const MODES = ['map', 'text'] as const
export const LOOK_SCALES = ['sqrt', 'linear', 'log'] as const satisfies readonly Scale[]
export const DIRECTIONS = ['from', 'to'] as const

export type Mode = (typeof MODES)[number]
export type LookScale = (typeof LOOK_SCALES)[number]
/** Of a picked token in the text: whom it looks at, or who looks at it. */
export type Direction = (typeof DIRECTIONS)[number]

export const SCALE_NAMES: Readonly<Record<LookScale, string>> = {
  sqrt: 'square root',
  linear: 'linear',
  log: 'logarithmic',
}

export class Look {
  constructor(private readonly address: Address) {}

  get mode(): Mode {
    return this.address.word('attention.mode', MODES, 'map')
  }

  get scale(): LookScale {
    return this.address.word('attention.scale', LOOK_SCALES, 'sqrt')
  }

  get direction(): Direction {
    return this.address.word('attention.direction', DIRECTIONS, 'from')
  }

  get peaks(): boolean {
    return this.address.flag('attention.peaks')
  }

  /** Layers and heads side by side. */
  get summary(): boolean {
    return this.address.flag('attention.summary')
  }

  /** Of a generated text: the step's own row, without those of earlier steps. */
  get single(): boolean {
    return this.address.flag('attention.single')
  }

  /** Positions of the picked query and key. */
  get query(): number | null {
    return this.address.whole('attention.row')
  }

  get key(): number | null {
    return this.address.whole('attention.key')
  }

  pick(query: number | null, key: number | null): void {
    this.address.set({ 'attention.row': query, 'attention.key': key })
  }

  choose(changes: Partial<{ mode: Mode; scale: LookScale; direction: Direction }>): void {
    this.address.set(Object.fromEntries(Object.entries(changes).map(([key, to]) => [`attention.${key}`, to])))
  }

  turn(flag: 'peaks' | 'summary' | 'single'): void {
    this.address.set({ [`attention.${flag}`]: this[flag] ? null : '1' })
  }

  nextScale(): void {
    const at = LOOK_SCALES.indexOf(this.scale)
    this.choose({ scale: LOOK_SCALES[(at + 1) % LOOK_SCALES.length] })
  }
}
