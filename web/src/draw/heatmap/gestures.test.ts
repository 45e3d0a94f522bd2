// @vitest-environment jsdom
import { afterEach, beforeEach, expect, it, vi } from 'vitest'
import { listen, type Gestures } from './gestures'

const heard = {
  hover: vi.fn<Gestures['hover']>(),
  pick: vi.fn<Gestures['pick']>(),
  pan: vi.fn<Gestures['pan']>(),
  zoom: vi.fn<Gestures['zoom']>(() => true),
  box: vi.fn<Gestures['box']>(),
  fit: vi.fn<Gestures['fit']>(),
}
let element: HTMLElement
let end: () => void

beforeEach(() => {
  element = document.createElement('div')
  end = listen(element, heard)
})

afterEach(() => {
  end()
  vi.clearAllMocks()
})

function pointer(name: string, x: number, y: number, more: PointerEventInit = {}): void {
  element.dispatchEvent(new PointerEvent(name, { clientX: x, clientY: y, pointerId: 1, button: 0, ...more }))
}

it('a press that stays where it is picks', () => {
  pointer('pointerdown', 10, 10)
  pointer('pointermove', 12, 11)
  pointer('pointerup', 12, 11)
  expect(heard.pick).toHaveBeenCalledExactlyOnceWith({ x: 12, y: 11 })
  expect(heard.pan).not.toHaveBeenCalled()
})

it('a press that moves pans by all of the way, and does not pick', () => {
  pointer('pointerdown', 10, 10)
  pointer('pointermove', 30, 10)
  pointer('pointermove', 35, 25)
  pointer('pointerup', 35, 25)
  const way = heard.pan.mock.calls.map(([by]) => by)
  expect([way.reduce((sum, by) => sum + by.x, 0), way.reduce((sum, by) => sum + by.y, 0)]).toEqual([25, 15])
  expect(heard.hover).toHaveBeenLastCalledWith({ x: 35, y: 25 })
  expect(heard.pick).not.toHaveBeenCalled()
})

it('with shift a box is drawn', () => {
  pointer('pointerdown', 10, 10, { shiftKey: true })
  pointer('pointermove', 50, 40)
  pointer('pointerup', 60, 50)
  expect(heard.box.mock.calls).toEqual([
    [{ x: 10, y: 10 }, { x: 50, y: 40 }, false],
    [{ x: 10, y: 10 }, { x: 60, y: 50 }, true],
  ])
  expect(heard.pan).not.toHaveBeenCalled()
})

it('a box that the system interrupts is given up', () => {
  pointer('pointerdown', 10, 10, { shiftKey: true })
  pointer('pointermove', 50, 40)
  pointer('pointercancel', 50, 40)
  expect(heard.box).toHaveBeenLastCalledWith({ x: 10, y: 10 }, null, true)
})

it('two fingers enlarge about their middle by as much as they part', () => {
  pointer('pointerdown', 100, 50, { pointerId: 1 })
  pointer('pointerdown', 200, 50, { pointerId: 2 })
  pointer('pointermove', 300, 50, { pointerId: 2 })
  expect(heard.zoom).toHaveBeenCalledExactlyOnceWith(2, { x: 200, y: 50 })
  pointer('pointerup', 300, 50, { pointerId: 2 })
  pointer('pointerup', 100, 50, { pointerId: 1 })
  expect(heard.pick).not.toHaveBeenCalled()
})

it('other buttons do nothing', () => {
  pointer('pointerdown', 10, 10, { button: 2 })
  pointer('pointermove', 90, 10)
  expect(heard.pan).not.toHaveBeenCalled()
  expect(heard.hover).toHaveBeenCalledWith({ x: 90, y: 10 })
})

it('the wheel zooms, and the page scrolls where there is nothing to zoom', () => {
  const turn = () => {
    const event = new WheelEvent('wheel', { deltaY: -400, clientX: 5, clientY: 6, cancelable: true })
    element.dispatchEvent(event)
    return event.defaultPrevented
  }
  expect(turn()).toBe(true)
  expect(heard.zoom).toHaveBeenCalledWith(expect.closeTo(Math.E), { x: 5, y: 6 })
  heard.zoom.mockReturnValueOnce(false)
  expect(turn()).toBe(false)
})

it('leaving, double clicks and the end', () => {
  element.dispatchEvent(new MouseEvent('dblclick', { cancelable: true }))
  expect(heard.fit).toHaveBeenCalledOnce()
  element.dispatchEvent(new PointerEvent('pointerleave'))
  expect(heard.hover).toHaveBeenLastCalledWith(null)
  end()
  pointer('pointermove', 1, 1)
  expect(heard.hover).toHaveBeenCalledOnce()
})
