/** Lines over steps, drawn by uPlot: the one file that knows it. */

import uPlot from 'uplot'
import { drawMarks, drawSigns, SIGN_ROOM, type Inks, type Sign } from './ink'
import type { Paint } from './paint'
import { nearest, type Mark, type Series, type Span } from './series'
import { placing, tickTexts, ticksOf, type Scale } from './scale'
import type { Column, Columns, Table } from './table'

export interface Line {
  series: Series
  columns: Columns
  /** null: one of many, drawn all alike. */
  paint: Paint | null
}

export interface Model {
  table: Table
  /** Those that are seen. */
  lines: readonly Line[]
  /** Steps that are seen. */
  seen: Span
  scale: Scale
  marks: readonly Mark[]
  inks: Inks
}

export interface Told {
  /** The step under the pointer, and which of the many lines is near it, if any; null: it has left. */
  pointed: (at: { step: number; line: Line | null } | null) => void
  seek: (step: number) => void
  zoom: (first: number, last: number) => void
  fit: () => void
  drawn: () => void
}

/** A pointer that has moved so little has clicked. */
const CLICK_PIXELS = 4
const NEAR_PIXELS = 10
/** Room for the axis of steps. */
const BELOW = 28
const FONT = '12px system-ui, sans-serif'
const BAND_OPACITY = '38'
const LINE_PIXELS = 1.5
const TICK_PIXELS = { x: 80, y: 36 }

export class Plot {
  private plot: uPlot
  private built = ''
  /** The step that the keyboard has put the cursor on; the pointer takes it back when it moves. */
  private pinned: number | null = null

  constructor(
    private readonly node: HTMLElement,
    private model: Model,
    private readonly told: Told,
  ) {
    this.plot = this.build()
    node.addEventListener('mousemove', this.unpin, true)
  }

  show(model: Model): void {
    this.model = model
    if (structure(model) !== this.built) {
      this.plot.destroy()
      this.plot = this.build()
    } else {
      this.plot.batch(() => {
        this.plot.setData(dataOf(model), false)
        this.plot.setScale('x', { min: model.seen[0], max: model.seen[1] })
        this.plot.redraw(false, true) // the scale of y is ours: uPlot does not see that its numbers are others now
      })
    }
    if (this.pinned !== null) this.point(this.pinned)
  }

  resize(): void {
    const { clientWidth: width, clientHeight: height } = this.node
    if (width && height && (width !== this.plot.width || height !== this.plot.height))
      this.plot.setSize({ width, height })
  }

  /** Put the cursor on a step; null: take it away. */
  point(step: number | null): void {
    this.pinned = step
    const left = step === null ? -10 : this.plot.valToPos(step, 'x')
    this.plot.setCursor({ left, top: step === null ? -10 : this.plot.over.clientHeight / 2 }, false)
  }

  /** Where a step lies, in CSS pixels from the left of the node; null: outside. */
  left(step: number): number | null {
    const at = this.plot.valToPos(step, 'x')
    return at >= -0.5 && at <= this.plot.over.clientWidth + 0.5 ? at + this.plot.over.offsetLeft : null
  }

  /** The step at so many CSS pixels from the left of the window. */
  stepAt(clientX: number): number {
    return this.plot.posToVal(clientX - this.plot.over.getBoundingClientRect().left, 'x')
  }

  get canvas(): HTMLCanvasElement {
    return this.plot.ctx.canvas
  }

  destroy(): void {
    this.node.removeEventListener('mousemove', this.unpin, true)
    this.plot.destroy()
  }

  /** Browsers also say so when something has moved below a pointer at rest. */
  private readonly unpin = (event: MouseEvent): void => {
    if (event.movementX || event.movementY) this.pinned = null
  }

  private build(): uPlot {
    const { lines } = this.model
    this.built = structure(this.model)
    const coloured = lines.flatMap((line) => (line.paint ? [line.paint] : []))
    const options: uPlot.Options = {
      width: Math.max(this.node.clientWidth, 10),
      height: Math.max(this.node.clientHeight, 10),
      legend: { show: false },
      padding: [hasSigns(this.model) ? SIGN_ROOM : 8, 14, 0, 0],
      scales: { x: { time: false, range: () => [...this.model.seen] }, y: { range: [0, 1] } },
      axes: this.axes(),
      series: [{}, ...coloured.flatMap(seriesOf)],
      bands: coloured.map(({ colour }, at) => ({
        series: [at * 3 + 1, at * 3 + 2],
        fill: colour + BAND_OPACITY,
      })),
      cursor: {
        y: false,
        drag: { x: true, y: false, setScale: false, dist: CLICK_PIXELS },
        bind: { dblclick: () => () => (this.told.fit(), null) },
      },
      hooks: {
        drawAxes: [(plot) => this.drawOthers(plot)],
        draw: [(plot) => this.drawOver(plot)],
        setCursor: [(plot) => this.pointed(plot)],
        setSelect: [(plot) => this.selected(plot)],
      },
    }
    const plot = new uPlot(options, dataOf(this.model), this.node)
    this.listen(plot)
    return plot
  }

  private axes(): uPlot.Axis[] {
    const common = {
      font: FONT,
      stroke: () => this.model.inks.muted,
      grid: { stroke: () => this.model.inks.line + '66', width: 1 },
      ticks: { stroke: () => this.model.inks.line, width: 1, size: 4 },
    }
    const most = (plot: uPlot): number => Math.max(Math.floor((plot.height - BELOW) / TICK_PIXELS.y), 2)
    return [
      {
        ...common,
        size: BELOW,
        space: TICK_PIXELS.x,
        incrs: [1, 2, 5]
          .flatMap((nice) => Array.from({ length: 9 }, (_, power) => nice * 10 ** power))
          .sort((a, b) => a - b),
        values: (_, steps) => steps.map(String),
      },
      {
        ...common,
        size: (_, texts) => 14 + 7.2 * Math.max(...(texts ?? []).map((text) => text.length), 3),
        // To uPlot the axis goes from 0 to 1: it draws none of very large numbers, and its logarithms lack zero.
        incrs: [1],
        splits: (plot) => ticksOf(this.model.scale, most(plot)).map(placing(this.model.scale)),
        filter: (_, ticks) => ticks,
        values: (plot) => tickTexts(ticksOf(this.model.scale, most(plot))),
      },
    ]
  }

