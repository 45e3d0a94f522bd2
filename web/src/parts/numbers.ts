/** Numbers as text. */

/** A value with some significant digits; NaN and infinities by name. */
export function shown(value: number | null | undefined, digits = 4): string {
  if (value === null || value === undefined || Number.isNaN(value)) return value === null ? 'nothing' : 'NaN'
  if (!Number.isFinite(value)) return value > 0 ? 'infinity' : '−infinity'
  if (value === 0) return '0'
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value).replace('-', '−')
  const size = Math.abs(value)
  const text = size >= 1e6 || size < 1e-4 ? value.toExponential(digits - 1) : value.toPrecision(digits)
  return plain(text).replaceAll('-', '−')
}

/** Without zeros at the end of a fraction. */
function plain(text: string): string {
  const [mantissa = '', exponent] = text.split('e')
  const short = mantissa.includes('.') ? mantissa.replace(/\.?0+$/, '') : mantissa
  return exponent === undefined ? short : `${short}e${exponent.replace('+', '')}`
}

/** A whole number, in groups of three. */
export function counted(value: number): string {
  return value.toLocaleString('en-US')
}

/** So many bytes. */
export function bytes(value: number): string {
  const units = ['B', 'kB', 'MB', 'GB', 'TB']
  let size = value
  let unit = 0
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000
    unit++
  }
  return `${unit ? size.toPrecision(3) : size} ${units[unit]}`
}

/** So many seconds, in the unit that reads best. */
export function seconds(value: number): string {
  if (value < 1e-3) return `${shown(value * 1e6, 3)} µs`
  if (value < 1) return `${shown(value * 1e3, 3)} ms`
  if (value < 120) return `${shown(value, 3)} s`
  return value < 7200 ? `${shown(value / 60, 3)} min` : `${shown(value / 3600, 3)} h`
}
