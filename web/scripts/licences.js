import { readdirSync, readFileSync } from 'node:fs'
import { dirname, join, sep } from 'node:path'

const FILE = 'licences.txt'
const INSIDE = `${sep}node_modules${sep}`
const HEAD = `This page contains parts of the packages below, under the licences that follow.\n`

/**
 * A plugin of the bundler: writes the licences of whatever it has put into the bundle beside it.
 * A package without a licence file ends the build.
 */
export function licences() {
  return {
    name: 'trimtab-licences',
    apply: 'build',
    generateBundle() {
      const folders = new Set([...this.getModuleIds()].map(folderOf).filter(Boolean))
      const texts = [...folders].map(licenceOf).toSorted((a, b) => (a < b ? -1 : 1))
      this.emitFile({
        type: 'asset',
        fileName: FILE,
        source: [HEAD, ...texts].join(`\n${'-'.repeat(80)}\n\n`),
      })
    },
  }
}

/** The folder of the package that a module belongs to; null: it is ours. */
function folderOf(id) {
  const at = id.lastIndexOf(INSIDE)
  if (at < 0) return null
  const [first, second] = id.slice(at + INSIDE.length).split(sep)
  return join(
    id.slice(id.startsWith('\0') ? 1 : 0, at),
    INSIDE,
    first.startsWith('@') ? join(first, second) : first,
  )
}

function licenceOf(folder) {
  const about = JSON.parse(readFileSync(join(folder, 'package.json'), 'utf8'))
  const file = readdirSync(folder).find((name) => /^licen[cs]e(\.(md|txt))?$/i.test(name))
  if (!file) throw new Error(`${dirname(folder)}: ${about.name} is in the bundle and has no licence file`)
  return `${about.name} ${about.version} (${about.license})\n\n${readFileSync(join(folder, file), 'utf8').trim()}\n`
}
