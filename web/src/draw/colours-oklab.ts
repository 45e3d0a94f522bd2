/**
 * OKLab, the space in which the colour maps are computed: equal distances in it look about equally large (Ottosson,
 * "A perceptual color space for image processing", 2020).
 */

/** Red, green and blue of sRGB, each 0 to 1, not linear. */
export type Rgb = readonly [number, number, number]

/** Lightness 0 to 1, and two axes: green to red, blue to yellow. */
export type Lab = readonly [number, number, number]

/** Lightness 0 to 1, chroma from 0 (grey) up to about 0.35, hue in degrees. */
export type Lch = readonly [number, number, number]

/** The linear light of a channel of sRGB. */
export function linear(channel: number): number {
  return channel <= 0.04045 ? channel / 12.92 : ((channel + 0.055) / 1.055) ** 2.4
}

function gamma(light: number): number {
  return light <= 0.0031308 ? light * 12.92 : 1.055 * light ** (1 / 2.4) - 0.055
}

export function labOfLch([lightness, chroma, hue]: Lch): Lab {
  const angle = (hue * Math.PI) / 180
  return [lightness, chroma * Math.cos(angle), chroma * Math.sin(angle)]
}

export function labOfRgb(rgb: Rgb): Lab {
  const [r, g, b] = [linear(rgb[0]), linear(rgb[1]), linear(rgb[2])]
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b)
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b)
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b)
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ]
}

/** Linear light; outside 0 to 1 where sRGB has no such colour. */
function lightOfLab([lightness, a, b]: Lab): Rgb {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ]
}

function shown(light: Rgb): boolean {
  return light.every((channel) => channel >= -1e-4 && channel <= 1 + 1e-4)
}

/** The colour, as far from grey as sRGB has it at that lightness and hue. */
export function rgbOfLab(lab: Lab): Rgb {
  let light = lightOfLab(lab)
  if (!shown(light)) {
    let [grey, full] = [0, 1]
    while (full - grey > 1e-4) {
      const middle = (grey + full) / 2
      if (shown(lightOfLab([lab[0], lab[1] * middle, lab[2] * middle]))) grey = middle
      else full = middle
    }
    light = lightOfLab([lab[0], lab[1] * grey, lab[2] * grey])
  }
  const channel = (value: number) => gamma(Math.min(1, Math.max(0, value)))
  return [channel(light[0]), channel(light[1]), channel(light[2])]
}

export function distance(one: Lab, other: Lab): number {
  return Math.hypot(one[0] - other[0], one[1] - other[1], one[2] - other[2])
}

/** The contrast of WCAG 2, from 1 to 21. */
export function contrast(one: Rgb, other: Rgb): number {
  const luminance = (rgb: Rgb) => 0.2126 * linear(rgb[0]) + 0.7152 * linear(rgb[1]) + 0.0722 * linear(rgb[2])
  const [a, b] = [luminance(one), luminance(other)]
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)
}

export function hexOfRgb(rgb: Rgb): string {
  return (
    '#' +
    rgb
      .map((channel) =>
        Math.round(channel * 255)
          .toString(16)
          .padStart(2, '0'),
      )
      .join('')
  )
}

/** Of `#rrggbb`, or null. */
export function rgbOfHex(hex: string): Rgb | null {
  const found = /^#([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})$/i.exec(hex.trim())
  if (found === null) return null
  const channel = (digits: string | undefined) => parseInt(digits ?? '0', 16) / 255
  return [channel(found[1]), channel(found[2]), channel(found[3])]
}
