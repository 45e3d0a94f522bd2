import { describe, expect, it } from 'vitest'
import { rowTicks } from './axes'
import { commandOf, moved } from './commands'
import { random } from './random.testing'
import { round, sampled, shortened, ticks } from './ticks'
import {
  box,
  cellAt,
  clamp,
  fit,
  pan,
  rectangle,
  reveal,
  same,
  zoom,
  zoomAxes,
  type HeatWindow,
} from './viewport'

const GRID = { width: 200, height: 50 }
const SCREEN = { width: 800, height: 400 }
const WHOLE = fit(GRID, SCREEN)

function within(window: HeatWindow, whole = WHOLE): void {
  expect(window.left).toBeGreaterThanOrEqual(whole.left - 1e-9)
  expect(window.top).toBeGreaterThanOrEqual(whole.top - 1e-9)
  expect(window.left + window.width).toBeLessThanOrEqual(whole.left + whole.width + 1e-9)
  expect(window.top + window.height).toBeLessThanOrEqual(whole.top + whole.height + 1e-9)
  expect(Math.min(window.width, window.height)).toBeGreaterThanOrEqual(1 - 1e-9)
}

describe('fit', () => {
  it('shows all', () => expect(WHOLE).toEqual({ left: 0, top: 0, width: 200, height: 50 }))

  it('with square cells leaves room on one side', () => {
    const whole = fit(GRID, SCREEN, true)
    expect(whole.width / SCREEN.width).toBeCloseTo(whole.height / SCREEN.height)
    expect(whole).toEqual({ left: 0, top: -50, width: 200, height: 100 })
  })

  it('of nothing is nothing', () => {
    expect(fit({ width: 0, height: 0 }, SCREEN, true)).toEqual({ left: 0, top: 0, width: 0, height: 0 })
  })
})

describe('moving', () => {
  it('pan: what is under the pointer stays under it', () => {
    const before = { left: 40, top: 10, width: 100, height: 20 }
    const after = pan(before, { x: 80, y: -40 }, SCREEN, WHOLE)
    expect(after).toEqual({ left: 30, top: 12, width: 100, height: 20 })
    expect(cellAt({ x: 180, y: 60 }, after, SCREEN, GRID)).toEqual(
      cellAt({ x: 100, y: 100 }, before, SCREEN, GRID),
    )
  })

  it('zoom: the point stays where it is', () => {
    const at = { x: 300, y: 200 }
    const before = { left: 40, top: 10, width: 100, height: 20 }
    const after = zoom(before, 2, at, SCREEN, WHOLE)
    expect(after).toMatchObject({ width: 50, height: 10 })
    expect(after.left + (at.x / SCREEN.width) * after.width).toBeCloseTo(77.5)
    expect(zoom(before, 2, at, SCREEN, WHOLE, 'columns')).toMatchObject({ width: 50, height: 20, top: 10 })
  })

  it('zoom leaves alone what is clear as it is', () => {
    expect(zoomAxes({ width: 2000, height: 8 }, SCREEN, false)).toBe('columns')
    expect(zoomAxes({ width: 8, height: 2000 }, SCREEN, false)).toBe('rows')
    expect(zoomAxes({ width: 2000, height: 8 }, SCREEN, true)).toBe('both')
    expect([GRID, { width: 9, height: 9 }].map((grid) => zoomAxes(grid, SCREEN, false))).toEqual([
      'both',
      'both',
    ])
  })

  it('never leaves the grid: 500 random gestures', () => {
    const next = random(7)
    for (const whole of [WHOLE, fit(GRID, SCREEN, true)]) {
      let window = whole
      for (let trial = 0; trial < 500; trial++) {
        const at = { x: next() * SCREEN.width, y: next() * SCREEN.height }
        if (next() < 0.5) window = zoom(window, Math.exp(4 * (next() - 0.4)), at, SCREEN, whole)
        else window = pan(window, { x: 900 * (next() - 0.5), y: 900 * (next() - 0.5) }, SCREEN, whole)
        within(window, whole)
      }
    }
  })

  it('clamp takes windows of a link for what they can be', () => {
    expect(clamp({ left: NaN, top: 1e9, width: -3, height: Infinity }, WHOLE)).toEqual({
      left: 0,
      top: 0,
      width: 1,
      height: 50,
    })
  })

  it('reveal moves no farther than needed', () => {
    const window = { left: 40, top: 10, width: 20, height: 10 }
    expect(reveal({ row: 12, column: 45 }, window, WHOLE)).toBe(window)
    expect(reveal({ row: 25, column: 39 }, window, WHOLE)).toMatchObject({ left: 39, top: 16 })
  })

  it('box: whole cells between two points, in any direction', () => {
    const wanted = { left: 25, top: 5, width: 26, height: 11 }
    expect(box({ x: 101, y: 41 }, { x: 203, y: 121 }, WHOLE, SCREEN, WHOLE)).toEqual(wanted)
    expect(box({ x: 203, y: 121 }, { x: 101, y: 41 }, WHOLE, SCREEN, WHOLE)).toEqual(wanted)
    const whole = fit(GRID, SCREEN, true)
    const square = box({ x: 10, y: 210 }, { x: 50, y: 300 }, whole, SCREEN, whole, true)
    expect(square.width / SCREEN.width).toBeCloseTo(square.height / SCREEN.height)
  })
})

