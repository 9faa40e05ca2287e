# `make demo`, `make bench` and `make test` set up everything they need in .venv, from a fresh clone.
PYTHON ?= python3
# One exact release: it comes as a CPU build where the index has one, and is what the project is tested with.
TORCH ?= torch==2.13.0
# Before edge-qkv itself: one of its libraries is compiled against it.
EXECUTORCH ?= executorch==1.5.1 torchao==0.18.0
# Built from its sources, and not for `make test`: it takes many minutes.
LLAMA ?= llama-cpp-python==0.3.36
LLAMA_FLAGS ?= $(shell sh bench/peers/llama_flags.sh)
PEERS ?= 1.2B/Q-MQA
THREADS ?= 1 $(shell nproc 2>/dev/null || echo 2)
# Processes that run the tests, each on a core and in up to 3 GB of memory.
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(shell find runtime -name '*.cpp' -o -name '*.h' -o -name '*.cmake' -o -name '*.txt' 2>/dev/null)

.PHONY: demo bench test test-all test-arm64 test-llama lint format clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	$(BIN)/edge-qkv demo --output demo

# The model beside its peers: more than an hour and 8 GB the first time, for llama.cpp is built and five models of 1.2B
# are exported. PEERS=300M/Q-MQA is quicker, and `edge-qkv bench model` measures one package in minutes.
bench: $(VENV)/llama
	$(BIN)/edge-qkv export edge_qkv/bundled --output build/bench/shakespeare
	$(BIN)/edge-qkv bench build/bench/shakespeare --output build/bench
	$(BIN)/edge-qkv bench attention --threads $(THREADS) --output build/bench/attention
	$(BIN)/edge-qkv bench peers $(PEERS) --output build/bench/peers

# What is run between edits. A file's tests run in one process, in their order: they share what they made.
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
test: $(VENV)/installed
	$(PYTEST) -m 'not slow'

# All tests, those of large models and of every lowering too.
test-all: $(VENV)/installed
	$(PYTEST)

# On emulated 64-bit ARM processors. EDGE_QKV_ARM64=required: what cannot be downloaded is an error and not skipped.
test-arm64: $(VENV)/installed
	$(BIN)/python tests/arm64/run.py

# GGUF packages in llama.cpp itself, and sessions on them.
test-llama: $(VENV)/llama
	$(BIN)/python -m pytest tests/llama tests/sessions -k llama -rP

lint: $(VENV)/linted
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find runtime \( -name '*.cpp' -o -name '*.h' \) -print0 | xargs -0 $(BIN)/clang-format --dry-run --Werror

format: $(VENV)/linted
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find runtime \( -name '*.cpp' -o -name '*.h' \) -print0 | xargs -0 $(BIN)/clang-format -i

clean:
	rm -rf $(VENV) build demo .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/torch: $(VENV)/bin/python
	@echo "installing PyTorch and the exporter's libraries into $(VENV); the first time takes minutes"
	$(BIN)/python -m pip install --quiet $(TORCH)
	@touch $@

$(VENV)/executorch: $(VENV)/torch
	$(BIN)/python -m pip install --quiet $(EXECUTORCH)
	@touch $@

# Editable: Python sources are used where they are; a change of the native sources installs again.
$(VENV)/installed: $(VENV)/executorch $(SOURCES)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/llama: | $(VENV)/installed
	@echo "building llama-cpp-python into $(VENV); once, for many minutes"
	CMAKE_ARGS="$$CMAKE_ARGS -DCMAKE_C_FLAGS='$(LLAMA_FLAGS)' -DCMAKE_CXX_FLAGS='$(LLAMA_FLAGS)'" $(BIN)/python -m pip install --quiet $(LLAMA)
	@touch $@

$(VENV)/linted: $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet ruff==0.14.6 clang-format==21.1.6
	@touch $@
