/** Keys of the whole page, and what the help (?) says of them. Views add their own while they are shown. */

export interface Binding {
  /** `event.key`, such as `a`, `?`, `ArrowLeft`, `Escape`; `Shift+` before it for keys that are no characters. */
  key: string
  help: string
  run: () => void
}

export interface Section {
  title: string
  bindings: readonly Binding[]
}

export class Keys {
  sections: readonly Section[] = $state.raw([])

  /** What is returned takes them away again. Of two bindings of one key the later one counts. */
  add(title: string, bindings: readonly Binding[]): () => void {
    const section = { title, bindings }
    this.sections = [...this.sections, section]
    return () => (this.sections = this.sections.filter((one) => one !== section))
  }

  /** For the window's keydown. Keys that a text field or a control takes for itself are left to it. */
  handle(event: KeyboardEvent): void {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return
    if (typesText(event.target) && event.key !== 'Escape') return
    const name = event.shiftKey && event.key.length > 1 ? `Shift+${event.key}` : event.key
    for (const section of this.sections.toReversed()) {
      const binding = section.bindings.find((one) => one.key === name)
      if (binding) {
        event.preventDefault()
        binding.run()
        return
      }
    }
  }
}

function typesText(target: EventTarget | null): boolean {
  return (
    target instanceof HTMLElement &&
    (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName))
  )
}