describe('cells and pixels', () => {
  it('agree: 300 random points', () => {
    const next = random(8)
    for (let trial = 0; trial < 300; trial++) {
      const window = clamp(
        { left: next() * 200, top: next() * 50, width: next() * 99, height: next() * 50 },
        WHOLE,
      )
      const at = { x: next() * SCREEN.width, y: next() * SCREEN.height }
      const cell = cellAt(at, window, SCREEN, GRID)!
      const { x, y, width, height } = rectangle(cell, window, SCREEN)
      expect(at.x).toBeGreaterThanOrEqual(x - 1e-6)
      expect(at.x).toBeLessThanOrEqual(x + width + 1e-6)
      expect(at.y).toBeGreaterThanOrEqual(y - 1e-6)
      expect(at.y).toBeLessThanOrEqual(y + height + 1e-6)
    }
  })

  it('beside the grid there is none', () => {
    expect(cellAt({ x: 10, y: 10 }, fit(GRID, SCREEN, true), SCREEN, GRID)).toBeNull()
  })

  it('windows are the same up to rounding', () => {
    expect(same(WHOLE, { ...WHOLE, left: 1e-9 })).toBe(true)
    expect(same(WHOLE, { ...WHOLE, width: 199 })).toBe(false)
  })
})

describe('ticks', () => {
  it('of rows have labels within the map, one below the other', () => {
    const axis = { count: 40, label: String, title: 'row' }
    for (const pixels of [9, 30, 47, 320]) {
      const found = rowTicks(axis, 0, 40, pixels)
      expect(found.length).toBeGreaterThan(0)
      found.forEach(({ y }, which) => {
        if (pixels >= 12) expect(Math.abs(y - pixels / 2)).toBeLessThanOrEqual(pixels / 2 - 6)
        if (which > 0) expect(y - found[which - 1]!.y).toBeGreaterThanOrEqual(12)
      })
    }
  })

  it('are round, within the window, and far enough apart', () => {
    const next = random(9)
    for (let trial = 0; trial < 200; trial++) {
      const count = 1 + Math.floor(next() * 5000)
      const length = 1 + next() * count
      const start = next() * (count - length)
      const found = ticks(start, length, 700, count, 60)
      found.forEach(({ index, at }, which) => {
        expect(at).toBeGreaterThanOrEqual(0)
        expect(at).toBeLessThanOrEqual(700)
        expect(index).toBeLessThan(count)
        if (which > 0) expect(at - found[which - 1]!.at).toBeGreaterThanOrEqual(60 - 1e-6)
      })
      expect(found.length).toBeGreaterThan(0)
    }
  })

  it('are at round numbers where cells stand for such', () => {
    const labelled = (steps: (number | null)[], room = 60) =>
      ticks(0, steps.length, 700, steps.length, room, (index) => steps[index] ?? null).map(
        ({ index }) => steps[index],
      )
    const run = (first: number, count: number, by = 1) =>
      Array.from({ length: count }, (_, at) => first + at * by)
    expect(labelled(run(58, 50))).toEqual([60, 65, 70, 75, 80, 85, 90, 95, 100, 105])
    expect(labelled([...run(1, 20), null, ...run(500, 30)])).toEqual([5, 10, 15, 20, 505, 510, 515, 520, 525])
    expect(labelled(run(0, 40, 8), 100)).toEqual([0, 48, 96, 144, 200, 248, 296]) // each column is eight steps
    expect(labelled(run(3, 14, 10), 100)).toEqual([13, 33, 53, 73, 93, 113, 133]) // none is round: those about it
    expect(labelled([7])).toEqual([7])
    expect(labelled([null, null])).toEqual([null, null])
  })

  it('stand in the middle of cells', () => {
    expect(ticks(0, 4, 400, 4, 50)).toEqual([0, 1, 2, 3].map((index) => ({ index, at: 50 + 100 * index })))
    expect(ticks(0, 0, 400, 0, 50)).toEqual([])
  })

  it('have round distances, short labels, and a sample of them', () => {
    expect([0.2, 1, 1.5, 3, 7, 11, 210].map(round)).toEqual([1, 1, 2, 5, 10, 20, 500])
    expect(shortened('decoder.layers.12', 9)).toBe('…ayers.12')
    expect(shortened('layer', 9)).toBe('layer')
    expect(sampled(3)).toEqual([0, 1, 2])
    expect(sampled(1000, 10)).toHaveLength(11)
    expect(sampled(0)).toEqual([])
  })
})

describe('keys', () => {
  const press = (key: string, more = {}) =>
    commandOf({ key, shiftKey: false, ctrlKey: false, metaKey: false, altKey: false, ...more })

  it('say what they do', () => {
    expect(press('ArrowLeft')).toEqual({ kind: 'move', rows: 0, columns: -1 })
    expect(press('ArrowDown', { shiftKey: true })).toMatchObject({ rows: 10 })
    expect(press('+')).toMatchObject({ kind: 'zoom', factor: 1.5 })
    expect(['0', 'Home', 'n', 'Enter', 'Escape', 'q'].map((key) => press(key)?.kind)).toEqual([
      'fit',
      'fit',
      'special',
      'pick',
      'leave',
      undefined,
    ])
    expect(press('ArrowLeft', { ctrlKey: true })).toBeNull()
  })

  it('stop at the edges', () => {
    expect(moved({ row: 49, column: 3 }, 10, -10, GRID)).toEqual({ row: 49, column: 0 })
  })
})
