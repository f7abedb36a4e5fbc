# make demo    train a small GPT-MoE on four ranks of this machine, kill one, compare
# make test    lint is separate: make lint, and so is what compiles and builds: make test-packaging
SHELL := bash
PYTHON_BIN := .venv/bin/python
RUN_DIR ?= runs/demo
NPROC ?= 4

REPORTS ?= runs/tests
PYTEST = $(PYTHON_BIN) -m pytest

.PHONY: help setup demo test test-with test-packaging test-cluster test-full durations check-durations lint format lock \
    docs dist bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: ## make .venv with the pinned dependencies (quick when nothing changed)
	@scripts/bootstrap.sh

LAPTOP = examples/pretrain_moe/pretrain_gpt.py --config examples/pretrain_moe/configs/laptop.yaml
DEMO_ITERATIONS ?= 30
DEMO_KILL ?= 15

demo: setup ## train a small GPT-MoE twice, once with a rank killed half way, and compare the two: a minute and a half
	@echo "== four ranks, pipeline 2 x expert/data 2, failure-free"
	@.venv/bin/moevement launch --nproc $(NPROC) $(LAPTOP) --train-iters $(DEMO_ITERATIONS) --run-dir $(RUN_DIR)/failure_free
	@echo "== the same with one spare; rank 2 is killed in iteration $(DEMO_KILL)"
	@.venv/bin/moevement launch --nproc $(NPROC) --spares 1 $(LAPTOP) --train-iters $(DEMO_ITERATIONS) \
	    --run-dir $(RUN_DIR)/killed --moevement-inject rank=2,iteration=$(DEMO_KILL),phase=backward
	@echo "== are they the same?"
	@.venv/bin/moevement verify $(RUN_DIR)/failure_free $(RUN_DIR)/killed
	@.venv/bin/moevement report $(RUN_DIR)/failure_free $(RUN_DIR)/killed --plot $(RUN_DIR)/loss.png --trace $(RUN_DIR)/trace.json
	@echo "== what to try next"
	@echo "  .venv/bin/moevement top $(RUN_DIR)/killed --once"
	@echo "  .venv/bin/moevement report $(RUN_DIR)/killed --html $(RUN_DIR)/report.html"
	@echo "  make demo DEMO_ITERATIONS=60 DEMO_KILL=40    # and docs/laptop.md: faults, text and trainers of your own"

# A job of several ranks leaves a third of two cores idle: a second worker uses it.
WORKERS ?= auto

test: setup ## the tests that CI runs: one representative of each kind
	@mkdir -p $(REPORTS)
	@$(PYTEST) -n $(WORKERS) --dist worksteal --junitxml=$(REPORTS)/tests.xml

# An environment of its own beside .venv, so that .venv keeps the pinned torch.
TORCH ?=
MEGATRON ?=
TESTS ?= tests
WITH = .venv$(addprefix .torch-,$(TORCH))

test-with: ## run TESTS with another torch or Megatron-LM: make test-with TORCH=2.13.0 MEGATRON=CHECKOUT TESTS=tests/unit
	@VENV=$(WITH) scripts/bootstrap.sh
	@$(if $(TORCH),$(WITH)/bin/uv pip install --quiet --python $(WITH)/bin/python torch==$(TORCH))
	@$(WITH)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(addprefix --megatron=,$(MEGATRON)) $(TESTS)

test-packaging: setup ## what builds (kernels, wheel, the container's environment, site), and what starts many fresh interpreters
	@$(PYTEST) -n $(WORKERS) --dist loadfile -m "builds and not full" --durations=12

durations: test ## run the tests and write tests/durations.md
	@$(PYTHON_BIN) -m tests.durations table $(REPORTS)/tests.xml

check-durations: ## after make test: fail if a test takes more than 20 seconds and gives no reason
	@$(PYTHON_BIN) -m tests.durations check $(REPORTS)/tests.xml

# A job that waits for a lease or for Slurm leaves both cores idle: each worker has a cluster of its own.
test-cluster: setup ## training under real Slurm on clusters made of namespaces; needs root, slurm-wlm, munge, iproute2
	@$(PYTEST) tests/cluster -rs -n $(WORKERS) --dist worksteal --durations=30

test-full: setup ## the exhaustive matrix too, that of the cluster with it
	@$(PYTEST) -m ""
	@$(PYTEST) -m "" tests/cluster -rs -n $(WORKERS) --dist worksteal

lint: setup ## ruff and mypy
	@$(PYTHON_BIN) -m ruff check . && $(PYTHON_BIN) -m ruff format --check . && $(PYTHON_BIN) -m mypy

format: setup ## let ruff format the code
	@$(PYTHON_BIN) -m ruff check --fix-only . && $(PYTHON_BIN) -m ruff format .

# Not with --quiet: it lets no warning through, and strict mode counts none then.
docs: setup ## all pages as a site in site/; a link that leads nowhere is an error
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict
	@$(PYTHON_BIN) scripts/page_ages.py

lock: setup ## resolve requirements/requirements.in into the lock file
	@.venv/bin/uv pip compile --quiet --upgrade --generate-hashes --python-version 3.12 --no-header --no-annotate \
	    requirements/requirements.in --output-file requirements/lock.txt

dist: setup ## build wheel and source archive into dist/; equal sources give equal bytes
	@$(PYTHON_BIN) -m build --no-isolation --outdir dist .

bench: setup ## startup, iteration time and memory of the laptop preset
	@$(PYTHON_BIN) -m benchmarks.laptop

clean: ## remove the environment, the site and the runs of make demo and make test; runs of your own stay
	@rm -rf .venv site runs/demo $(REPORTS)
