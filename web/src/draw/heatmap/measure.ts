/** How wide text is. */

/** Of labels beside maps, in the page and in exported pictures. */
export const FONT = "12px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"

/** CSS pixels of the widest text. */
export function widest(texts: readonly string[], font = FONT): number {
  const context = document.createElement('canvas').getContext('2d')
  if (context === null) return 0
  context.font = font
  return texts.reduce((most, text) => Math.max(most, context.measureText(text).width), 0)
}
