// @vitest-environment jsdom
import { beforeEach, describe, expect, it, vi } from 'vitest'

let written: string[] = []

/** A canvas that draws nothing and notes what is written on it. */
function context(canvas: HTMLCanvasElement): unknown {
  return new Proxy(
    { canvas, measureText: () => ({ width: 20 }), fillText: (text: string) => written.push(text) },
    {
      get: (target, name) => Reflect.get(target, name) ?? (() => undefined),
      set: () => true,
    },
  )
}

beforeEach(() => {
  written = []
  vi.stubGlobal(
    'Path2D',
    class {
      moveTo = () => undefined
      lineTo = () => undefined
      rect = () => undefined
      arc = () => undefined
      addPath = () => undefined
    },
  )
  vi.stubGlobal('matchMedia', () => ({
    addEventListener: () => undefined,
    removeEventListener: () => undefined,
  }))
  HTMLCanvasElement.prototype.getContext = function (this: HTMLCanvasElement) {
    return context(this)
  } as unknown as HTMLCanvasElement['getContext']
})

describe('the numbers at the axis', () => {
  it('are those of the values that are drawn, also after these have changed', async () => {
    const { Plot } = await import('./plot')
    const { paints } = await import('./paint')
    const { tableOf } = await import('./table')
    const { scaleOf } = await import('./scale')
    const node = document.createElement('div')
    Object.defineProperty(node, 'clientWidth', { value: 600 })
    Object.defineProperty(node, 'clientHeight', { value: 300 })
    const model = (low: number, high: number) => {
      const mean = [low, high, low, high]
      const series = [{ label: 'a', step: [0, 1, 2, 3], min: mean, max: mean, mean }]
      const table = tableOf(series)
      const [paint] = paints(series, table.columns, 'dark')
      const lines = [{ series: series[0]!, columns: table.columns[0]!, paint: paint! }]
      return {
        table,
        lines,
        seen: [0, 3],
        scale: scaleOf(table.steps, table.columns, [0, 3], false),
        marks: [],
        inks: {},
      }
    }
    const told = { pointed: vi.fn(), seek: vi.fn(), zoom: vi.fn(), fit: vi.fn(), drawn: vi.fn() }
    const plot = new Plot(node, model(0.52, 0.6) as never, told)
    await new Promise((done) => queueMicrotask(() => done(null)))
    expect(written).toContain('0.54')
    written = []
    plot.show(model(3, 7) as never)
    await new Promise((done) => queueMicrotask(() => done(null)))
    expect(written).toContain('5')
    expect(written).not.toContain('0.54')
    plot.destroy()
  })
})
