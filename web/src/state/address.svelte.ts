/** What is shown, as the page's address says it: whoever opens the same address sees the same. */

export type AddressValue = string | number | null | undefined

/** The part of the window that is needed here. */
export interface Bar {
  location: { search: string; pathname: string }
  history: { pushState: History['pushState']; replaceState: History['replaceState'] }
  addEventListener(name: 'popstate' | 'pagehide', listener: () => void): void
}

/** Browsers stop pages that change their address more often, with an error or in silence. */
const REPLACED_EVERY_MS = 350

export class Address {
  private values: Readonly<Record<string, string>> = $state.raw({})
  private replaced = -Infinity
  private timer: ReturnType<typeof setTimeout> | undefined

  constructor(private readonly bar: Bar) {
    this.values = read(bar.location.search)
    bar.addEventListener('popstate', () => {
      clearTimeout(this.timer)
      this.timer = undefined
      this.values = read(bar.location.search)
    })
    bar.addEventListener('pagehide', () => this.flush())
  }

  /** A text; `fallback` where the address says nothing. */
  text(key: string, fallback = ''): string {
    return this.said(key) ?? fallback
  }

  /** One of some texts; `fallback` for any other. */
  word<W extends string>(key: string, words: readonly W[], fallback: W): W {
    const said = this.said(key) as W
    return words.includes(said) ? said : fallback
  }

  /** A number; null where the address says none. */
  number(key: string): number | null {
    const said = this.said(key)
    if (said === undefined || said.trim() === '') return null
    const number = Number(said)
    return Number.isFinite(number) ? number : null
  }

  /** A whole number from 0 on. */
  whole(key: string): number | null {
    const number = this.number(key)
    return number !== null && Number.isSafeInteger(number) && number >= 0 ? number : null
  }

  flag(key: string): boolean {
    return this.said(key) === '1'
  }

  /** Whole numbers, separated by commas. */
  wholes(key: string): number[] {
    const parts = this.text(key).split(',')
    return parts.filter((part) => /^\d{1,9}$/.test(part)).map(Number)
  }

  /**
   * Change it; what is null, empty or undefined goes. `push`: so that the browser's back button returns to what was
   * shown; for what changes with every movement (scrubbing, zooming), leave it. The browser's bar follows within a moment.
   */
  set(changes: Readonly<Record<string, AddressValue>>, { push = false } = {}): void {
    const next = changed(this.values, changes)
    if (same(next, this.values)) return
    if (push) this.flush() // so that back leads to what was shown last
    this.values = next
    if (push) this.bar.history.pushState(null, '', this.bar.location.pathname + written(next))
    else this.timer ??= setTimeout(() => this.flush(), this.replaced + REPLACED_EVERY_MS - performance.now())
  }

  private said(key: string): string | undefined {
    return Object.hasOwn(this.values, key) ? this.values[key] : undefined
  }

  /** Have the bar say what is shown, if it is behind. */
  private flush(): void {
    if (this.timer === undefined) return
    clearTimeout(this.timer)
    this.timer = undefined
    this.replaced = performance.now()
    this.bar.history.replaceState(null, '', this.bar.location.pathname + written(this.values))
  }

  /** The query of an address that differs in `changes`: for links. */
  link(changes: Readonly<Record<string, AddressValue>>): string {
    return written(changed(this.values, changes)) || '?'
  }
}

function changed(values: Readonly<Record<string, string>>, changes: Readonly<Record<string, AddressValue>>) {
  const next: Record<string, string> = { ...values }
  for (const [key, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === '') delete next[key]
    else next[key] = String(value)
  }
  return next
}

function read(search: string): Record<string, string> {
  return Object.fromEntries(new URLSearchParams(search))
}

function written(values: Readonly<Record<string, string>>): string {
  const text = new URLSearchParams(values).toString()
  return text && `?${text}`
}

function same(a: Readonly<Record<string, string>>, b: Readonly<Record<string, string>>): boolean {
  const keys = Object.keys(a)
  return keys.length === Object.keys(b).length && keys.every((key) => a[key] === b[key])
}
