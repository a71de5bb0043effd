# Every target sets up .venv by itself. PYTHONSAFEPATH keeps the root folders (kernels, export, ...) off sys.path.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FOLDERS := runtime policies kernels export android_bench evals pocket tests src/kvcap/*.py

.PHONY: setup chat test test-all check build-check format clean

setup: $(VENV)/.ready ## the environment alone

chat: $(VENV)/.ready ## chat with the built-in model under a 256-token cap
	@$(BIN)/kvcap chat pocket --kv-budget-tokens 256

test: $(VENV)/.ready ## every feature once, in some minutes
	$(BIN)/pytest

test-all: $(VENV)/.ready ## all tests; again on the oldest transformers, and with quantised weights
	$(BIN)/pytest --all
	scripts/test-oldest
	scripts/test-quantised

check: $(VENV)/.ready ## lint, format, types, import rules
	$(BIN)/ruff check $(FOLDERS)
	$(BIN)/ruff format --check $(FOLDERS)
	$(BIN)/mypy
	$(BIN)/pytest -q -n 0 tests/test_imports.py

build-check: $(VENV)/.ready ## wheel from the sdist, in a fresh environment
	scripts/build-check

format: $(VENV)/.ready
	$(BIN)/ruff check --fix $(FOLDERS)
	$(BIN)/ruff format $(FOLDERS)

$(VENV)/.ready: pyproject.toml constraints.txt
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (once, a few minutes) ..."
	@$(BIN)/pip install --quiet --requirement constraints.txt
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,plot]'
	@$(BIN)/python -m kvcap.android_bench.server.vendor || echo "going on without the page of kvcap android serve"
	@touch $@

clean:
	rm -rf $(VENV) .venv-oldest .quantised build dist
