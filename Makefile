# Two commands do all set-up: `make sweep` and `make test`.
#
# Where the system's Python already has torch, for example on a GPU machine, use that instead of installing another:
#   make sweep VENV_FLAGS=--system-site-packages CONSTRAINTS=/dev/null

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
CONSTRAINTS ?= constraints.txt
PIP_FLAGS ?=
FAMILY ?= rmsnorm
BASE ?= main

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --no-compile $(PIP_FLAGS) --constraint $(CONSTRAINTS)

.PHONY: sweep test inspect clean

sweep: $(VENV)/.installed
	$(BIN)/kerneltune sweep $(FAMILY)

test: $(VENV)/.installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy --strict
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not alone"
	$(BIN)/python -m pytest -m alone

# Compiles every cached config for four targets, without a GPU, here and at BASE: fails on new spills and narrower accesses.
inspect: $(VENV)/.installed-test
	$(BIN)/kerneltune gate $(BASE) --static

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable .
	touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[test,docs]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
