# megahour: `make demo` and `make test` are all that a bare machine needs (Python 3.11 or later).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

demo: RUN ?= runs/demo
run: RUN ?= runs/mine
RECIPE ?= recorded

.PHONY: help setup demo run test lint notebook clean

help:
	@echo 'make demo                 synthetic corpus, every step, word error rates (10 minutes, 2 cores)'
	@echo 'make run KALDI_DIR=DIR    the same on your own Kaldi data directory (RECIPE=recorded RUN=runs/mine)'
	@echo 'make test                 all tests'
	@echo 'make lint                 formatting, lint, types, import contracts'

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[demo,dev]'
	$(BIN)/python -m infra.spark
	touch $@

demo: setup
	$(BIN)/python -m jobs.demo --run $(RUN)

run: setup
	@test -n '$(KALDI_DIR)' || { echo 'KALDI_DIR is not set: make run KALDI_DIR=/data/mine RUN=runs/mine'; exit 2; }
	$(BIN)/python -m jobs.run --recipe $(RECIPE) --run $(RUN) --kaldi-dir '$(KALDI_DIR)'

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
