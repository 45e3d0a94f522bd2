/** Tables as text in CSV. Pure. */

export type CsvCell = string | number | null | undefined

/** A spreadsheet would take a text that begins so for a formula. */
const FORMULA = /^[=+\-@\t\r]/

/** A head and rows, lines ended by CRLF. Numbers that are none are empty; texts cannot become formulas. */
export function csvOf(head: readonly string[], rows: readonly (readonly CsvCell[])[]): string {
  return [head, ...rows].map((row) => row.map(cell).join(',') + '\r\n').join('')
}

function cell(value: CsvCell): string {
  if (typeof value === 'number') return Number.isFinite(value) ? String(value) : ''
  if (!value) return ''
  const harmless = FORMULA.test(value) ? `'${value}` : value
  return /[",\r\n]/.test(harmless) ? `"${harmless.replaceAll('"', '""')}"` : harmless
}
