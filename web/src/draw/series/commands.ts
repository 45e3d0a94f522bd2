/** What keys do on a chart; as on a heat map, as far as both can. */

export type Command =
  | { readonly kind: 'move'; readonly by: number }
  | { readonly kind: 'zoom'; readonly factor: number }
  | { readonly kind: 'fit' | 'seek' | 'leave' }

const ZOOM = 1.5
const FAR = 10

/** For the page's help. */
export const KEYS: readonly { key: string; help: string }[] = [
  { key: 'ArrowLeft', help: 'the step before, read out; with shift ten' },
  { key: 'ArrowRight', help: 'the next step; with shift ten' },
  { key: '+', help: 'zoom in' },
  { key: '-', help: 'zoom out' },
  { key: '0', help: 'show all steps' },
  { key: 'Enter', help: 'go to the step' },
  { key: 'Escape', help: 'leave the chart' },
]

export function commandOf(
  event: Pick<KeyboardEvent, 'key' | 'shiftKey' | 'ctrlKey' | 'metaKey' | 'altKey'>,
): Command | null {
  if (event.ctrlKey || event.metaKey || event.altKey) return null
  const far = event.shiftKey ? FAR : 1
  switch (event.key) {
    case 'ArrowLeft':
      return { kind: 'move', by: -far }
    case 'ArrowRight':
      return { kind: 'move', by: far }
    case 'Home':
      return { kind: 'move', by: -Infinity }
    case 'End':
      return { kind: 'move', by: Infinity }
    case '+':
    case '=':
      return { kind: 'zoom', factor: ZOOM }
    case '-':
    case '_':
      return { kind: 'zoom', factor: 1 / ZOOM }
    case '0':
      return { kind: 'fit' }
    case 'Enter':
      return { kind: 'seek' }
    case 'Escape':
      return { kind: 'leave' }
    default:
      return null
  }
}
