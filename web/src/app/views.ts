/** The views of the page, in the order of the navigation. A new one is an entry here and a folder in views/. */

import type { Component } from 'svelte'

export interface View {
  /** In the address. */
  id: string
  title: string
  /** What it answers, in a line. */
  about: string
  /** Key that opens it. */
  key: string
  group: 'Training' | 'Model' | 'Act'
  load: () => Promise<{ default: Component }>
}

export const VIEWS: readonly View[] = [
  {
    id: 'ranks',
    title: 'Ranks',
    about: 'A statistic of a tensor on every rank, and over the steps',
    key: '1',
    group: 'Training',
    load: () => import('../views/ranks/Ranks.svelte'),
  },
  {
    id: 'layers',
    title: 'Layers',
    about: 'A statistic of all layers over the steps',
    key: '2',
    group: 'Training',
    load: () => import('../views/layers/Layers.svelte'),
  },
  {
    id: 'histogram',
    title: 'Histogram',
    about: 'How the magnitudes of a tensor are distributed, over the steps',
    key: '3',
    group: 'Training',
    load: () => import('../views/histogram/Histogram.svelte'),
  },
  {
    id: 'scan',
    title: 'Scan',
    about: 'Which rank, link or stage slows the job, and what it costs',
    key: '4',
    group: 'Training',
    load: () => import('../views/scan/Scan.svelte'),
  },
  {
    id: 'tensors',
    title: 'Tensors',
    about: 'Queries, keys, values, MLP and residual as pictures',
    key: '5',
    group: 'Model',
    load: () => import('../views/tensors/Tensors.svelte'),
  },
  {
    id: 'attention',
    title: 'Attention',
    about: 'Which token looks at which, by layer and head',
    key: '6',
    group: 'Model',
    load: () => import('../views/attention/Attention.svelte'),
  },
  {
    id: 'text',
    title: 'Next token',
    about: 'What the model would say next, token by token',
    key: '7',
    group: 'Model',
    load: () => import('../views/text/Text.svelte'),
  },
  {
    id: 'pca',
    title: 'PCA',
    about: 'Tokens along the principal components, over layers and steps',
    key: '8',
    group: 'Model',
    load: () => import('../views/pca/Pca.svelte'),
  },
  {
    id: 'compare',
    title: 'Compare',
    about: 'Two runs side by side, and the step where they part',
    key: '9',
    group: 'Act',
    load: () => import('../views/compare/Compare.svelte'),
  },
  {
    id: 'disturb',
    title: 'Disturb',
    about: 'Change a tensor of the running job, and see what comes of it',
    key: '0',
    group: 'Act',
    load: () => import('../views/disturb/Disturb.svelte'),
  },
]

/** The view of an id; the first for one that there is not. */
export function viewOf(id: string): View {
  return VIEWS.find((view) => view.id === id) ?? (VIEWS[0] as View)
}
