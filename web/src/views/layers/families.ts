/** Tensors that every layer has one of, as patterns. */

import { hasStatistics, type RecordedTap } from '../ranks/taps'

const LAYER = /^layers\.(\d+)\./

/** `layers.*.output` and so on, of those that there are statistics of, in the order of the model. */
export function familiesOf(taps: readonly RecordedTap[]): string[] {
  const names = taps.filter((tap) => LAYER.test(tap.name) && hasStatistics(tap))
  return [...new Set(names.map(({ name }) => name.replace(LAYER, 'layers.*.')))]
}

/** What is shown unless chosen. */
export function usualFamily(families: readonly string[]): string {
  return families.find((family) => family === 'layers.*.output') ?? families[0] ?? ''
}

/** The number of its layer; a tensor of none has its name. */
export function rowLabel(name: string): string {
  return LAYER.exec(name)?.[1] ?? name
}

/** Are all of them the same tensor of different layers? */
export function oneFamily(names: readonly string[]): boolean {
  return (
    familiesOf(names.map((name) => ({ name, what: ['statistics'], ranks: [] }))).length === 1 &&
    names.every((name) => LAYER.test(name))
  )
}
