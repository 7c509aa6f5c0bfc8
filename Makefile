# Every target does its own set-up in .venv: all it needs is Python >= 3.11 and make.
#   make train ARGS="--help"     make test PYTEST_ARGS="tests/linalg -x"     make test WORKERS=0
#   make test VENV=.venv-13 PYTHON=python3.13

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PYTEST_ARGS ?=
# Most of the suite's time is XLA compiling on one core: two workers nearly halve it.
WORKERS ?= 2
# The first interpreter that is new enough.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# What `make ends` takes for the oldest and the newest Python.
OLDEST ?= python3.11
NEWEST ?= python3.13
# How versions are chosen, for uv; empty: by pip, the newest.
RESOLUTION ?=
CODE := $(wildcard manifoldmuon manifoldmuon_verify studies examples benchmarks tests docs)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help train reproduce test lint types unit laws installs ci coverage ends processors wheel docs records bench format clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

train: $(VENV)/.examples  ## Train on the digits, side by side (options: ARGS="--help")
	@$(BIN)/python -m studies.digits $(ARGS)

reproduce: $(VENV)/.examples  ## Put published numbers beside reproduced ones; runs what has no record (options: ARGS="--help")
	@$(BIN)/python -m studies.reproduction $(ARGS)

test: lint types unit  ## Run linters, pyright and pytest (every case: PYTEST_ARGS=--exhaustive)

lint: $(VENV)/.dev
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE) || { echo "Run 'make format'." >&2; exit 1; }
	@$(BIN)/codespell $(CODE) $(wildcard *.md)
	@$(if $(wildcard .github),$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows \
		.github/workflows/*.yml)

types: $(VENV)/.dev
	@$(BIN)/pyright --pythonpath $(BIN)/python

unit: $(VENV)/.dev
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

laws: $(VENV)/.dev  ## Check the laws with XLA's own flags, as users compile (the suite switches optimisation off)
	@XLA_DEFAULTS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --exhaustive \
		tests/linalg/test_laws.py tests/norms tests/manifolds/test_laws.py tests/test_reliability.py

installs:  ## Run README's first command and each install line of the pages, in new environments
	@$(PYTHON) tests/check_installs.py $(ARGS)

ci:  ## Run everything that a change must pass: as a stranger, every case, laws, records, pages, wheel
	@$(MAKE) installs
	@$(MAKE) test PYTEST_ARGS=--exhaustive
	@$(MAKE) laws
	@$(MAKE) records
	@$(MAKE) docs ARGS=--formulas-if-npm
	@$(MAKE) wheel

processors: $(VENV)/.dev  ## Run every case as on processors without AVX2, and without AVX-512
	@for each in SSE4_2/Nehalem AVX2/Haswell; do echo $$each; \
		XLA_FLAGS=--xla_cpu_max_isa=$${each%/*} OPENBLAS_CORETYPE=$${each#*/} $(BIN)/python -m pytest -q \
			-n $(WORKERS) --dist worksteal --exhaustive $(PYTEST_ARGS) || exit 1; done

ends:  ## Run the tests at both ends of the versions that pyproject.toml admits, and on other processors
	@$(MAKE) processors
	@$(MAKE) unit VENV=.venv-oldest PYTHON=$(OLDEST) RESOLUTION=lowest-direct PYTEST_ARGS="--exhaustive $(PYTEST_ARGS)"
	@$(MAKE) test VENV=.venv-newest PYTHON=$(NEWEST) PYTEST_ARGS="--exhaustive $(PYTEST_ARGS)"

coverage: $(VENV)/.dev  ## Run the tests, and report the lines and branches of the package that none takes
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --exhaustive --cov --cov-report=term $(PYTEST_ARGS)

wheel: $(VENV)/.dev  ## Build wheel and sdist into dist/, and check them in an environment of their own
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist . >/dev/null
	@$(BIN)/python -m twine check --strict dist/*
	@$(BIN)/python tests/check_wheel.py dist

docs: $(VENV)/.dev  ## Build the documentation strictly into site/ (a minute or two: the tutorials run)
	@$(BIN)/python -m docs.build $(ARGS)

records: $(VENV)/.dev  ## Check the records in the source against the code and the pages
	@$(BIN)/python -m studies check

bench: $(VENV)/.dev  ## Run the benchmarks and write their records (names: ARGS="--help")
	@$(BIN)/python -m benchmarks $(ARGS)

format: $(VENV)/.dev  ## Sort the imports and format the code
	@$(BIN)/ruff check --quiet --fix $(CODE) || true
	@$(BIN)/ruff format --quiet $(CODE)

clean:  ## Remove the environments and everything that is built
	@rm -rf $(VENV) .venv-oldest .venv-newest site dist build .coverage .pytest_cache .ruff_cache
	@rm -rf .cache .jax_cache docs/thumbnails docs/tutorials/*.md docs/tutorials/*.ipynb docs/tutorials/*.svg
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: set-up runs again only when pyproject.toml has changed, and an interrupted one is
# started afresh.
$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 found; name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is not Python >= 3.11; name another: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON) has no venv module; install it first (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.examples: $(VENV)/.python pyproject.toml
	@echo "Setting up .venv for the examples (only once; a minute or two) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[examples]'
	@touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml
	@echo "Setting up .venv for development (only once; a minute or two) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(RESOLUTION),uv,--editable '.[dev]')
	@$(if $(RESOLUTION),$(BIN)/uv pip install --quiet --python $(BIN)/python \
		--resolution $(RESOLUTION) --editable '.[tests]')
	@touch $@ $(VENV)/.examples
