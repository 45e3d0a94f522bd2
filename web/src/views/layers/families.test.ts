import { describe, expect, it } from 'vitest'
import { familiesOf, oneFamily, rowLabel, usualFamily } from './families'

const tap = (name: string, what = ['statistics']) => ({ name, what, ranks: [0] })

describe('families of tensors', () => {
  const taps = [
    tap('embedding.output'),
    tap('layers.0.mlp.output'),
    tap('layers.0.output', ['histogram']),
    tap('layers.0.attention.q', ['tiles']),
    tap('layers.1.mlp.output'),
    tap('layers.1.output'),
    tap('layers.10.output.grad'),
  ]
  it('are what several layers have statistics of', () => {
    const found = familiesOf(taps)
    expect(found).toEqual(['layers.*.mlp.output', 'layers.*.output', 'layers.*.output.grad'])
    expect(usualFamily(found)).toBe('layers.*.output')
    expect([usualFamily(['layers.*.a']), usualFamily([])]).toEqual(['layers.*.a', ''])
  })

  it('have rows named by layer', () => {
    expect([rowLabel('layers.10.output'), rowLabel('logits')]).toEqual(['10', 'logits'])
    expect(oneFamily(['layers.0.output', 'layers.1.output'])).toBe(true)
    expect(oneFamily(['layers.0.output', 'layers.0.mlp.output'])).toBe(false)
    expect(oneFamily(['layers.0.output', 'logits'])).toBe(false)
  })
})
