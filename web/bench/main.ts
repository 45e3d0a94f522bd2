/** What benchmarks/web_heatmap.py measures, as functions of the page. Times are in ms. */
import { mount, unmount } from 'svelte'
import '../src/app.css'
import HeatMap from '../src/parts/HeatMap.svelte'
import { CONTENDERS, tiles, type Contender } from './contenders'

const SCREEN = { width: 1280, height: 800 }
const app = document.getElementById('app')!

interface Bench {
  names: string[]
  /** Bytes to the first picture of all cells, and frames of a pan over `across` cells. */
  measure(name: string, side: number, across: number, frames: number): Promise<Measured>
  /** The component in the page: from mounting to the frame that shows it. It stays for dragging, until the next. */
  component(side: number, renderer: 'webgl2' | 'canvas'): Promise<number>
  /** Times between frames of the browser, until `stop`. */
  watch(): { stop(): number[] }
}

interface Measured {
  first: number
  pans: number[]
  between: number[]
}

const cells = new Map<number, ReturnType<typeof tiles>>()
let mounted: ReturnType<typeof mount> | null = null

function grid(side: number) {
  const made = cells.get(side) ?? tiles(side)
  cells.set(side, made)
  return made
}

function frame(): Promise<number> {
  return new Promise((resolve) => requestAnimationFrame(resolve))
}

async function measure(name: string, side: number, across: number, frames: number): Promise<Measured> {
  const canvas = document.createElement('canvas')
  Object.assign(canvas, SCREEN)
  app.replaceChildren(canvas)
  const drawn = grid(side)
  await frame()
  const contender = CONTENDERS[name]!(canvas)
  const begin = performance.now()
  contender.first(drawn, { left: 0, top: 0, width: side, height: side })
  contender.settle()
  const first = performance.now() - begin
  const measured = { first, ...(await pan(contender, side, across, frames)) }
  contender.dispose()
  app.replaceChildren()
  return measured
}

async function pan(contender: Contender, side: number, across: number, frames: number) {
  const height = (across * SCREEN.height) / SCREEN.width
  const [pans, between]: number[][] = [[], []]
  let last = await frame()
  for (let at = 0; at < frames; at++) {
    const share = at / frames
    const now = await frame()
    const begin = performance.now()
    contender.draw({ left: (side - across) * share, top: (side - height) * share, width: across, height })
    contender.settle()
    pans!.push(performance.now() - begin)
    between!.push(now - last)
    last = now
  }
  return { pans: pans!, between: between!.slice(2) }
}

async function component(side: number, renderer: 'webgl2' | 'canvas'): Promise<number> {
  if (mounted) await unmount(mounted)
  const target = document.createElement('div')
  target.className = 'bench'
  Object.assign(target.style, { width: `${SCREEN.width}px`, height: `${SCREEN.height}px` })
  app.replaceChildren(target)
  const drawn = grid(side)
  await frame()
  const begin = performance.now()
  mounted = mount(HeatMap, { target, props: { cells: drawn, label: 'benchmark', renderer } })
  const canvas = target.querySelector('canvas')!
  // The size of its box is known a frame later, and drawn in one more.
  while (canvas.width < SCREEN.width / 2) await frame()
  const gl = canvas.getContext(renderer === 'webgl2' ? 'webgl2' : '2d')
  if (gl instanceof WebGL2RenderingContext) gl.finish()
  return performance.now() - begin
}

function watch() {
  const between: number[] = []
  let [last, on] = [performance.now(), true]
  const next = (now: number) => {
    between.push(now - last)
    last = now
    if (on) requestAnimationFrame(next)
  }
  requestAnimationFrame(next)
  return {
    stop: () => {
      on = false
      return between.slice(2)
    },
  }
}

const bench: Bench = { names: Object.keys(CONTENDERS), measure, component, watch }
Object.assign(window, { bench })
