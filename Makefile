# The first two commands of the README, and what CI runs. Needs Python 3.11 or 3.12, make and pip.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements.lock

.PHONY: demo test test-all oldest check format docs lock clean

demo: $(VENV)/.installed  ## train a tiny model on this machine, in a minute or two
	$(BIN)/python jobs/finetune.py --run.resume never --run.name demo-$$(date +%Y%m%d-%H%M%S)

test: $(VENV)/.installed-dev  ## what guards an invariant
	$(BIN)/python -m pytest -m "not slow"

test-all: $(VENV)/.installed-dev  ## everything
	$(BIN)/python -m pytest

oldest: $(OLDEST)/.installed  ## unit and distributed tests on the oldest torch and transformers, without Ray and MLflow
	$(OLDEST)/bin/python -m pytest -m "not slow" tests/unit tests/distributed

check: $(VENV)/.installed-dev  ## style, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-dev  ## docs/configuration.md, from the config's own docstrings
	$(BIN)/python -m raytune_fsdp.config.docs

$(VENV)/bin/python $(OLDEST)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
	  || { echo "raytune_fsdp needs Python 3.11 or 3.12; choose one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(@D:/bin=)

# torch first and alone: nothing else may choose its version.
$(VENV)/.installed: pyproject.toml requirements.lock | $(VENV)/bin/python
	$(PIP) torch
	$(PIP) --editable '.[all]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable '.[all,dev,bench]'
	@touch $@

# The list is complete, so pip resolves nothing: what torch 2.11 asks for on top of it, a CPU does not need.
$(OLDEST)/.installed: requirements-oldest.lock | $(OLDEST)/bin/python
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-oldest.lock
	@touch $@

lock:  ## new versions: installs everything into a fresh environment and writes down what came
	rm -rf .lock-venv && $(PYTHON) -m venv .lock-venv
	.lock-venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.lock-venv/bin/pip install --quiet --disable-pip-version-check '.[all,dev,bench]'
	.lock-venv/bin/pip freeze --all --exclude pip --exclude raytune-fsdp | sed 's/^\(torch==[0-9.]*\)+.*/\1/' > requirements.lock
	rm -rf .lock-venv build *.egg-info

clean:
	rm -rf $(VENV) $(OLDEST) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
