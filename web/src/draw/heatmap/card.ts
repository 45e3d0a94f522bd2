/** Which graphics card there is. */

/** Names of what emulates one on the CPU: Chromium's, Mesa's, Windows' and Apple's. */
const EMULATED = /swiftshader|llvmpipe|softpipe|software|basic render/i

/**
 * Whether WebGL2 is there and not emulated. Browsers are asked for no slow context first, but Chromium gives one
 * nevertheless; so its name decides.
 */
export function hasCard(): boolean {
  const canvas = document.createElement('canvas')
  canvas.width = canvas.height = 1
  const gl = canvas.getContext('webgl2', { failIfMajorPerformanceCaveat: true })
  if (gl === null) return false
  const info = gl.getExtension('WEBGL_debug_renderer_info')
  const name: unknown = gl.getParameter(info === null ? gl.RENDERER : info.UNMASKED_RENDERER_WEBGL)
  gl.getExtension('WEBGL_lose_context')?.loseContext()
  return !EMULATED.test(String(name))
}
