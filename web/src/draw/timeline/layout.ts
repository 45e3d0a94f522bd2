/** Where the stretches of a timeline lie: a row for each rank, time to the right. Pure; lengths are CSS pixels. */

export const CATEGORIES = [
  'forward',
  'backward',
  'wgrad',
  'optimizer',
  'kernel',
  'other',
  'transfer',
  'wait',
  'gap',
] as const
/** What a stretch was spent on. */
export type Category = (typeof CATEGORIES)[number]

export const CATEGORY_NAMES: Record<Category, string> = {
  forward: 'forward',
  backward: 'backward',
  wgrad: 'backward for the weights',
  optimizer: 'optimizer',
  kernel: 'kernels',
  other: 'other work',
  transfer: 'communication, transfer',
  wait: 'communication, waiting',
  gap: 'nothing known',
}

/** One stretch of one rank, in seconds from the start of the step. */
export interface Segment {
  rank: number
  start: number
  end: number
  category: Category
  label: string
}

/** What of the step is seen, in seconds. */
export interface Span {
  from: number
  to: number
}

export interface Size {
  width: number
  height: number
}

/** A rank's stretches, in order of their start. */
export interface Row {
  rank: number
  segments: readonly Segment[]
}

export interface Timeline {
  rows: readonly Row[]
  whole: Span
  /** Communication runs beside other work somewhere: it has a lane of its own then. */
  overlaps: boolean
}

export interface Box {
  segment: Segment
  x: number
  y: number
  width: number
  height: number
}

/** Room for the ranks' names on the left. */
export const GUTTER = 64
/** Room for the times below. */
export const AXIS = 22
export const LEAST_ROW = 9
export const MOST_ROW = 30
/** No span is shown larger than this part of the whole. */
const LARGEST = 2000
/** Stretches that touch overlap by rounding. */
const TOUCH = 1e-8

/** Stretches as rows; `ranks` says which ranks have one, in which order. */
export function timelineOf(segments: readonly Segment[], ranks: readonly number[]): Timeline {
  const byRank = new Map<number, Segment[]>(ranks.map((rank) => [rank, []]))
  let [from, to] = [Infinity, -Infinity]
  for (const segment of segments) {
    byRank.get(segment.rank)?.push(segment)
    from = Math.min(from, segment.start)
    to = Math.max(to, segment.end)
  }
  const rows = ranks.map((rank) => ({
    rank,
    segments: (byRank.get(rank) ?? []).sort((a, b) => a.start - b.start || b.end - a.end),
  }))
  const whole = from < to ? { from, to } : { from: 0, to: 1e-3 }
  return { rows, whole, overlaps: rows.some((row) => overlapping(row.segments)) }
}

/** Does one begin while another one runs? */
function overlapping(segments: readonly Segment[]): boolean {
  let until = -Infinity
  for (const { start, end, category } of segments) {
    if (category === 'gap') continue
    if (start < until - TOUCH) return true
    until = Math.max(until, end)
  }
  return false
}

export function isCommunication(category: Category): boolean {
  return category === 'transfer' || category === 'wait'
}

/** Height of the drawing: rows as high as suits their number. */
export function heightOf(rows: number, most: number): number {
  const row = Math.min(MOST_ROW, Math.max(LEAST_ROW, (most - AXIS) / Math.max(rows, 1)))
  return Math.ceil(row * Math.max(rows, 1)) + AXIS
}

export function rowHeight(timeline: Timeline, size: Size): number {
  return (size.height - AXIS) / Math.max(timeline.rows.length, 1)
}

export function xOf(time: number, span: Span, size: Size): number {
  return GUTTER + ((time - span.from) / (span.to - span.from)) * (size.width - GUTTER)
}

export function timeOf(x: number, span: Span, size: Size): number {
  return span.from + ((x - GUTTER) / (size.width - GUTTER)) * (span.to - span.from)
}

/** The boxes of one row that are seen, in the order in which they are drawn: what is known nothing of first. */
export function boxesOf(timeline: Timeline, row: number, span: Span, size: Size): Box[] {
  const height = rowHeight(timeline, size)
  const inner = Math.max(height - (height > 14 ? 4 : 1), 2)
  const top = row * height + (height - inner) / 2
  const boxes: Box[] = []
  for (const segment of timeline.rows[row]?.segments ?? []) {
    if (segment.end < span.from || segment.start > span.to) continue
    const left = Math.max(xOf(segment.start, span, size), GUTTER)
    const right = Math.min(xOf(segment.end, span, size), size.width)
    const lane = laneOf(segment.category, timeline.overlaps, inner)
    boxes.push({
      segment,
      x: left,
      y: top + lane.top,
      width: Math.max(right - left, 0.75),
      height: lane.height,
    })
  }
  return boxes.sort((a, b) => Number(b.segment.category === 'gap') - Number(a.segment.category === 'gap'))
}

