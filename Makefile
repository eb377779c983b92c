# Every target does its own set-up in .venv and re-installs only when pyproject.toml or constraints.txt changed.
#   PYTHON=python3.12      the interpreter that makes .venv
#   TORCH_BACKEND=cpu      PyTorch from its own index of that build (cpu, cu128, …); without it, what PyPI has
#   TEST_WORKERS=2         processes that run tests
PYTHON ?= python3
TORCH_BACKEND ?=
TEST_WORKERS ?= 2

BIN := .venv/bin
TORCH_INDEX := $(if $(TORCH_BACKEND),--extra-index-url https://download.pytorch.org/whl/$(TORCH_BACKEND))
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(TORCH_INDEX)
# One thread each: the tests themselves run side by side.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest
FLASH_ATTN := flash-attn-4==4.0.0b36
HOPPER := nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base nvidia-cutlass-dsl-libs-core nvidia-cutlass-dsl-libs-cu13 \
	quack-kernels apache-tvm-ffi torch-c-dlpack-ext einops cuda-python cuda-bindings cuda-pathfinder triton

.DEFAULT_GOAL := help
.PHONY: help demo test test-all rehearsal lint docs bench gpu peers constraints clean

help: ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile

demo: .venv/.run ## Build, verify, inspect and train on a corpus that every Python has
	$(BIN)/pack demo --out demo

test: .venv/.dev ## Run the tests, the long loops at a reduced count
	$(PYTEST) -n $(TEST_WORKERS) -m "not slow and not gpu"

test-all: .venv/.dev ## Run every test that this machine can run
	$(PYTEST) -n $(TEST_WORKERS)

rehearsal: .venv/.dev ## Run the CUDA path without a GPU, beside the kernels' own packages (downloads 600 MB)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest .rehearsal $(FLASH_ATTN) liger-kernel
	rm -rf .rehearsal/packages .rehearsal/hopper
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .rehearsal/packages liger-kernel triton
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .rehearsal/hopper $(FLASH_ATTN) $(HOPPER)
	$(PYTEST) tests/rehearsal

lint: .venv/.dev ## Check style, types and the generated docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini tests
	$(BIN)/python scripts/build_docs.py --check

docs: .venv/.dev ## Write docs/cli.md from --help
	$(BIN)/python scripts/build_docs.py

bench: .venv/.dev ## Measure against other projects, hours on a quiet machine; BENCH="build --quick" for some
	$(BIN)/python benchmarks/run.py $(BENCH)

gpu: .venv/.dev ## Check and measure everything that needs a GPU, 8 minutes; again for what is missing; GPU="--dry-run" on a CPU
	$(BIN)/python benchmarks/gpu_suite.py $(GPU)

peers: .venv/.dev ## Make environments of the other projects that make bench compares with, in .peers
	$(BIN)/python benchmarks/peers.py $(TORCH_INDEX:%=--pip=%)

constraints: .venv/.dev ## Pin what .venv holds now
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' > constraints.txt

clean: ## Remove .venv, caches and what the demo made
	rm -rf .venv .peers .rehearsal demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11. Run make PYTHON=python3.12 …"; exit 1; }
	@echo "Setting up .venv; the first time takes minutes (on Linux PyPI's torch is a CUDA build of gigabytes;" \
		"TORCH_BACKEND=cpu takes the small one)."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip

.venv/.run: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) --editable ".[train,report]"
	@touch $@

.venv/.dev: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) --editable ".[dev]"
	@touch $@ .venv/.run
