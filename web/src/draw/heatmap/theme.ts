/** The page's theme, of which data colours depend. */
import type { Theme } from '../colours'

export function themeNow(): Theme {
  return document.documentElement.dataset['theme'] === 'light' ? 'light' : 'dark'
}

/** Calls when it changes; what is returned ends it. */
export function onThemeChange(call: (theme: Theme) => void): () => void {
  const observer = new MutationObserver(() => call(themeNow()))
  observer.observe(document.documentElement, { attributes: true, attributeFilter: ['data-theme'] })
  return () => observer.disconnect()
}
