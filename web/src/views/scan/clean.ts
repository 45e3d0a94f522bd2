/** What others wrote (hosts, file names, operations), made fit to be shown. */

const LONGEST = 2000
/** Characters that move the cursor, reorder or hide text. */
const HARMFUL = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu

/** Text without control, format and bidirectional characters, and of bounded length. */
export function clean(text: string): string {
  const kept = text
    .slice(0, LONGEST)
    .replace(/[\t\n\r]/g, ' ')
    .replace(HARMFUL, '\ufffd')
  return kept + (text.length > LONGEST ? '…' : '')
}
