import svelte from 'eslint-plugin-svelte'
import ts from 'typescript-eslint'
import svelteConfig from './svelte.config.js'

export default ts.config(
  { ignores: ['node_modules', 'src/api/schema.d.ts'] },
  ...ts.configs.strict,
  ...svelte.configs.recommended,
  {
    files: ['**/*.svelte', '**/*.svelte.ts'],
    languageOptions: {
      parserOptions: { parser: ts.parser, extraFileExtensions: ['.svelte'], svelteConfig },
    },
  },
  {
    rules: {
      'no-console': 'error',
      'no-eval': 'error',
      eqeqeq: 'error',
      'svelte/no-at-html-tags': 'error',
      // The content security policy stops style attributes; style: directives set properties one by one, which it allows.
      'no-restricted-syntax': [
        'error',
        { selector: "SvelteAttribute[key.name='style']", message: 'Use style:property.' },
      ],
      '@typescript-eslint/no-unused-vars': ['error', { argsIgnorePattern: '^_', varsIgnorePattern: '^_' }],
      // Every index into an array of numbers may be undefined for the compiler.
      '@typescript-eslint/no-non-null-assertion': 'off',
      '@typescript-eslint/no-dynamic-delete': 'off',
      // Sets and maps that nothing is drawn from need not be reactive.
      'svelte/prefer-svelte-reactivity': 'off',
      // There are no pages to route between.
      'svelte/no-navigation-without-resolve': 'off',
    },
  },
)
