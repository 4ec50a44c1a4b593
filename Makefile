# make run: the main job.  make test: the tests.  make lint: ruff.  Each sets up .venv first, once.
# PYTHON=python3.12 chooses the interpreter; ARGS="..." is passed on to pytest.

SHELL := /bin/bash
BIN := .venv/bin
SETUP := .venv/.setup-done
MODEL := examples/models/tiny-llama
OUT := out/tiny_llama
# One process a core up to four: beyond that, processes that share one GPU get in each other's way.
JOBS := $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1); echo $$(( n > 4 ? 4 : n )))

.PHONY: help setup run test test-all lint format clean
.DEFAULT_GOAL := help

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

$(SETUP): pyproject.toml scripts/setup.sh
	@PYTHON="$(PYTHON)" scripts/setup.sh
	@touch $@

setup: $(SETUP) ## Create .venv and install everything into it
	@echo "$(BIN) is set up."

run: $(SETUP) ## Find, verify and measure the kernels for the shipped model
	@echo "==> $(MODEL): plan, verification, generation before and after, report in $(OUT)"
	@# Its matrices are so small that a second thread costs more than it does.
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/tilegym integrate $(MODEL) --force --restart --output $(OUT)

test: $(SETUP) ## Run the tests; ARGS="tests/ops -k rope" runs some
	@echo "==> pytest in $(JOBS) processes"
	@# Dozens of tests start a Python of their own, which has compiled code to read only where it may be written.
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-all: override ARGS += --all
test-all: test ## Run slow tests, too, and tests for all that their parameters can be combined to

lint: $(SETUP) ## Check the code with ruff
	@echo "==> ruff check"
	@$(BIN)/ruff check .
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --check .

format: $(SETUP) ## Format the code and sort its imports with ruff
	@$(BIN)/ruff check --fix --select I .
	@$(BIN)/ruff format .

clean: ## Remove .venv and what the tools left
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info
