# Everything that is done with this repository. Each target sets up what it needs; a second run finds it done.
VENV ?= .venv
SEEDS ?= 100000
OLDEST := 0.27.1
BENCH ?= micro transfer pool
PAGE ?= build/bench/page.md
export VENV
export HF_HUB_OFFLINE = 1
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup models check format lint types pure quick test oldest sim contract e2e bench docs demo soak clean

help: ## this list
	@sed -n 's/^\([a-z0-9]*\):.*## /  make \1\t/p' Makefile | expand -t 18

setup: ## the environment in .venv (VENV=... elsewhere)
	@scripts/setup.sh

models: setup ## the models of demo and tests in build/models
	@$(BIN)/python scripts/make_models.py

check: setup ## format, lint, types, import rules, tidy, pure, simulation, proxy, cli: under a minute
	@$(MAKE) --no-print-directory -j2 -k --output-sync=target lint types pure quick

format: setup ## bring the format into order
	@$(BIN)/ruff format -q . && $(BIN)/ruff check -q --fix .

lint: setup
	@$(BIN)/ruff format --check . && $(BIN)/ruff check .

types: setup
	@$(BIN)/mypy

pure: setup
	@$(PYTEST) -q tests/pure tests/tidy tests/proxy

quick: setup
	@$(PYTEST) -q tests/sim tests/cli

test: models ## the whole test suite but the soak, from nothing if need be
	@$(PYTEST) -m "not soak"
	@$(MAKE) --no-print-directory oldest

oldest: setup ## the adapters against the oldest vLLM that is supported
	@scripts/setup.sh --overlay $(OLDEST)
	@PYTHONPATH=$(abspath $(VENV)/overlays/vllm-$(OLDEST)) $(PYTEST) -q -m "not soak" tests/connector

sim: setup ## the seeded simulations of a transfer and of the pool, SEEDS=100000 of each
	@$(BIN)/python -m vllm_mooncake_ascend.testing.simulator --seeds $(SEEDS) --jobs 2

contract: setup ## the contract suite on the in-memory engine and on real Mooncake
	@$(PYTEST) tests/contract -m "not soak"

e2e: models ## real vLLM servers, real Mooncake, our proxy
	@$(PYTEST) tests/e2e -m "not soak"

bench: models ## measure: BENCH="micro transfer pool" (some minutes); also scale, proxy, hits, pd (an hour); PAGE=
	@$(BIN)/vllm-mooncake-ascend bench all $(addprefix --part ,$(BENCH)) --page $(PAGE)

docs: setup ## write the generated pages anew
	@$(BIN)/python scripts/make_docs.py

demo: setup ## prefill, decode and proxy against one plain engine, with a table
	@$(BIN)/python scripts/make_models.py smollm2-135m-instruct
	@$(BIN)/vllm-mooncake-ascend demo

soak: models ## twenty rounds of faults, and what takes minutes; an hour
	@$(PYTEST) -m soak

clean: ## remove results and caches; environment and models stay
	@rm -rf build/demo build/logs dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
