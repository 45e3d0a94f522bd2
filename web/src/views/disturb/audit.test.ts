import { describe, expect, it } from 'vitest'
import { auditCsv, changesOf, entriesOf, filtered, timeOf } from './audit'

const SAID = [
  {
    ...{
      unix_ns: 1796064034316947310,
      rank: 0,
      event: 'activated',
      perturbation: 'p-1',
      tap: 'layers.1.mlp.output',
    },
    ...{ kind: 'bit-flip', step: 39, microbatch: 0, elements: 1, size: 1024, indices: [24], old: [-0.5] },
    ...{ new: ['-inf'], old_bits: ['0xbf00'], new_bits: ['0xff80'], text: 'flips bit 30' },
  },
  {
    unix_ns: 1796064035000000000,
    rank: 1,
    event: 'reverted',
    perturbation: 'p-2',
    step: 40,
    text: '=HYPERLINK("x")',
  },
  'cut off',
  null,
]
const ENTRIES = entriesOf(SAID)

describe('the audit log', () => {
  it('has the newest first, and passes over what is none', () => {
    expect(ENTRIES.map((entry) => entry.perturbation)).toEqual(['p-2', 'p-1'])
    expect(timeOf(ENTRIES[1]!)).toBe('2026-11-30T18:40:34.316Z')
    expect(changesOf(ENTRIES[1]!, String)).toEqual(['[24] -0.5 → -inf (0xbf00 → 0xff80)'])
  })

  it.each([
    ['', 2],
    ['MLP bit', 1],
    ['rank:1', 1],
    ['step:39 rank:0', 1],
    ['step:3', 0],
    ['p-2 reverted', 1],
  ])('filter %s', (typed, count) => expect(filtered(ENTRIES, typed)).toHaveLength(count))

  it('is a table in which no text is a formula', () => {
    const lines = auditCsv(ENTRIES).split('\r\n')
    expect(lines[0]).toMatch(/^time,rank,event,perturbation,step,/)
    expect(lines[1]).toContain(`"'=HYPERLINK(""x"")"`)
    expect(lines[1]).toContain('reverted,p-2,40,,') // no microbatch
    expect(lines[2]).toContain(
      "0,activated,p-1,39,0,layers.1.mlp.output,bit-flip,1,1024,24,-0.5,'-inf,0xbf00,0xff80",
    )
    expect(lines).toHaveLength(4)
  })
})
