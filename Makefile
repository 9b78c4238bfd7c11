# make setup | demo | test | check   (make help lists them)
#
# PYTHON       interpreter to build the environment with, 3.11 or newer   (make setup PYTHON=python3.12)
# TORCH_INDEX  index to take torch from, where the default one is not wanted: people without a GPU save
#              gigabytes with PyTorch's own index of CPU wheels            (make setup TORCH_INDEX=URL)

PYTHON ?= python3
TORCH_INDEX ?=
BIN := .venv/bin
STAMP := .venv/.complete

.DEFAULT_GOAL := help
.PHONY: help $(shell sed -nE 's/^([a-z-]+):.*## .*/\1/p' $(firstword $(MAKEFILE_LIST)))

help:
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 14

setup: $(STAMP)  ## a virtual environment in .venv with what CI runs

$(STAMP): pyproject.toml constraints.txt scripts/setup.sh
	@PYTHON='$(PYTHON)' TORCH_INDEX='$(TORCH_INDEX)' bash scripts/setup.sh

demo: setup  ## the main job, end to end: plan, three engines, relay, export, a planted fault
	@$(BIN)/python -m benchmarks.system_tests.demo

ops: setup  ## compile what NVMe offload needs, three minutes and once (libaio-dev, g++); its tests are skipped without
	@DS_ACCELERATOR=cpu $(BIN)/python -m kit.engines.deepspeed.ops

liger: setup  ## Liger and Triton beside the environment, 285 MB, for the test in Triton's interpreter; it is skipped without
	@test -d .venv/interpreted/triton || $(BIN)/python -m pip install --quiet --no-deps --target .venv/interpreted liger-kernel==0.8.5 triton==3.9.0

test: setup  ## all tests, on two cores in twelve minutes
	@$(BIN)/python -m pytest -n 2 --dist loadgroup

parity: setup  ## some layouts of every kind, really launched against plain torch, then planted faults: about six minutes
	@$(BIN)/python -m benchmarks.system_tests.parity
	@$(BIN)/python -m benchmarks.system_tests.parity --plant-all

parity-daily: setup  ## a third of `make parity`, another every day: what CI proves of it
	@$(BIN)/python -m benchmarks.system_tests.parity --rotate 3
	@$(BIN)/python -m benchmarks.system_tests.parity --plant-all --rotate 3

parity-all: parity-deepspeed  ## every layout of both engines against plain torch, on pools of processes, and every fault: forty minutes
	@$(BIN)/python -m benchmarks.system_tests.parity.launchers
	@$(MAKE) --no-print-directory parity-megatron

parity-deepspeed: setup  ## DeepSpeed's layouts, changes of layout and faults on pools of processes, docs/parity.md: ten minutes (after make ops)
	@$(BIN)/python -m benchmarks.system_tests.parity.deepspeed --write docs/parity.md
	@$(BIN)/python -m benchmarks.system_tests.parity.deepspeed --plant-all

parity-megatron: setup  ## families × layouts of Megatron-core on pools of processes, then its faults: half an hour
	@$(BIN)/python -m benchmarks.system_tests.parity.megatron --write docs/megatron-parity.md
	@$(BIN)/python -m benchmarks.system_tests.parity.megatron --plant-all

examples: setup  ## people's own scripts (Accelerator, Trainer, TRL) under kit's files, really launched: ten minutes
	@$(BIN)/python -m benchmarks.system_tests.examples

new-user: setup  ## a shipped recipe copied, edited and run by the commands of its README: a minute
	@$(BIN)/python -m benchmarks.system_tests.new_user

loading: setup  ## host memory of loading a 1B model at ZeRO-3 on two processes, and of its export; QLoRA on one: three minutes
	@$(BIN)/python -m benchmarks.performance.loading
	@$(BIN)/python -m benchmarks.performance.loading --qlora

pipeline-choice: setup  ## DeepSpeed's PipelineModule and AutoEP on two processes beside plain torch: a minute
	@$(BIN)/python -m benchmarks.tables.pipeline_choice

streaming: setup  ## Megatron's weights in and out beside a plain copy, and the stall of a checkpoint: two minutes
	@$(BIN)/python -m benchmarks.performance.streaming

relay: setup  ## runs that change engine or layout half-way, beside one that does not: three minutes
	@$(BIN)/python -m benchmarks.system_tests.relay

held-bytes: setup  ## what DeepSpeed holds beside the cost model, 40 configurations three minutes (after make ops)
	@$(BIN)/python -m benchmarks.accuracy.deepspeed_bytes

failures: setup  ## provoke sixteen failures on two processes and compare what the doctor says: four minutes, as root
	@$(BIN)/python -m benchmarks.system_tests.failures

hosts: setup  ## launch files on two and three hosts (namespaces, sshd, pdsh) beside one process: five minutes, as root
	@$(BIN)/python -m benchmarks.system_tests.hosts

preflight-hosts: setup  ## differences planted on three hosts (namespaces), and what the doctor says: four minutes, as root
	@$(BIN)/python -m benchmarks.system_tests.preflight --bandwidth

slurm: setup  ## the batch script in a real Slurm: time limit, signal, preemption, resume; five minutes, as root
	@$(BIN)/python -m benchmarks.system_tests.slurm

kills: setup  ## runs killed at random moments over engines and ZeRO stages, bit for bit the same after; torchrun restarts: ten minutes
	@$(BIN)/python -m benchmarks.system_tests.kills
	@$(BIN)/python -m benchmarks.system_tests.kills.launched

screens: setup  ## pictures of a real run for docs/images: the live line, and TensorBoard photographed by a headless Chromium: two minutes
	@$(BIN)/python -m benchmarks.tables.screens

overhead: setup  ## what the training loop, the data path and saving cost beside the engine: two minutes
	@$(BIN)/python -m benchmarks.performance.overhead

rehearse: setup  ## one recipe in small, another every day: what CI proves of them
	@$(BIN)/python -m benchmarks.system_tests.rehearsals --rotate 1 --no-write

rehearse-faults: setup  ## faults planted into rehearsals of each engine, each of which must turn one red: ten minutes
	@$(BIN)/python -m benchmarks.system_tests.rehearsals --plant-all

rehearse-all: setup  ## every recipe in small on CPU processes, and the table of recipes: an hour (after make ops)
	@$(BIN)/python -m benchmarks.system_tests.rehearsals

probe: setup  ## the cost model beside the probe, 75 full-size plans without a GPU: two minutes
	@$(BIN)/python -m benchmarks.accuracy.probe

plan-time: setup  ## seconds of a cold plan, to 16,384 GPUs, and how the search grows: half a minute
	@$(BIN)/python -m benchmarks.performance.plan_time

quality: setup  ## published production layouts beside the planner's best, half a minute
	@$(BIN)/python -m benchmarks.accuracy.quality

accepted: setup  ## 20,000 random cases, every emitted file handed to the program that reads it: some minutes
	@$(BIN)/python -m benchmarks.system_tests.accepted

trackers: setup  ## TensorBoard, W&B, MLflow and Trackio told by a run and read back: a minute (after pip install wandb mlflow trackio)
	@$(BIN)/python -m benchmarks.system_tests.trackers

lint: setup  ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup  ## mypy, strict for everything that plans
	@$(BIN)/mypy

check: lint types test  ## lint, types and tests; CI runs the demo too

gpu: setup  ## eight minutes on one CUDA GPU: every promise of a plan; DEVICE=cpu for a dry run
	@PYTHON=$(BIN)/python bash benchmarks/gpu/run.sh --device $(or $(DEVICE),cuda)
