# Every target works from a clean clone with nothing but Python 3.11 or newer and make, and is quick when there is
# nothing to do. `make demo` and `make test` are all that a newcomer needs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup check format test soak demo bench clean

help:           ## this list
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

setup:          ## .venv with vLLM for this machine, and the demo model
	@$(PYTHON) tools/setup.py

check: setup    ## format, lint, types, import contract, known vulnerabilities
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python tools/audit.py

format: setup   ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: setup     ## all tests, those on real vLLM among them
	$(BIN)/python -m pytest

soak: setup     ## far more schedules of faults and random inputs than `make test` has; half an hour or more
	$(BIN)/python -m tests.faults --seeds 50:500 --jobs 2
	BULKGEN_RANDOM_INPUTS=10000 $(BIN)/python -m pytest tests/test_random_input.py -q

demo: setup     ## the example job on real vLLM, and its report
	$(BIN)/bulkgen run jobs/summaries.yaml
	@$(BIN)/python tools/show.py out/summaries.parquet ticket summary output_tokens

bench: setup    ## benchmarks; results in bench/results/
	$(BIN)/python -m bench

clean:          ## remove what the targets made, .venv included; the demo model stays in the user's cache
	rm -rf .venv out build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache bench/results bench/data
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
