/** Bars on a canvas. */

export interface Bars {
  readonly values: Float32Array | Float64Array
  readonly missing?: Uint8Array
  readonly marked: readonly number[]
  readonly pointed: number | null
}

/** Bars that are wider than this have a gap between them. */
const GAP_FROM = 4

/** The bar below a pixel; null: beside all. */
export function placeAt(x: number, width: number, count: number): number | null {
  const at = Math.floor((x / width) * count)
  return at >= 0 && at < count ? at : null
}

/** Ends of the scale: 0 is always on it. */
export function rangeOf(values: Bars['values'], missing?: Uint8Array): { low: number; high: number } {
  let [low, high] = [0, 0]
  values.forEach((value, at) => {
    if (!Number.isFinite(value) || missing?.[at]) return
    low = Math.min(low, value)
    high = Math.max(high, value)
  })
  return low === high ? { low, high: low + 1 } : { low, high }
}

/** In device pixels. Of several bars on one pixel the longest is seen, as each is drawn a pixel wide at least. */
export function drawBars(canvas: HTMLCanvasElement, { values, missing, marked, pointed }: Bars): void {
  const context = canvas.getContext('2d')
  if (!context) return
  const style = getComputedStyle(canvas)
  const colour = (name: string): string => style.getPropertyValue(`--${name}`)
  const { width, height } = canvas
  const each = width / values.length
  const { low, high } = rangeOf(values, missing)
  const down = (value: number): number => ((high - value) / (high - low)) * height
  const wide = Math.max(1, each > GAP_FROM ? each - 1 : each)
  context.clearRect(0, 0, width, height)
  if (missing) {
    context.fillStyle = colour('line')
    missing.forEach((gone, at) => gone && context.fillRect(at * each, 0, Math.ceil(each), height))
  }
  const column = (at: number): void => {
    const value = values[at]
    if (value === undefined || missing?.[at]) return
    if (!Number.isFinite(value)) {
      const before = context.fillStyle
      context.fillStyle = colour('danger')
      context.fillRect(at * each, 0, wide, height)
      context.fillStyle = before
      return
    }
    const [top, bottom] = [down(Math.max(value, 0)), down(Math.min(value, 0))]
    context.fillRect(at * each, top, wide, Math.max(bottom - top, value ? 1 : 0))
  }
  context.fillStyle = colour('accent')
  values.forEach((_, at) => column(at))
  context.fillStyle = colour('warning')
  marked.forEach(column)
  if (pointed === null) return
  context.strokeStyle = colour('text')
  context.strokeRect(pointed * each - 0.5, 0.5, wide + 1, height - 1)
  column(pointed)
}
