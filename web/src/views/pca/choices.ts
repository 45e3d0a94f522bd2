/** What the view offers to choose from. */

import type { Over } from './loading.svelte'
import type { ColourBy, Lines } from './scene'

export const OVERS: readonly { value: Over; label: string }[] = [
  { value: 'nothing', label: 'the step shown' },
  { value: 'layers', label: 'the layers' },
  { value: 'steps', label: 'the steps' },
]

export const VIEWS: readonly { value: '2d' | '3d'; label: string }[] = [
  { value: '2d', label: 'flat' },
  { value: '3d', label: 'turning' },
]

export const COLOURS: readonly { value: ColourBy; label: string }[] = [
  { value: 'position', label: 'position' },
  { value: 'group', label: 'sequence' },
  { value: 'cloud', label: 'layer or step' },
  { value: 'token', label: 'token' },
]

export const LINES: readonly { value: Lines; label: string }[] = [
  { value: 'none', label: 'of the chosen token' },
  { value: 'sequence', label: 'in order of the text' },
  { value: 'path', label: 'of all tokens' },
]
