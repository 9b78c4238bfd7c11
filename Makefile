# make setup | demo | test | check   (make help lists the targets, make prove all other proofs)
#
# PYTHON       interpreter to build the environment with, 3.11 or newer   (make setup PYTHON=python3.12)
# TORCH_INDEX  index to take torch from, where the default one is not wanted: people without a GPU save
#              gigabytes with PyTorch's own index of CPU wheels            (make setup TORCH_INDEX=URL)
# DAYS         make test runs a case in so many of the tests that take turns (@pytest.mark.rotated), other cases
#              every day; with 1 it runs all of them                       (make test DAYS=1)

PYTHON ?= python3
TORCH_INDEX ?=
DAYS ?= 4
# Each of a test's many processes would compile kit's sources again.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
STAMP := .venv/.complete

.DEFAULT_GOAL := help
.PHONY: help $(shell sed -nE 's/^([a-z-]+):.*## .*/\1/p' $(firstword $(MAKEFILE_LIST)))

help:
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 14

setup: $(STAMP)  ## a virtual environment in .venv with what CI runs

$(STAMP): pyproject.toml constraints.txt scripts/setup.sh
	@PYTHON='$(PYTHON)' TORCH_INDEX='$(TORCH_INDEX)' bash scripts/setup.sh

demo: setup  ## the main job, end to end: plan, three engines, a kill, a change of engine, export, a planted fault
	@$(BIN)/python -m benchmarks demo

test: setup  ## all tests, on two cores in about seventeen minutes; with DAYS=1 every case of all
	@$(BIN)/python -m pytest -n 2 --dist loadgroup --days $(DAYS)

FAST := tests/planning tests/specs tests/emit tests/diagnose/test_lint.py tests/test_proofs.py tests/test_structure.py
SLOW := $(addprefix tests/planning/test_,accepted.py activations.py approximate.py invariants.py tables.py)
test-fast: setup  ## what plans, emits and lints, without engines, in eighty seconds: for every change
	@$(BIN)/python -m pytest -n 2 --dist loadgroup --days $(DAYS) -q $(FAST) $(SLOW:%=--ignore %)

check: lint types test  ## lint, types and tests; CI runs the demo and more (.ci/run)

lint: setup  ## ruff: rules and format; words of the field
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python scripts/check_words.py

types: setup  ## mypy, strict
	@$(BIN)/mypy

parity: setup  ## some layouts of every kind, launched against plain torch, then planted faults: about six minutes
	@$(BIN)/python -m benchmarks parity

rehearse: setup  ## one recipe in small, another one every day
	@$(BIN)/python -m benchmarks rehearse

gpu: setup  ## eight minutes on one CUDA GPU: every promise of a plan; DEVICE=cpu for a dry run
	@PYTHON=$(BIN)/python bash benchmarks/gpu/run.sh --device $(or $(DEVICE),cuda)

prove: setup  ## lists every other proof with its minutes; NAME=parity-megatron runs one
	@$(BIN)/python -m benchmarks $(NAME)
