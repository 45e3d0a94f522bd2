import { describe, expect, it } from 'vitest'
import { jobDirectory, runDirectory, serverDirectory } from './directory'

function about(attached: boolean, path?: string) {
  const session = { directory: '/runs/job', attached }
  return { server: { session }, time: { about: path ? { path } : null } } as Parameters<
    typeof jobDirectory
  >[0]
}

describe('directories of commands', () => {
  it('are those of the job, of the run shown, and of the server', () => {
    const made = about(true, '/runs/other')
    expect([jobDirectory, runDirectory, serverDirectory].map((of) => of(made))).toEqual([
      '/runs/job',
      '/runs/other',
      '/runs/job',
    ])
  })

  it('without a job are those of the run shown', () => expect(jobDirectory(about(false, '/r'))).toBe('/r'))

  it('are those of the server where there is no run', () =>
    expect(runDirectory(about(true))).toBe('/runs/job'))

  it('stand for themselves before the server has answered', () => {
    const nothing = { server: { session: null }, time: { about: null } }
    expect([jobDirectory(nothing), runDirectory(nothing)]).toEqual(['RUN_DIR', 'RUN_DIR'])
  })
})
