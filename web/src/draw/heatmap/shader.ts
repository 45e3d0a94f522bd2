/** The programme that draws a part of a texture of cells over a rectangle of pixels. */
import { PERIOD } from './patterns'

/** A rectangle of pixels, without a buffer: four corners by their number. */
const VERTEX = `#version 300 es
uniform vec4 rectangle; // left, top, right, bottom, of the canvas, -1 to 1
void main() {
  vec2 corner = vec2(gl_VertexID & 1, gl_VertexID >> 1);
  gl_Position = vec4(mix(rectangle.xy, rectangle.zw, corner), 0, 1);
}`

/** Cells have an exact place (texelFetch), so neighbours never bleed into each other. Patterns: see patterns.ts. */
const FRAGMENT = `#version 300 es
precision highp float;
precision highp int;
uniform highp sampler2D cells;
uniform highp sampler2D tables; // 256 x 2: colours, and inks of patterns
uniform vec2 origin;            // cells of the texture at the canvas's upper left corner
uniform vec2 cellsPerPixel;
uniform float height;           // of the canvas
uniform ivec2 last;             // cell of the texture
uniform ivec3 special;          // bytes of NaN, infinite and missing; -1: there is none
uniform bool hatched;
out vec4 colour;

bool inked(int byte, ivec2 pixel) {
  if (byte == special.x) return (pixel.x + pixel.y) % ${PERIOD} < 2;
  if (byte == special.y) return (pixel.x + ${PERIOD - 1} * pixel.y) % ${PERIOD} < 2;
  return byte == special.z && pixel.x % ${PERIOD} < 2 && pixel.y % ${PERIOD} < 2;
}

void main() {
  vec2 pixel = vec2(gl_FragCoord.x, height - gl_FragCoord.y);
  ivec2 at = clamp(ivec2(floor(origin + pixel * cellsPerPixel)), ivec2(0), last);
  int byte = int(texelFetch(cells, at, 0).r * 255.0 + 0.5);
  int row = hatched && inked(byte, ivec2(pixel)) ? 1 : 0;
  colour = texelFetch(tables, ivec2(byte, row), 0);
}`

const UNIFORMS = [
  'rectangle',
  'cells',
  'tables',
  'origin',
  'cellsPerPixel',
  'height',
  'last',
  'special',
  'hatched',
] as const

export interface Shader {
  readonly program: WebGLProgram
  readonly places: Record<(typeof UNIFORMS)[number], WebGLUniformLocation | null>
}

/** Null where it cannot be compiled: a lost context, or a driver that cannot do it. */
export function compile(gl: WebGL2RenderingContext): Shader | null {
  const program = gl.createProgram()
  for (const [type, source] of [
    [gl.VERTEX_SHADER, VERTEX],
    [gl.FRAGMENT_SHADER, FRAGMENT],
  ] as const) {
    const shader = gl.createShader(type)
    if (shader === null) return null
    gl.shaderSource(shader, source)
    gl.compileShader(shader)
    gl.attachShader(program, shader)
    gl.deleteShader(shader)
  }
  gl.linkProgram(program)
  if (gl.getProgramParameter(program, gl.LINK_STATUS) !== true) return null
  const places = UNIFORMS.map((name) => [name, gl.getUniformLocation(program, name)])
  return { program, places: Object.fromEntries(places) as Shader['places'] }
}
