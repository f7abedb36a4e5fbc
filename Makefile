# make demo    train a small GPT-MoE on four ranks of this machine, kill one, compare
# make test    lint is separate: make lint
SHELL := bash
PYTHON_BIN := .venv/bin/python
RUN_DIR ?= runs/demo
NPROC ?= 4

.PHONY: help setup demo test test-cluster test-full lint format lock docs bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: ## make .venv with the pinned dependencies (quick when nothing changed)
	@scripts/bootstrap.sh

LAPTOP = examples/pretrain_moe/pretrain_gpt.py --config examples/pretrain_moe/configs/laptop.yaml

demo: setup ## train a small GPT-MoE twice, once with a rank killed half way, and compare the two: four minutes
	@echo "== four ranks, pipeline 2 x expert/data 2, failure-free"
	@.venv/bin/moevement launch --nproc $(NPROC) $(LAPTOP) --run-dir $(RUN_DIR)/failure_free
	@echo "== the same with one spare; rank 2 is killed in iteration 75"
	@.venv/bin/moevement launch --nproc $(NPROC) --spares 1 $(LAPTOP) --run-dir $(RUN_DIR)/killed \
	    --moevement-inject rank=2,iteration=75,phase=backward
	@echo "== are they the same?"
	@.venv/bin/moevement verify $(RUN_DIR)/failure_free $(RUN_DIR)/killed
	@.venv/bin/moevement report $(RUN_DIR)/failure_free $(RUN_DIR)/killed --plot $(RUN_DIR)/loss.png --trace $(RUN_DIR)/trace.json

test: setup ## the tests that CI runs: one representative of each kind
	@$(PYTHON_BIN) -m pytest

test-cluster: setup ## training under real Slurm on a cluster made of namespaces; needs root, slurm-wlm, munge, iproute2
	@$(PYTHON_BIN) -m pytest tests/cluster -rs

test-full: setup ## the exhaustive matrix too, that of the cluster with it
	@$(PYTHON_BIN) -m pytest -m ""
	@$(PYTHON_BIN) -m pytest -m "" tests/cluster -rs

lint: setup ## ruff and mypy
	@$(PYTHON_BIN) -m ruff check . && $(PYTHON_BIN) -m ruff format --check . && $(PYTHON_BIN) -m mypy

format: setup ## let ruff format the code
	@$(PYTHON_BIN) -m ruff check --fix-only . && $(PYTHON_BIN) -m ruff format .

# Not with --quiet: it lets no warning through, and strict mode counts none then.
docs: setup ## all pages as a site in site/; a link that leads nowhere is an error
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

lock: setup ## resolve requirements/requirements.in into the lock file
	@.venv/bin/uv pip compile --quiet --upgrade --python-version 3.12 --no-header --no-annotate \
	    requirements/requirements.in --output-file requirements/lock.txt

bench: setup ## startup, iteration time and memory of the laptop preset
	@$(PYTHON_BIN) -m benchmarks.laptop

clean: ## remove the environment and the demo's runs
	@rm -rf .venv runs site
