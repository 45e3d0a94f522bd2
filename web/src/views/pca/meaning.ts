/** What places in the picture mean, and what they do not. */

import type { Over } from './loading.svelte'

export function meaningOf(over: Over, aligned: boolean): string {
  if (aligned)
    return (
      'Axes of one layer mean nothing in another. Here each layer is centred, scaled to the same spread, and turned or ' +
      'mirrored so that its tokens lie nearest to the same tokens of the layer before (orthogonal Procrustes, on the ' +
      'components shown; tokens far from all others have no say). Which tokens are near which can be compared; the ' +
      'values cannot.'
    )
  if (over === 'layers')
    return (
      'Each layer has axes of its own: the same place in two layers means nothing. Compare shapes, or the same tensor ' +
      'over the steps.'
    )
  if (over === 'steps')
    return (
      'Axes are followed from step to step, so places can be compared. A token is a place in the batch: at each step ' +
      'another text may stand there.'
    )
  return 'Axes are those of largest variance of this tensor, followed from step to step.'
}
