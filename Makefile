# `make` lists what there is. Needs Python 3.11 or 3.12 and pip.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
COMPAT := .venv-compat
BIN := $(VENV)/bin
# Which tests share a process: see tests/conftest.py.
PARALLEL := --numprocesses $(or $(PROCESSES),2)
# Tests start hundreds of processes. Where the shell forbids bytecode, each compiles the package anew, 1.2 s of 7.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements.lock

.PHONY: help demo quick seconds test test-all same chaos kills oldest compat check format docs lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed  ## train a tiny model on this machine, in a minute or two
	$(BIN)/python jobs/finetune.py --run.resume never --run.name demo-$$(date +%Y%m%d-%H%M%S)

quick: $(VENV)/.installed-dev  ## unit tests of less than 0.2 s, two cases of each at most
	$(BIN)/python -m pytest $(PARALLEL) tests/unit --quick

seconds: $(VENV)/.installed-dev  ## write down in tests/seconds.json which unit tests are not quick
	$(BIN)/python -m pytest $(PARALLEL) tests/unit -m "not slow" --write-seconds

test: $(VENV)/.installed-dev  ## every test that guards an invariant
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow" --durations=15

same: $(VENV)/.installed-dev  ## two trees, the same trajectories: make same BASE=<commit>
	$(BIN)/python -m tests.same $(BASE)

test-all: $(VENV)/.installed-dev  ## every test
	$(BIN)/python -m pytest $(PARALLEL) --durations=15

chaos: $(VENV)/.installed-dev  ## a run to which something happens every minute: make chaos SECONDS=600 SEED=1
	$(BIN)/python -m tests.chaos --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1)

kills: $(VENV)/.installed-dev  ## a run of which something is killed again and again: make kills KILLS=30 SEED=1
	$(BIN)/python -m tests.kills --kills $(or $(KILLS),30) --seed $(or $(SEED),1)

oldest: $(OLDEST)/.installed  ## unit and distributed tests on the oldest torch and transformers, without Ray and most extras
	$(OLDEST)/bin/python -m pytest -m "not slow" tests/unit tests/distributed

compat: $(VENV)/.installed-dev $(COMPAT)/.installed  ## exports as transformers 4.57 reads them
	RAYTUNE_COMPAT_PYTHON=$(COMPAT)/bin/python $(BIN)/python -m pytest tests/compat

check: $(VENV)/.installed-dev  ## style, types, import contracts, and size limits
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.house

format: $(VENV)/.installed-dev  ## let ruff mend the style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-dev  ## write the pages that are made from the code
	$(BIN)/python -m docs.make.configuration
	$(BIN)/python -m docs.make.coming_from

$(OLDEST)/bin/python $(COMPAT)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
	  || { echo "raytune_fsdp needs Python 3.11 or 3.12; choose one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(@D:/bin=)

$(VENV)/.installed: pyproject.toml requirements.lock docker/install.sh
	PYTHON=$(PYTHON) docker/install.sh $(VENV) all --editable
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable '.[all,dev,bench]'
	@touch $@

# The list is complete, so pip resolves nothing: what torch 2.11 asks for on top of it, a CPU does not need.
$(OLDEST)/.installed: requirements-oldest.lock | $(OLDEST)/bin/python
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-oldest.lock
	@touch $@

# Its only task is to load models; our tests run in the other environment and call it.
$(COMPAT)/.installed: requirements-compat.lock | $(COMPAT)/bin/python
	$(COMPAT)/bin/pip install --quiet --disable-pip-version-check --constraint requirements-compat.lock torch
	$(COMPAT)/bin/pip install --quiet --disable-pip-version-check --requirement requirements-compat.lock
	@touch $@

lock:  ## write requirements.lock again, with the newest versions that pyproject.toml allows
	rm -rf .lock-venv && $(PYTHON) -m venv .lock-venv
	.lock-venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.lock-venv/bin/pip install --quiet --disable-pip-version-check '.[all,aws,gcp,lm-eval,dev,bench]'
	.lock-venv/bin/pip freeze --all --exclude pip --exclude raytune-fsdp | sed 's/^\(torch==[0-9.]*\)+.*/\1/' > requirements.lock
	rm -rf .lock-venv build *.egg-info

clean:  ## remove the environments and everything else that is made
	rm -rf $(VENV) $(OLDEST) $(COMPAT) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
