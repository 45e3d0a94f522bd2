import { mount } from 'svelte'
import './app.css'
import App from './app/App.svelte'
import { makeServices } from './state/services'

const target = document.getElementById('app')
if (target) mount(App, { target, props: { services: makeServices() } })
