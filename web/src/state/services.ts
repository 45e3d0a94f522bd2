/** What every component may need, made once and handed down by context. */

import { getContext, setContext } from 'svelte'
import { Api } from '../api/client'
import { Address } from './address.svelte'
import { Keys } from './keys.svelte'
import { Server } from './server.svelte'
import { Themes } from './theme.svelte'
import { Time } from './time.svelte'

export interface Services {
  api: Api
  address: Address
  server: Server
  time: Time
  theme: Themes
  keys: Keys
}

const KEY = Symbol('services')

export function makeServices(): Services {
  const api = new Api()
  const address = new Address(window)
  const server = new Server(api)
  return { api, address, server, time: new Time(address, server), theme: new Themes(), keys: new Keys() }
}

/** In the outermost component. */
export function provide(services: Services): Services {
  return setContext(KEY, services)
}

/** In any other, while it is set up. */
export function services(): Services {
  return getContext<Services>(KEY)
}
