/** Which tensor the grid shows, of those that were recorded. */

export interface RecordedTap {
  name: string
  what: readonly string[]
  ranks: readonly number[]
}

const LAYER = /^layers\.\d+\./

export function hasStatistics({ what }: Pick<RecordedTap, 'what'>): boolean {
  return what.includes('statistics') || what.includes('histogram')
}

/** What is shown unless chosen: the output of the last layer, else of a layer, else whatever there is. */
export function usualTap(taps: readonly RecordedTap[]): string {
  const names = taps.filter(hasStatistics).map(({ name }) => name)
  const layers = names.filter((name) => LAYER.test(name))
  return layers.findLast((name) => /^layers\.\d+\.output$/.test(name)) ?? layers.at(-1) ?? names[0] ?? ''
}

/**
 * Where a tensor of a layer exists on one stage only: the same tensor of the last layer of every stage, so that all
 * ranks can be seen. Any other tensor, and one that is not there: itself.
 */
export function ofEveryStage(tap: string, taps: readonly RecordedTap[]): string[] {
  if (!LAYER.test(tap) || !taps.some(({ name }) => name === tap)) return [tap]
  const rest = tap.replace(LAYER, '')
  const family = taps.filter(
    (one) => LAYER.test(one.name) && one.name.replace(LAYER, '') === rest && hasStatistics(one),
  )
  const stages = new Map<string, string>()
  for (const { name, ranks } of family) stages.set(ranks.join(), name)
  return stages.size ? [...stages.values()] : [tap]
}

/** One name, or the pattern of several of the same kind. */
export function nameOf(taps: readonly string[]): string {
  return taps.length === 1 ? taps[0]! : (taps[0]?.replace(LAYER, 'layers.*.') ?? '')
}
