import { svelte } from '@sveltejs/vite-plugin-svelte'
import { defineConfig } from 'vite'

// A page of its own for benchmarks/web_heatmap.py; no part of the bundle.
export default defineConfig({
  root: import.meta.dirname,
  plugins: [svelte()],
  build: { emptyOutDir: true, target: 'es2022', reportCompressedSize: false },
})
