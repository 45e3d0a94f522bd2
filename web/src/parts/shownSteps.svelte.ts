/** Which steps charts show: all, or those of the address's `first` and `last`, to which they are zoomed. */

import type { Span } from '../draw/series/series'
import type { Services } from '../state/services'

export class ShownSteps {
  constructor(
    private readonly services: Pick<Services, 'address' | 'time'>,
    /** Columns at most: of more steps each is some of them. */
    readonly buckets: number,
  ) {}

  /** All that there are; null: none. */
  all: Span | null = $derived.by(() => {
    const { first, last } = this.services.time
    return first === null || last === null ? null : [first, last]
  })

  /** Those that are shown; null: all. */
  zoomed: Span | null = $derived.by(() => {
    const { address } = this.services
    const [first, last] = [address.whole('first'), address.whole('last')]
    if (this.all === null || (first === null && last === null)) return null
    const span: Span = [first ?? this.all[0], last ?? this.all[1]]
    return span[0] <= span[1] ? span : null
  })

  /** Those to load, so that moving a little needs no loading: half as many on either side; null: all. */
  loaded: Span | null = $derived.by(() => {
    if (!this.zoomed || !this.all) return null
    const [first, last] = this.zoomed
    const side = Math.ceil((last - first + 1) / 2)
    const span: Span = [Math.max(first - side, this.all[0]), Math.min(last + side, this.all[1])]
    if (span[0] > span[1]) return this.zoomed
    return span[0] === this.all[0] && span[1] === this.all[1] ? null : span
  })

  /** For requests. */
  first: number | undefined = $derived.by(() => this.loaded?.[0])
  last: number | undefined = $derived.by(() => this.loaded?.[1])

  /** The last column that there is yet: what was loaded when it was another is out of date. */
  filled: number = $derived.by(() => {
    if (this.all === null) return -1
    const [first, last] = this.loaded ?? this.all
    const width = Math.max(Math.ceil((last - first + 1) / this.buckets), 1)
    return Math.floor(Math.min(last, this.all[1]) / width)
  })

  /** Show these; null: all. */
  zoom = (to: Span | null): void => {
    const last = to && this.all ? Math.min(to[1], Math.max(this.all[1], to[0])) : null
    this.services.address.set({ first: to?.[0], last })
  }
}
