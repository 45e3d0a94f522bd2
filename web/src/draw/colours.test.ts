import { describe, expect, it } from 'vitest'
import {
  colourTable,
  ENTRIES,
  seriesColours,
  specialColour,
  specialInk,
  SPECIALS,
  type Theme,
} from './colours'
import {
  contrast,
  distance,
  labOfLch,
  labOfRgb,
  linear,
  rgbOfHex,
  rgbOfLab,
  type Lab,
  type Rgb,
} from './colours-oklab'

const THEMES: readonly Theme[] = ['dark', 'light']

function labs(table: Uint8Array): Lab[] {
  return Array.from({ length: ENTRIES }, (_, entry) =>
    labOfRgb([table[entry * 4]! / 255, table[entry * 4 + 1]! / 255, table[entry * 4 + 2]! / 255]),
  )
}

function steps(colours: readonly Lab[]): number[] {
  return colours.slice(1).map((colour, at) => distance(colours[at]!, colour))
}

describe('oklab', () => {
  it('goes there and back', () => {
    for (const rgb of [
      [1, 0, 0],
      [0.2, 0.5, 0.9],
      [0, 0, 0],
      [1, 1, 1],
    ] as Rgb[]) {
      rgbOfLab(labOfRgb(rgb)).forEach((channel, at) => expect(channel).toBeCloseTo(rgb[at]!, 2))
    }
    expect(labOfRgb([1, 1, 1])[0]).toBeCloseTo(1, 3)
  })

  it('brings a colour that no screen has to the nearest grey side', () => {
    const rgb = rgbOfLab(labOfLch([0.6, 0.4, 150]))
    const [lightness, a, b] = labOfRgb(rgb)
    expect(lightness).toBeCloseTo(0.6, 2)
    expect((Math.atan2(b, a) * 180) / Math.PI).toBeCloseTo(150, 0)
  })
})

describe.each(THEMES)('colour maps on a %s page', (theme) => {
  it('sequential: lightness runs one way', () => {
    const lightness = labs(colourTable('sequential', theme)).map((lab) => lab[0])
    const way = theme === 'dark' ? 1 : -1
    for (let entry = 1; entry < ENTRIES; entry++) {
      expect(way * (lightness[entry]! - lightness[entry - 1]!)).toBeGreaterThan(-2e-3)
      if (entry >= 4) expect(way * (lightness[entry]! - lightness[entry - 4]!)).toBeGreaterThan(0)
    }
    expect(Math.abs(lightness[0]! - lightness[ENTRIES - 1]!)).toBeGreaterThan(0.65)
  })

  it('sequential: steps look equally large', () => {
    const apart = steps(labs(colourTable('sequential', theme)).filter((_, entry) => entry % 15 === 0))
    expect(Math.max(...apart) / Math.min(...apart)).toBeLessThan(1.25)
  })

  it('diverging: both sides are equally light, the centre is grey, the ends are far apart', () => {
    const colours = labs(colourTable('diverging', theme))
    for (let entry = 0; entry < ENTRIES / 2; entry++) {
      expect(Math.abs(colours[entry]![0] - colours[ENTRIES - 1 - entry]![0])).toBeLessThan(0.05)
    }
    expect(Math.hypot(colours[127]![1], colours[127]![2])).toBeLessThan(0.02)
    expect(distance(colours[0]!, colours[ENTRIES - 1]!)).toBeGreaterThan(0.15)
  })

  it('special colours are in no map, and are told apart', () => {
    const maps = [...labs(colourTable('sequential', theme)), ...labs(colourTable('diverging', theme))]
    const special = SPECIALS.map((name) => labOfRgb(specialColour(name, theme)))
    for (const colour of special) {
      expect(Math.min(...maps.map((other) => distance(colour, other)))).toBeGreaterThan(0.07)
    }
    expect(distance(special[0]!, special[1]!)).toBeGreaterThan(0.12)
    for (const name of SPECIALS) {
      expect(contrast(specialColour(name, theme), specialInk(name, theme))).toBeGreaterThan(1.3)
    }
  })
})

/** What those see who lack red or green cones (Machado, Oliveira and Fernandes 2009, severity 1). */
const SIGHTS = {
  all: [1, 0, 0, 0, 1, 0, 0, 0, 1],
  protanopia: [0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998],
  deuteranopia: [0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.01182, 0.04294, 0.968881],
} as const

function seen(rgb: Rgb, sight: keyof typeof SIGHTS): Lab {
  const m = SIGHTS[sight]
  const [r, g, b] = [linear(rgb[0]), linear(rgb[1]), linear(rgb[2])]
  const channel = (row: number) => {
    const light = Math.min(1, Math.max(0, m[row * 3]! * r + m[row * 3 + 1]! * g + m[row * 3 + 2]! * b))
    return light <= 0.0031308 ? light * 12.92 : 1.055 * light ** (1 / 2.4) - 0.055
  }
  return labOfRgb([channel(0), channel(1), channel(2)])
}

describe.each(THEMES)('series on a %s page', (theme) => {
  const colours = seriesColours(theme).map((hex) => rgbOfHex(hex)!)
  const page: Rgb[] = (theme === 'dark' ? ['#0f151b', '#172029'] : ['#ffffff', '#f3f6f9']).map((hex) =>
    rgbOfHex(hex)!,
  )

  it('are readable', () => {
    expect(colours).toHaveLength(8)
    for (const colour of colours)
      for (const surface of page) expect(contrast(colour, surface)).toBeGreaterThan(4.5)
  })

  it.each(Object.keys(SIGHTS) as (keyof typeof SIGHTS)[])('are told apart with %s', (sight) => {
    const labs = colours.map((rgb) => seen(rgb, sight))
    labs.forEach((one, at) => {
      for (const other of labs.slice(at + 1)) expect(distance(one, other)).toBeGreaterThan(0.09)
    })
  })
})

it('reads hexadecimal colours only', () => {
  expect(rgbOfHex('#ff8000')).toEqual([1, 128 / 255, 0])
  expect(rgbOfHex('red')).toBeNull()
  expect(rgbOfHex('#fff')).toBeNull()
})
