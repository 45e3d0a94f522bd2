/** Requests to the server's API, typed by its own description (schema.d.ts is generated from it). */

import { decodeAll, joinPieces, type Frame } from './frames'
import type { paths } from './schema'

const ROOT = '/api/v1'

type Prefix = typeof ROOT
type Bare<P> = P extends `${Prefix}${infer Rest}` ? Rest : never
type With<Method extends string> = {
  [P in keyof paths]: paths[P] extends Record<Method, { responses: object }> ? Bare<P> : never
}[keyof paths]
type Operation<P extends string, Method extends string> = `${Prefix}${P}` extends keyof paths
  ? paths[`${Prefix}${P}`] extends Record<Method, infer Found>
    ? Found
    : never
  : never
type Json<O> = O extends { responses: infer R }
  ? R extends { 200: { content: { 'application/json': infer Body } } }
    ? Body
    : R extends { 201: { content: { 'application/json': infer Body } } }
      ? Body
      : never
  : never
type In<O, Where extends string> = O extends { parameters: Partial<Record<Where, infer Found>> }
  ? Exclude<Found, undefined>
  : object
type Parameters_<O> = (In<O, 'path'> extends never ? object : In<O, 'path'>) &
  (In<O, 'query'> extends never ? object : In<O, 'query'>)
type Body<O> = O extends { requestBody: { content: { 'application/json': infer B } } } ? B : undefined

export type GetPath = With<'get'>
export type PostPath = With<'post'>
export type DeletePath = With<'delete'>
/** What a GET of a path answers. */
export type Answer<P extends GetPath> = Json<Operation<P, 'get'>>
export type Query<P extends GetPath> = Parameters_<Operation<P, 'get'>>
type Value = string | number | boolean | readonly (string | number)[] | null | undefined

/** What a request was refused with: one line for the user, and the status that says why. */
export class ApiError extends Error {
  constructor(
    /** HTTP status; 0: the server was not reached. */
    readonly status: number,
    message: string,
    /** Seconds after which to try again, where the server says so. */
    readonly retryAfter: number | null = null,
  ) {
    super(message)
    this.name = 'ApiError'
  }

  /** The session is over: only a new link helps. */
  get expired(): boolean {
    return this.status === 401
  }

  /** The server is away; it may come back. */
  get away(): boolean {
    return this.status === 0
  }
}

const more = new WeakMap<AbortSignal, number>()

/** Seconds after which the server will have more to say to what was asked with this signal; null: that is not known. */
export function moreIn(signal: AbortSignal): number | null {
  return more.get(signal) ?? null
}

export class Api {
  constructor(private readonly fetcher: typeof fetch = (...given) => fetch(...given)) {}

  /** JSON of a GET. Raises {@link ApiError}, also for a server that does not answer. */
  async get<P extends GetPath>(path: P, query: Query<P>, signal?: AbortSignal): Promise<Answer<P>> {
    const response = await this.send(path, query as Record<string, Value>, { signal })
    return (await contents(response.json(), signal)) as Answer<P>
  }

  /** Frames of a GET whose answer is bytes, with long ones put together; and the step that they are of. */
  async frames<P extends GetPath>(path: P, query: Query<P>, signal?: AbortSignal): Promise<Frames> {
    const response = await this.send(path, query as Record<string, Value>, { signal })
    const step = response.headers.get('X-Trimtab-Step')
    const raw = await contents(response.arrayBuffer(), signal)
    try {
      return { step: step === null ? null : Number(step), frames: joinPieces(decodeAll(new Uint8Array(raw))) }
    } catch (error) {
      throw new ApiError(
        -1,
        `The server's answer makes no sense: ${error instanceof Error ? error.message : error}`,
      )
    }
  }

  /** JSON of a POST. */
  async post<P extends PostPath>(
    path: P,
    body: Body<Operation<P, 'post'>>,
    query: Record<string, Value> = {},
  ): Promise<Json<Operation<P, 'post'>>> {
    const headers: Record<string, string> = { 'X-Trimtab': '1' }
    if (body !== undefined) headers['Content-Type'] = 'application/json'
    const text = body === undefined ? undefined : JSON.stringify(body)
    const response = await this.send(path, query, { method: 'POST', headers, body: text })
    return (await contents(response.json())) as Json<Operation<P, 'post'>>
  }

  /** JSON of a DELETE. */
  async delete<P extends DeletePath>(
    path: P,
    query: Record<string, Value> = {},
  ): Promise<Json<Operation<P, 'delete'>>> {
    const response = await this.send(path, query, { method: 'DELETE', headers: { 'X-Trimtab': '1' } })
    return (await contents(response.json())) as Json<Operation<P, 'delete'>>
  }

  private async send(path: string, query: Record<string, Value>, init: RequestInit): Promise<Response> {
    let response: Response
    try {
      response = await this.fetcher(address(path, query), { ...init, credentials: 'same-origin' })
    } catch (error) {
      if (init.signal?.aborted) throw error
      throw away()
    }
    const wait = Number(response.headers.get('Retry-After'))
    if (init.signal && wait > 0) more.set(init.signal, wait)
    if (response.ok) return response
    throw new ApiError(response.status, await reason(response), wait > 0 ? wait : null)
  }
}

export interface Frames {
  step: number | null
  frames: Frame[]
}

/** The address of a request; what the path names is taken out of the query. */
export function address(path: string, query: Record<string, Value>): string {
  const rest = new URLSearchParams()
  const named = new Set<string>()
  const filled = path.replace(/\{(\w+)\}/g, (_, name: string) => {
    named.add(name)
    return encodeURIComponent(String(query[name] ?? ''))
  })
  for (const [name, value] of Object.entries(query)) {
    if (named.has(name) || value === undefined || value === null || value === '') continue
    rest.set(name, Array.isArray(value) ? value.join(',') : String(value))
  }
  const text = rest.toString()
  return ROOT + filled + (text && `?${text}`)
}

/** What an answer holds, which may be cut off in the middle. */
async function contents<T>(reading: Promise<T>, signal?: AbortSignal): Promise<T> {
  try {
    return await reading
  } catch (error) {
    if (signal?.aborted) throw error
    throw error instanceof SyntaxError ? new ApiError(-1, 'The server did not answer in JSON') : away()
  }
}

function away(): ApiError {
  return new ApiError(0, 'The server does not answer. If it was stopped, start trimtab scope serve again.')
}

async function reason(response: Response): Promise<string> {
  try {
    const said: unknown = await response.json()
    if (typeof said === 'object' && said !== null && 'error' in said) return String(said.error)
  } catch {
    // no JSON: a proxy has answered
  }
  return `The server answered ${response.status} ${response.statusText}`.trim()
}
