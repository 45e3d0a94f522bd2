/** Binary messages of the WebSocket: `tsl1`, how many, a number for each, then frames. See trimtab/scope/server/wire.py. */

import { decodeAll, type Frame } from './frames'

const MAGIC = 0x316c7374 // "tsl1", little-endian
const HEAD_BYTES = 8

export interface Numbered {
  /** The last sequence number in the message. */
  number: number
  /** Long ones in pieces, which may come in several messages. */
  frames: Frame[]
}

/** RangeError for anything else. */
export function unpack(message: ArrayBuffer): Numbered {
  const view = new DataView(message)
  if (message.byteLength < HEAD_BYTES || view.getUint32(0, true) !== MAGIC)
    throw new RangeError('no live message')
  const count = view.getUint32(4, true)
  const begin = HEAD_BYTES + 8 * count
  if (begin > message.byteLength) throw new RangeError('a live message is cut off')
  const number = count ? Number(view.getBigUint64(begin - 8, true)) : 0
  return { number, frames: decodeAll(new Uint8Array(message, begin)) }
}
