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

.PHONY: sweep test gpu gpu-planted proof inspect release notes clean

sweep: $(VENV)/.installed
	$(BIN)/kerneltune sweep $(FAMILY)

test: export PYTHONDONTWRITEBYTECODE =# empty: the processes that tests start would compile what they import anew each
test: $(VENV)/.installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -m alone $$(grep -rl --include='test_*.py' 'pytest.mark.alone' tests) # first: workers find compiled imports
	$(BIN)/python -m mypy --strict & $(BIN)/python -m pytest -n auto --dist worksteal -m "not alone"; tested=$$?; wait $$! && exit $$tested
	$(BIN)/python tests/journeys --list

# Runs the journeys of tests/journeys, GPU tests included, or the one called JOURNEY, on all GPUs; outputs go to GPU_OUT, results/runs/gpu if
# not given. Without a network: make gpu VENV_FLAGS=--system-site-packages PIP_FLAGS='--no-index --find-links DIR'
# COMMIT=HASH names the commit of the proof in a copy of the tree that lacks its history.
gpu: $(VENV)/.installed-gpu
	$(BIN)/python tests/journeys $(if $(JOURNEY),--only $(JOURNEY))

# Plants regressions that only a GPU shows, all or the one called PLANT, in copies of the package, and sees whether the journeys find them.
gpu-planted: $(VENV)/.installed-gpu
	$(BIN)/python tests/journeys/planted.py $(PLANT)

# Lists the journeys that have not passed on a GPU with the code as it is, and writes the state into README and docs/limitations.md.
proof: $(VENV)/.installed
	$(BIN)/python tests/journeys --proof

# Compiles the cached configs that differ from those of BASE for four targets, without a GPU: fails on new spills and narrower accesses.
inspect: $(VENV)/.installed-test
	$(BIN)/kerneltune gate $(BASE) --static

# Builds wheel and sdist, checks them, and tries the wheel in an environment of its own, where README's commands run.
release: $(VENV)/.installed-release
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python .ci/try_wheel.py dist/*.whl $(TRY_PYTHON)

# Prints the newest version's part of CHANGELOG.md: the text of its tag.
notes:
	@awk '/^## \[[0-9]/ { if (seen++) exit } seen && !/^\[/' CHANGELOG.md

# Where $(PYTHON) belongs to an environment itself, --system-site-packages would show that of its base only.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(if $(findstring --system-site-packages,$(VENV_FLAGS)),$(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent.pth")

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable .
	touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[test,docs]'
	touch $@ $(VENV)/.installed

# Installs only what cannot be imported: machines with a GPU bring most of it.
$(VENV)/.installed-gpu: pyproject.toml tests/journeys/missing_packages.py | $(VENV)/bin/python
	missing="$$($(BIN)/python tests/journeys/missing_packages.py)" && \
	{ test -z "$$missing" || $(BIN)/python -m pip install --quiet --no-compile $(PIP_FLAGS) $$missing; }
	touch $@

$(VENV)/.installed-release: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) 'hatchling>=1.25' build twine
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
