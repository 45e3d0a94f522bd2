/** The page's own colours, as the theme that is on has them. */

import type { Chrome } from './paint'

export function pageColours(element: Element): Chrome {
  const style = getComputedStyle(element)
  const colour = (name: string): string => style.getPropertyValue(name).trim() || '#888888'
  return {
    surface: colour('--surface'),
    text: colour('--text'),
    muted: colour('--muted'),
    line: colour('--line'),
    focus: colour('--focus'),
  }
}

/** The canvas's context, with as many points as the screen has, and its size in CSS pixels. */
export function prepared(
  canvas: HTMLCanvasElement,
  width: number,
  height: number,
): CanvasRenderingContext2D | null {
  const ratio = window.devicePixelRatio || 1
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)]
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide
    canvas.height = high
  }
  const context = canvas.getContext('2d')
  context?.setTransform(ratio, 0, 0, ratio, 0, 0)
  return context
}
