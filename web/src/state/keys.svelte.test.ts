// @vitest-environment jsdom
import { beforeEach, describe, expect, it } from 'vitest'
import { Keys } from './keys.svelte'

let keys: Keys
let done: string[]

function press(key: string, on = '<p tabindex="0"></p>', more: KeyboardEventInit = {}): KeyboardEvent {
  document.body.innerHTML = on
  const target = document.body.querySelector('.here') ?? document.body.firstElementChild
  const event = new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true, ...more })
  document.body.addEventListener('keydown', (seen) => keys.handle(seen), { once: true })
  target?.dispatchEvent(event)
  return event
}

beforeEach(() => {
  localStorage.clear()
  keys = new Keys()
  done = []
  const run = (name: string) => () => void done.push(name)
  keys.add('Everywhere', [
    { key: 'l', help: '', run: run('edge') },
    { key: ' ', help: '', run: run('play'), once: true },
    { key: 'ArrowLeft', help: '', run: run('left') },
    { key: 'Shift+ArrowLeft', help: '', run: run('far left') },
    { key: '?', help: '', run: run('help') },
    { key: 'Escape', help: '', run: run('escape') },
  ])
})

describe('keys', () => {
  it('act wherever the focus is, with Shift where it is no part of the character', () => {
    press('l')
    press('?', undefined, { shiftKey: true })
    press('ArrowLeft', undefined, { shiftKey: true })
    expect(done).toEqual(['edge', 'help', 'far left'])
  })

  it('of a view come before those of the page, as long as it is shown', () => {
    const remove = keys.add('View', [{ key: 'l', help: '', run: () => void done.push('view') }])
    press('l')
    remove()
    press('l')
    expect(done).toEqual(['view', 'edge'])
  })

  it('are left to what takes them itself', () => {
    for (const text of ['<input>', '<textarea></textarea>', '<select></select>', '<input type="number">'])
      for (const key of ['l', ' ', 'ArrowLeft', '?']) press(key, text)
    press(' ', '<button></button>')
    press(' ', '<a href="/x">x</a>')
    press(' ', '<input type="checkbox">')
    press('ArrowLeft', '<input type="range">')
    press('l', '<dialog open><p class="here"></p></dialog>')
    for (const held of ['ctrlKey', 'metaKey', 'altKey', 'isComposing'])
      press('l', undefined, { [held]: true })
    expect(done).toEqual([])
  })

  it('that a control does not take act there, too', () => {
    press('l', '<button></button>')
    press('ArrowLeft', '<button></button>')
    press('l', '<input type="range">')
    press('Escape', '<input>')
    expect(done).toEqual(['edge', 'left', 'edge', 'escape'])
  })

  it('that may not repeat do not, and scroll nothing', () => {
    expect(press(' ').defaultPrevented).toBe(true)
    expect(press(' ', undefined, { repeat: true }).defaultPrevented).toBe(true)
    press('ArrowLeft', undefined, { repeat: true })
    expect(done).toEqual(['play', 'left'])
  })

  it('of one character can be turned off, for good', () => {
    keys.turn(false)
    press('l')
    press('ArrowLeft')
    expect(done).toEqual(['left'])
    expect(new Keys().characters).toBe(false)
  })
})
