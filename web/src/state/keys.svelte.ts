/** Keys of the whole page, and what the help (?) says of them. Views add their own while they are shown. */

import { untrack } from 'svelte'

export interface Binding {
  /** `event.key`, such as `a`, `?`, `ArrowLeft`, `Escape`; `Shift+` before it for keys that are no characters. */
  key: string
  help: string
  run: () => void
  /** Not again and again while it is held down. */
  once?: boolean
}

export interface Section {
  title: string
  bindings: readonly Binding[]
}

const KEPT = 'trimtab-keys'
/** What a control that is not for text does with keys itself. */
const MOVES = /^(Shift\+)?(Arrow\w+|Home|End|PageUp|PageDown)$/

export class Keys {
  sections: readonly Section[] = $state.raw([])
  /** Single characters act. Who speaks to the machine, or types by accident, turns that off. */
  characters: boolean = $state(stored() !== 'off')

  /** What is returned takes them away again. Of two bindings of one key the later one counts. */
  add(title: string, bindings: readonly Binding[]): () => void {
    const section = { title, bindings }
    this.sections = [...untrack(() => this.sections), section]
    return () => (this.sections = this.sections.filter((one) => one !== section))
  }

  turn(characters: boolean): void {
    this.characters = characters
    try {
      localStorage.setItem(KEPT, characters ? 'on' : 'off')
    } catch {
      // a browser that keeps nothing: it is forgotten with the page
    }
  }

  /** For the window's keydown. Keys that a text field, a control or a dialog takes for itself are left to it. */
  handle(event: KeyboardEvent): void {
    if (event.defaultPrevented || event.isComposing || event.ctrlKey || event.metaKey || event.altKey) return
    const character = event.key.length === 1
    const name = event.shiftKey && !character ? `Shift+${event.key}` : event.key
    if ((character && !this.characters) || takes(event.target, name)) return
    for (const section of this.sections.toReversed()) {
      const binding = section.bindings.find((one) => one.key === name)
      if (binding) {
        event.preventDefault()
        if (!(binding.once && event.repeat)) binding.run()
        return
      }
    }
  }
}

/** Does what has the focus do something with this key itself? */
function takes(target: EventTarget | null, name: string): boolean {
  if (!(target instanceof HTMLElement)) return false
  if (target.closest('dialog[open]')) return true
  if (typesText(target)) return name !== 'Escape'
  if (target.matches('button, a[href], summary, input, [role=button], [role=tab], [role=option]'))
    return (
      name === ' ' ||
      name === 'Enter' ||
      (target.matches('input, [role=tab], [role=option]') && MOVES.test(name))
    )
  return false
}

function typesText(target: HTMLElement): boolean {
  if (target instanceof HTMLInputElement)
    return !['checkbox', 'radio', 'range', 'button', 'submit', 'color', 'file'].includes(target.type)
  return target.isContentEditable || target.matches('textarea, select')
}

function stored(): string | null {
  try {
    return localStorage.getItem(KEPT)
  } catch {
    return null
  }
}
