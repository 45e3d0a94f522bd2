/** Directories that commands name, so that they can be pasted. Without quotes; `RUN_DIR` where none is known. */

import type { Services } from './services'

interface About {
  server: Pick<Services['server'], 'session'>
  time: Pick<Services['time'], 'about'>
}

/** Where the server itself is found. */
export function serverDirectory({ server }: Pick<About, 'server'>): string {
  return server.session?.directory || 'RUN_DIR'
}

/** Of the run that is shown. */
export function runDirectory({ server, time }: About): string {
  return time.about?.path || serverDirectory({ server })
}

/** Of the job; where none belongs to the server, the one from which the run came: another may record there. */
export function jobDirectory(about: About): string {
  return about.server.session?.attached ? serverDirectory(about) : runDirectory(about)
}
