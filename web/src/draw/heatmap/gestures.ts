/** What mouse, pen and fingers do on a map: hover, pick, pan, pinch, drag a box, turn the wheel. */
import type { Point } from './viewport'

export interface Gestures {
  hover(point: Point | null): void
  pick(point: Point): void
  pan(by: Point): void
  /** Whether it did something; the page scrolls where it did not. */
  zoom(factor: number, about: Point): boolean
  /** Null: it was given up. */
  box(from: Point, to: Point | null, done: boolean): void
  fit(): void
}

/** A press that moves less is a click. */
const STILL = 4

/** Pixels of the wheel that enlarge e-fold. */
const WHEEL = 400
const LINE = 16
const PAGE = 400

/** Listens on an element; what is returned ends it. */
export function listen(element: HTMLElement, gestures: Gestures): () => void {
  const press = new Press(gestures)
  const at = (event: MouseEvent): Point => {
    const box = element.getBoundingClientRect()
    return { x: event.clientX - box.left, y: event.clientY - box.top }
  }
  const ends = new AbortController()
  const on = <K extends keyof HTMLElementEventMap>(name: K, hear: (event: HTMLElementEventMap[K]) => void) =>
    element.addEventListener(name, hear, { signal: ends.signal, passive: false })

  on('pointerdown', (event) => {
    if (event.button !== 0) return
    // So that a drag goes on beside the element. A pointer that is gone already cannot be captured.
    if (element.hasPointerCapture !== undefined) capture(element, event.pointerId)
    press.begin(event.pointerId, at(event), event.shiftKey)
  })
  on('pointermove', (event) => press.move(event.pointerId, at(event)))
  on('pointerup', (event) => press.end(event.pointerId, at(event)))
  on('pointercancel', (event) => press.cancel(event.pointerId))
  on('pointerleave', () => gestures.hover(null))
  on('dblclick', (event) => {
    event.preventDefault()
    gestures.fit()
  })
  on('wheel', (event) => {
    const pixels = event.deltaY * (event.deltaMode === 1 ? LINE : event.deltaMode === 2 ? PAGE : 1)
    if (pixels !== 0 && gestures.zoom(Math.exp(-pixels / WHEEL), at(event))) event.preventDefault()
  })
  return () => ends.abort()
}

function capture(element: HTMLElement, pointer: number): void {
  try {
    element.setPointerCapture(pointer)
  } catch {
    // it was lifted before the event came
  }
}

/** Pointers that are down. */
class Press {
  private readonly down = new Map<number, Point>()
  private start: Point | null = null
  private moved = false
  private boxed = false

  constructor(private readonly gestures: Gestures) {}

  begin(pointer: number, point: Point, shift: boolean): void {
    this.down.set(pointer, point)
    if (this.down.size > 1) {
      if (this.boxed) this.gestures.box(point, null, true)
      this.moved = true
      this.boxed = false
      return
    }
    this.start = point
    this.moved = false
    this.boxed = shift
  }

  move(pointer: number, point: Point): void {
    const before = this.down.get(pointer)
    if (before === undefined || this.start === null) {
      this.gestures.hover(point)
      return
    }
    this.moved ||= Math.hypot(point.x - this.start.x, point.y - this.start.y) >= STILL
    if (!this.moved) return
    if (this.down.size > 1) this.pinch(pointer, before, point)
    else if (this.boxed) this.gestures.box(this.start, point, false)
    else {
      this.gestures.pan({ x: point.x - before.x, y: point.y - before.y })
      this.gestures.hover(point)
    }
    this.down.set(pointer, point)
  }

  end(pointer: number, point: Point): void {
    if (!this.down.delete(pointer) || this.down.size > 0 || this.start === null) return
    if (!this.moved) this.gestures.pick(point)
    else if (this.boxed) this.gestures.box(this.start, point, true)
    this.start = null
  }

  cancel(pointer: number): void {
    if (!this.down.delete(pointer)) return
    if (this.boxed && this.start !== null) this.gestures.box(this.start, null, true)
    this.boxed = false
    if (this.down.size === 0) this.start = null
  }

  /** Two fingers: the middle moves the map, their distance enlarges it. */
  private pinch(pointer: number, before: Point, now: Point): void {
    const other = [...this.down].find(([id]) => id !== pointer)?.[1]
    if (other === undefined) return
    this.gestures.pan({ x: (now.x - before.x) / 2, y: (now.y - before.y) / 2 })
    const [was, is] = [before, now].map((point) => Math.hypot(point.x - other.x, point.y - other.y))
    const middle = { x: (now.x + other.x) / 2, y: (now.y + other.y) / 2 }
    if (was! > 1 && is! > 1) this.gestures.zoom(is! / was!, middle)
  }
}
