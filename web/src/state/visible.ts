/** Is the page seen? What nobody sees need not be loaded, drawn or played. */

/** In a tab behind others, or a window that is covered. Where there is no document (tests), it is seen. */
export function hidden(): boolean {
  return typeof document !== 'undefined' && document.hidden
}

/** `call` is called whenever the page comes to be seen, or is seen no more; what is returned ends that. */
export function onVisibility(call: (hidden: boolean) => void): () => void {
  if (typeof document === 'undefined') return () => undefined
  const listener = (): void => call(document.hidden)
  document.addEventListener('visibilitychange', listener)
  return () => document.removeEventListener('visibilitychange', listener)
}