  private listen(plot: uPlot): void {
    let down = 0
    plot.over.addEventListener('mouseleave', () => {
      if (this.pinned === null) this.told.pointed(null)
    })
    plot.over.addEventListener('mousedown', (event) => (down = event.clientX))
    plot.over.addEventListener('click', (event) => {
      if (Math.abs(event.clientX - down) > CLICK_PIXELS || event.detail > 1) return
      const at = nearest(this.model.table.steps, this.stepAt(event.clientX))
      if (at >= 0) this.told.seek(this.model.table.steps[at]!)
    })
  }

  private pointed(plot: uPlot): void {
    const { idx, top } = plot.cursor
    const step = idx === null || idx === undefined ? undefined : this.model.table.steps[idx]
    // It also comes with every drawing, wherever the pointer is.
    if (step !== undefined && this.pinned === null)
      this.told.pointed({ step, line: this.near(plot, idx!, top ?? 0) })
  }

  /** Of the many lines the one at this place, if it is near. */
  private near(plot: uPlot, row: number, top: number): Line | null {
    const place = placing(this.model.scale)
    let found: Line | null = null
    let least = NEAR_PIXELS
    for (const line of this.model.lines) {
      const value = line.columns.mean[row]
      if (line.paint || typeof value !== 'number') continue
      const away = Math.abs(plot.valToPos(place(value), 'y') - top)
      if (away < least) [found, least] = [line, away]
    }
    return found
  }

  private selected(plot: uPlot): void {
    const { left, width } = plot.select
    if (width < CLICK_PIXELS) return
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false)
    this.told.zoom(plot.posToVal(left, 'x'), plot.posToVal(left + width, 'x'))
  }

  /** The many, as one path below all others. */
  private drawOthers(plot: uPlot): void {
    const { ctx, bbox } = plot
    const path = new Path2D()
    const { table, lines, scale, seen } = this.model
    const place = placing(scale)
    for (const { columns, paint } of lines)
      if (!paint) trace(path, table.steps, placed(columns.mean, place), plot, seen)
    ctx.save()
    ctx.beginPath()
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height)
    ctx.clip()
    ctx.globalAlpha = 0.4
    ctx.lineWidth = uPlot.pxRatio
    ctx.strokeStyle = this.model.inks.muted
    ctx.stroke(path)
    ctx.restore()
  }

  private drawOver(plot: uPlot): void {
    const { ctx, bbox } = plot
    const { inks, marks, lines } = this.model
    const x = (step: number): number => plot.valToPos(step, 'x', true)
    ctx.save()
    drawMarks(
      ctx,
      marks.map((mark) => ({ x: x(mark.step), mark })),
      bbox,
      inks,
      uPlot.pxRatio,
    )
    drawSigns(
      ctx,
      lines.flatMap(({ series }) => signsOf(series, x)),
      bbox,
      inks,
      uPlot.pxRatio,
    )
    ctx.restore()
    this.told.drawn()
  }
}

/** What cannot be changed without building anew. */
function structure(model: Model): string {
  const paint = model.lines.map((line) => line.paint).filter((one) => one !== null)
  return JSON.stringify([paint, hasSigns(model)])
}

function hasSigns({ lines }: Model): boolean {
  return lines.some(({ series }) => [series.nan, series.inf].some((counts) => counts?.some((n) => n > 0)))
}

function signsOf(series: Series, x: (step: number) => number): Sign[] {
  const found: Sign[] = []
  series.step.forEach((step, at) => {
    if (series.nan?.[at]) found.push({ x: x(step), kind: 'nan' })
    if (series.inf?.[at]) found.push({ x: x(step), kind: 'infinite' })
  })
  return found
}

function seriesOf({ colour, dash }: Paint): uPlot.Series[] {
  const edge: uPlot.Series = { width: 0, points: { show: false } }
  return [
    edge,
    edge,
    { stroke: colour, width: LINE_PIXELS, dash: [...dash], points: { size: 5, fill: colour } },
  ]
}

function dataOf({ table, lines, scale }: Model): uPlot.AlignedData {
  const place = placing(scale)
  const columns = lines.flatMap(({ columns: { max, min, mean }, paint }) =>
    paint ? [max, min, mean].map((column) => placed(column, place)) : [],
  )
  return [table.steps, ...columns] as uPlot.AlignedData
}

function placed(column: Column, place: (value: number) => number): Column {
  return column.map((value) => (typeof value === 'number' ? place(value) : value))
}

function trace(path: Path2D, steps: Float64Array, column: Column, plot: uPlot, [first, last]: Span): void {
  let pen = false
  for (let at = 0; at < steps.length; at++) {
    const value = column[at]
    if (value === undefined || (steps[at + 1] ?? Infinity) < first) continue
    if (value === null) {
      pen = false
      continue
    }
    const [x, y] = [plot.valToPos(steps[at]!, 'x', true), plot.valToPos(value, 'y', true)]
    if (!pen) path.moveTo(x, y)
    path.lineTo(pen ? x : x + 1, y) // what stands alone is seen, too
    pen = true
    if (steps[at]! > last) break
  }
}
