/** Dark or light: as the system says, unless chosen. */

export type Theme = 'dark' | 'light'
const KEY = 'trimtab-theme'

export class Themes {
  private chosen: Theme | null = $state(null)
  private system: Theme = $state('dark')
  now: Theme = $derived.by(() => this.chosen ?? this.system)

  constructor() {
    const light = matchMedia('(prefers-color-scheme: light)')
    this.system = light.matches ? 'light' : 'dark'
    light.addEventListener('change', () => (this.system = light.matches ? 'light' : 'dark'))
    const kept = stored()
    if (kept === 'dark' || kept === 'light') this.chosen = kept
  }

  toggle(): void {
    this.chosen = this.now === 'dark' ? 'light' : 'dark'
    try {
      localStorage.setItem(KEY, this.chosen)
    } catch {
      // a browser that keeps nothing: it is forgotten with the page
    }
  }
}

function stored(): string | null {
  try {
    return localStorage.getItem(KEY)
  } catch {
    return null
  }
}
