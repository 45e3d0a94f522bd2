/** The statistics of a tensor, in words. */

import type { Query } from '../api/client'

export type Statistic = NonNullable<Query<'/runs/{run}/series'>['statistic']>

export const STATISTICS: readonly { value: Statistic; label: string }[] = [
  { value: 'rms', label: 'root mean square' },
  { value: 'mean', label: 'mean' },
  { value: 'std', label: 'standard deviation' },
  { value: 'absmax', label: 'largest magnitude' },
  { value: 'mean_abs', label: 'mean magnitude' },
  { value: 'min', label: 'smallest' },
  { value: 'max', label: 'largest' },
  { value: 'skewness', label: 'skewness' },
  { value: 'kurtosis', label: 'kurtosis' },
  { value: 'nan', label: 'NaN' },
  { value: 'inf', label: 'infinities' },
  { value: 'zeros', label: 'zeros' },
  { value: 'nan_share', label: 'share of NaN' },
  { value: 'inf_share', label: 'share of infinities' },
  { value: 'zero_share', label: 'share of zeros' },
  { value: 'n', label: 'elements' },
]

export const STATISTIC_NAMES: readonly Statistic[] = STATISTICS.map((one) => one.value)

export function labelOf(statistic: Statistic): string {
  return STATISTICS.find((one) => one.value === statistic)?.label ?? statistic
}