/** Work above, communication below, where both run at once; else one lane for all. */
function laneOf(category: Category, overlaps: boolean, height: number): { top: number; height: number } {
  if (!overlaps) return { top: 0, height }
  const upper = Math.round(height * 0.58)
  return isCommunication(category) ? { top: upper, height: height - upper } : { top: 0, height: upper }
}

/** The box under a point; the last drawn of several; within two pixels, the nearest. */
export function boxAt(timeline: Timeline, x: number, y: number, span: Span, size: Size): Box | null {
  const row = rowAt(timeline, y, size)
  if (row === null || x < GUTTER) return null
  const boxes = boxesOf(timeline, row, span, size).filter(
    (box) => y >= box.y - 2 && y <= box.y + box.height + 2,
  )
  const under = boxes.filter((box) => x >= box.x && x <= box.x + box.width)
  const nearest = (box: Box): number => Math.max(box.x - x, x - box.x - box.width, 0)
  return (
    under.at(-1) ??
    boxes.filter((box) => nearest(box) <= 2).sort((a, b) => nearest(a) - nearest(b))[0] ??
    null
  )
}

export function rowAt(timeline: Timeline, y: number, size: Size): number | null {
  const row = Math.floor(y / rowHeight(timeline, size))
  return row >= 0 && row < timeline.rows.length && y < size.height - AXIS ? row : null
}

/** The nearest span that lies within the whole and is not too short. */
export function clamp(span: Span, whole: Span): Span {
  const all = whole.to - whole.from
  const wanted = span.to - span.from
  const length = Math.min(all, Math.max(all / LARGEST, Number.isFinite(wanted) ? wanted : all))
  const from = Math.min(
    Math.max(Number.isFinite(span.from) ? span.from : whole.from, whole.from),
    whole.to - length,
  )
  return { from, to: from + length }
}

/** Enlarged by a factor (below 1: made smaller) about a time, which stays where it is. */
export function zoom(span: Span, factor: number, about: number, whole: Span): Span {
  const length = (span.to - span.from) / factor
  const share = (about - span.from) / (span.to - span.from)
  return clamp({ from: about - share * length, to: about + (1 - share) * length }, whole)
}

export function pan(span: Span, seconds: number, whole: Span): Span {
  return clamp({ from: span.from + seconds, to: span.to + seconds }, whole)
}

/** `span`, moved so far that `segment` is seen, if it is not. */
export function showing(span: Span, segment: Segment, whole: Span): Span {
  if (segment.start >= span.from && segment.end <= span.to) return span
  if (segment.start <= span.from && segment.end >= span.to) return span
  const middle = (segment.start + segment.end) / 2
  return pan(span, middle - (span.from + span.to) / 2, whole)
}

/** The stretch `by` places after the given one in its row; of another row, `rows` further, the one at that time. */
export function neighbour(timeline: Timeline, from: Segment, by: number, rows: number): Segment {
  const row = timeline.rows.findIndex((one) => one.rank === from.rank)
  const target = timeline.rows[Math.min(Math.max(row + rows, 0), timeline.rows.length - 1)]
  if (!target?.segments.length) return from
  if (rows) return at(target.segments, (from.start + from.end) / 2)
  const place = target.segments.indexOf(from)
  return target.segments[Math.min(Math.max(place + by, 0), target.segments.length - 1)] ?? from
}

/** Of some stretches the one at a time, or the nearest. */
export function at(segments: readonly Segment[], time: number): Segment {
  const away = (one: Segment): number => Math.max(one.start - time, time - one.end, 0)
  return segments.reduce((best, one) => (away(one) < away(best) ? one : best))
}

/** Round times for the axis, about `count` of them. */
export function ticks(span: Span, count: number): number[] {
  const rough = (span.to - span.from) / Math.max(count, 1)
  const power = 10 ** Math.floor(Math.log10(rough))
  const step = [1, 2, 5, 10].map((times) => times * power).find((one) => one >= rough) ?? rough
  const found: number[] = []
  for (let n = Math.ceil(span.from / step); n * step <= span.to; n++) found.push(n * step)
  return found
}
