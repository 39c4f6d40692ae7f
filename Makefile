# SPDX-License-Identifier: Apache-2.0
# Nothing is needed before these but Python 3.11 with venv and pip; each target sets up .venv first where it is missing.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench clean set-up

demo: set-up  ## The main job: a real server, cold and warm and restarted, as one table
	$(BIN)/python -m tests.demo

test: set-up  ## All tests but the benchmarks; ARGS="-k name" narrows them
	$(BIN)/python -m pytest --ignore=tests/benchmarks $(ARGS)

lint: set-up  ## Style, format, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: set-up  ## Benchmarks: numbers, no pass or fail
	$(BIN)/python -m pytest tests/benchmarks -p no:randomly -s $(ARGS)

set-up:
	@$(PYTHON) tools/bootstrap.py --venv $(VENV)

clean:  ## What was built and cached; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
