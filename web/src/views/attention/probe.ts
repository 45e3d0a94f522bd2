/** The tokens of a probe's prompt: its frames do not carry them, but what was asked for is known. Pure. */

import type { Frame } from '../../api/frames'
import { textOf } from '../text/sequence'
import type { Probe } from '../text/probes'
import type { AttentionMap } from './map'

/** The id of the probe that a frame is of; empty: of none. */
export function probeOf(frame: Frame | null): string {
  const id = frame?.meta['probe']
  return typeof id === 'string' ? id : ''
}

/**
 * The map with the texts of its keys: where the probe has one prompt, whose tokens are known and as many. Ids whose text
 * nobody knows are told as numbers.
 */
export function withPrompt(map: AttentionMap, probe: Probe | undefined): AttentionMap {
  const [prompt, ...others] = probe?.prompts ?? []
  if (!probe || !prompt || others.length || map.texts.length) return map
  const ids = prompt.tokens.length ? prompt.tokens : [...new TextEncoder().encode(prompt.text)]
  if (ids.length !== map.keys.length) return map // tokens that the job's tokenizer has made of a text
  const bytes = probe.tokenizer === 'bytes' || (!prompt.tokens.length && probe.tokenizer === 'auto')
  return { ...map, texts: ids.map((id) => textOf(id, bytes ? 'bytes' : 'ids') ?? `#${id}`) }
}
