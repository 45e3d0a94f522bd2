import { describe, expect, it } from 'vitest'
import type { Frame, Values } from '../api/frames'
import { textsOf, tokenLabel, tokenParts } from './token'

describe('texts of tokens', () => {
  it.each([
    [' blue', '␣blue'],
    ['two\nlines\tand', 'two⏎lines⇥and'],
    ['\x00\x1b[31m\x7f\x85', '\\x00\\x1b[31m\\x7f\\x85'],
    ['\u202eright', '\\u202eright'],
    ['a\u200db\ufeffc', 'a\\u200db\\ufeffc'],
    ['\u00a0\u2003\u2028', '\\xa0\\u2003\\u2028'],
    ['\u{e0041}', '\\u{e0041}'],
    ['\ud800x', '\\ud800x'],
    ['<img src=x onerror=alert(1)>', '<img␣src=x␣onerror=alert(1)>'],
    ['日本語 é', '日本語␣é'],
    ['שלום', 'שלום'],
    ['', '∅'],
  ])('%j is shown as %s', (token, label) => expect(tokenLabel(token)).toBe(label))

  it('tells text and marks apart', () =>
    expect(tokenParts(' a\n\nb')).toEqual([
      { kind: 'mark', text: '␣' },
      { kind: 'text', text: 'a' },
      { kind: 'mark', text: '⏎⏎' },
      { kind: 'text', text: 'b' },
    ]))

  it('keeps spaces in running text, and only those', () =>
    expect(tokenParts(' a\t b', { spaces: true })).toEqual([
      { kind: 'text', text: ' a' },
      { kind: 'mark', text: '⇥' },
      { kind: 'text', text: ' b' },
    ]))

  it('cuts what is long, between characters', () => {
    expect(tokenLabel('x'.repeat(10_000), { most: 8 })).toBe('xxxxxxxx…')
    expect(tokenLabel('😀😀😀', { most: 5 })).toBe('😀😀…')
    expect(tokenLabel('ab\u202e', { most: 4 })).toBe('ab…')
    expect(tokenLabel('abcd', { most: 4 })).toBe('abcd')
  })

  it('lets no letter carry a tower, and no mark stand on its neighbour', () => {
    expect(tokenLabel('e\u0301\u0302')).toBe('e\u0301\u0302')
    expect(tokenLabel('e' + '\u0301'.repeat(4))).toBe('e\u0301\u0301\\u0301\\u0301')
    expect(tokenLabel('\u0301a')).toBe('\\u0301a')
  })
})

describe('texts in frames', () => {
  const frame = (values?: Values): Frame =>
    ({
      arrays: values ? { texts: { dtype: 'uint8', shape: [values.length], values } } : {},
    }) as unknown as Frame
  const bytes = (text: string) => new TextEncoder().encode(text)

  it('are read', () =>
    expect(textsOf(frame(bytes('["a"," é","\\u202e",3]')))).toEqual(['a', ' é', '\u202e', '']))
  it.each([
    ['absent', undefined],
    ['cut off', bytes('["a"')],
    ['no list', bytes('{"a":1}')],
    ['no bytes', new Float32Array(2)],
  ])('are none where they are %s', (_, values) => expect(textsOf(frame(values))).toEqual([]))
})
