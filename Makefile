# Every target sets up .venv by itself. PYTHONSAFEPATH keeps the root folders (kernels, export, ...) off sys.path.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Modules are compiled once, not by every process of the tests.
unexport PYTHONDONTWRITEBYTECODE
export NO_MKDOCS_2_WARNING := 1
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DOCS := .docs
# Two goals at once, each one's output whole where make can.
PAIR := --no-print-directory --jobs 2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
FOLDERS := runtime policies kernels export android_bench evals serve pocket lab tests src/kvcap/*.py scripts/reference.py scripts/check-clients scripts/draw-chat scripts/list-models scripts/plant-faults

.PHONY: setup chat test test-ci test-phones test-all test-quantised test-lm-eval test-servers check build-check docs docs-build docs-setup format clean

setup: $(VENV)/.ready ## the environment alone

chat: $(VENV)/.chat ## chat under a 256-token cap: with smollm2, which is downloaded once, or else with pocket
	@model=smollm2; $(BIN)/kvcap pull $$model >/dev/null || { model=pocket; $(MAKE) --silent setup; \
	  echo "chatting with pocket instead, which is built in and knows only what it is told"; }; \
	$(BIN)/kvcap chat $$model --budget-tokens 256 --threads 1 # enough for both; a second would wait for a busy core

test: $(VENV)/.ready ## every feature once, in some minutes
	$(BIN)/pytest

test-ci: $(VENV)/.ready ## the fast tier and a part of the slow one; a part on the oldest transformers, the newest torch, with quantised weights, in lm-eval, on Ray
	$(BIN)/pytest --ci --durations=40
	scripts/test-oldest
	@$(MAKE) $(PAIR) test-quantised test-lm-eval TIER=--ci
	scripts/test-servers --ci
	test ! -f .venv-newest/.ready || scripts/test-newest

test-phones: $(VENV)/.ready ## of phones the tier that test-ci is of the rest
	$(BIN)/pytest --ci tests/android_bench

test-all: $(VENV)/.ready ## all tests, and all of these parts
	$(BIN)/pytest --all --durations=40
	scripts/test-oldest --all-of tests/runtime/models tests/runtime/backends/pytorch/test_batch.py
	@$(MAKE) $(PAIR) test-quantised test-lm-eval
	scripts/test-servers
	scripts/test-newest

test-quantised test-lm-eval test-servers: $(VENV)/.ready
	scripts/$@ $(TIER)

check: $(VENV)/.ready ## lint, format, spelling, types, import rules
	$(BIN)/ruff check $(FOLDERS)
	$(BIN)/ruff format --check $(FOLDERS)
	$(BIN)/python -m codespell_lib --skip "*/vendor/*,*.js" $(filter-out tests,$(FOLDERS)) docs README.md CONTRIBUTING.md mkdocs.yml Makefile # tests misspell on purpose
	$(BIN)/mypy
	$(BIN)/pytest -q -n 0 tests/test_imports.py

build-check: $(VENV)/.ready ## wheel from the sdist, in a fresh environment
	scripts/build-check

docs: $(DOCS)/.ready ## serve the documentation on http://localhost:8000
	$(DOCS)/bin/mkdocs serve

docs-setup: $(DOCS)/.ready

docs-build: $(DOCS)/.ready ## build it into out/site; a warning is an error
	$(DOCS)/bin/mkdocs build --strict

format: $(VENV)/.ready
	$(BIN)/ruff check --fix $(FOLDERS)
	$(BIN)/ruff format $(FOLDERS)

$(VENV)/.chat: pyproject.toml docker/install.sh # what a GGUF file needs, without torch
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) for chats (once, a minute; make setup adds PyTorch) ..."
	@test -f $(VENV)/.ready || ENGINE=llamacpp EDITABLE=--editable docker/install.sh . $(VENV)
	@touch $@

$(VENV)/.ready: pyproject.toml constraints.txt
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (once, a few minutes) ..."
	@$(BIN)/pip install --quiet --requirement constraints.txt
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,plot]'
	@$(BIN)/python -m kvcap.lab.vendor || echo "going on without the page of kvcap android serve"
	@touch $@

$(DOCS)/.ready: $(VENV)/.ready # what only the documentation needs
	@echo "setting up $(DOCS) (once, half a minute) ..."
	@scripts/make-overlay $(DOCS)
	@$(DOCS)/bin/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-oldest .docs .lm-eval .quantised .servers build dist out/site
