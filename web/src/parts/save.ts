/** Files for the user to keep. */

/** Have the browser save `content` under `name`. */
export function save(name: string, content: Blob): void {
  const link = document.createElement('a')
  link.href = URL.createObjectURL(content)
  link.download = fileName(name)
  link.click()
  setTimeout(() => URL.revokeObjectURL(link.href), 1000)
}

/** `name` without what file systems do not take; names of tensors and runs come from elsewhere. */
export function fileName(name: string): string {
  const clean = name.replace(/[^\w.+-]+/g, '_').replace(/^\.+/, '')
  return clean.slice(0, 120) || 'trimtab'
}
