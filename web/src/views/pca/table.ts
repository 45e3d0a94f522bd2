/** Coordinates as a table. Pure. */

import { csvOf } from '../../parts/csv'
import type { Cloud } from './clouds'

export function csvOfClouds(clouds: readonly Cloud[], texts: readonly string[]): string {
  const most = clouds.reduce((components, cloud) => Math.max(components, cloud.components), 0)
  const axes = Array.from({ length: most }, (_, axis) => axis)
  const head = [
    'tap',
    'step',
    'position',
    'sequence',
    'token',
    ...axes.map((axis) => `component ${axis + 1}`),
  ]
  const rows = clouds.flatMap((cloud) =>
    Array.from({ length: cloud.count }, (_, token) => [
      cloud.tap,
      cloud.step,
      cloud.positions[token]!,
      cloud.groupName(cloud.groups[token]!),
      texts[cloud.positions[token]!] ?? '',
      ...axes.map((axis) =>
        axis < cloud.components ? cloud.coordinates[token * cloud.components + axis]! : NaN,
      ),
    ]),
  )
  return csvOf(head, rows)
}
