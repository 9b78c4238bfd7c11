# make setup | demo | test | check   (make help lists the targets, make prove all other proofs)
#
# PYTHON       interpreter to build the environment with, 3.11 or newer   (make setup PYTHON=python3.12)
# LEG          the row of kit/preflight/versions.json whose versions are taken, in .venv-LEG  (make test LEG=oldest)
# TORCH_INDEX  index to take torch from, where the default one is not wanted: people without a GPU save
#              gigabytes with PyTorch's own index of CPU wheels            (make setup TORCH_INDEX=URL)

PYTHON ?= python3
TORCH_INDEX ?=
LEG ?= main
VENV := $(if $(filter main,$(LEG)),.venv,.venv-$(LEG))
# Each of a test's many processes would compile kit's sources again.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete

.DEFAULT_GOAL := help
.PHONY: help $(shell sed -nE 's/^([a-z-]+):.*## .*/\1/p' $(firstword $(MAKEFILE_LIST)))

help:
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 14

setup: $(STAMP)  ## a virtual environment with what CI runs

$(STAMP): pyproject.toml constraints.txt kit/preflight/versions.json scripts/leg.py scripts/setup.sh
	@LEG='$(LEG)' PYTHON='$(PYTHON)' TORCH_INDEX='$(TORCH_INDEX)' bash scripts/setup.sh

demo: setup  ## the main job, end to end: plan, three engines, a kill, a change of engine, export, a planted fault
	@$(BIN)/python -m tests.support.proofs demo

PYTEST := $(BIN)/python -m pytest -n 3 --dist loadgroup
test: setup  ## every engine and every behaviour, in six minutes on two cores
	@$(PYTEST) -m 'not nightly'

test-fast: setup  ## what plans, emits, lints and reads logs, without engines, in a minute: for every change
	@$(PYTEST) -m fast -q tests/addons tests/emit tests/planning tests/specs

test-all: setup  ## every case, every proof, launchers on several hosts, in hours: every night
	@$(PYTEST)

golden: setup  ## curves and answers of today, written to tests/golden: read the difference before you commit it
	@$(BIN)/python -m tests.support.golden
	@$(BIN)/python -m tests.support.answers

durations: setup  ## the tests of make test, a process a core, and tests/durations.json written
	@$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not nightly' --write-durations

check: lint types test  ## lint, types and tests; CI runs the demo and more (.ci/run)

lint: setup  ## ruff: rules and format; words of the field
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python scripts/check_words.py

types: setup  ## mypy, strict
	@$(BIN)/mypy

parity: setup  ## some layouts of every kind, launched against plain torch, then planted faults: about six minutes
	@$(BIN)/python -m tests.support.proofs parity

rehearse: setup  ## one recipe in small, another one every day
	@$(BIN)/python -m tests.support.proofs rehearse

gpu: setup  ## eight minutes on one CUDA GPU: every promise of a plan; DEVICE=cpu for a dry run
	@PYTHON=$(BIN)/python bash benchmarks/gpu/run.sh --device $(or $(DEVICE),cuda)

prove: setup  ## lists every other proof with its minutes; NAME=parity-megatron runs one
	@$(BIN)/python -m tests.support.proofs $(NAME)
