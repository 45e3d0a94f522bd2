import { svelte } from '@sveltejs/vite-plugin-svelte'
import { defineConfig } from 'vitest/config'
import { licences } from './scripts/licences.js'

// For `vite dev`: the address of a running `trimtab scope serve`, and the token of its link.
const server = process.env['TRIMTAB_SERVER']
const token = process.env['TRIMTAB_TOKEN']

const proxy = server && {
  target: server,
  ws: true,
  changeOrigin: true,
  headers: { Authorization: `Bearer ${token ?? ''}` },
  // Host and Origin have to be the server's own.
  rewriteWsOrigin: true,
}

export default defineConfig({
  plugins: [svelte(), licences()],
  build: {
    outDir: '../src/trimtab/scope/server/static',
    emptyOutDir: true,
    target: 'es2022',
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
    rolldownOptions: { checks: { pluginTimings: false } }, // says how busy the machine is
    assetsInlineLimit: 0, // the content security policy lets data: through for images only
  },
  server: proxy ? { proxy: { '/api': proxy } } : {},
  test: { include: ['src/**/*.test.ts'], environment: 'node' },
})
