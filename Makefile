# make train   sets up .venv with the core install and trains the quickstart (ARGS="run.seed=1 ..." overrides its config)
# make test    sets up .venv with the development tools and runs the tests (ARGS="-m slow" for the long ones)
# make lint    style, types, import contracts

PYTHON ?= python3
CONFIG ?= examples/quickstart.yaml
ARGS ?=
BIN := .venv/bin

.PHONY: train test lint clean
.DEFAULT_GOAL := help

train: .venv/core.stamp
	$(BIN)/headrace train $(CONFIG) $(ARGS)

test: .venv/dev.stamp
	$(BIN)/python -m pytest $(ARGS)

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p .pyright && ln -sfn .. .pyright/headrace
	$(BIN)/pyright
	$(BIN)/lint-imports

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Headrace needs Python 3.11 or newer; $(PYTHON) is older. Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv .venv

.venv/core.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e .
	touch $@

.venv/dev.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[dev,mooncake]'
	touch .venv/core.stamp $@

.PHONY: help
help:
	@sed -n 's/^# //p' Makefile

clean:
	rm -rf .venv .pyright build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
