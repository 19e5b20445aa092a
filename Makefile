# megahour: `make demo` and `make test` are all that a bare machine needs (Python 3.11 or later).
PYTHON ?= python3
VENV := .venv
AIRFLOW := .venv-airflow
STORES := .venv-stores
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Each process of a run would compile all modules again: half a second of a core at each start.
unexport PYTHONDONTWRITEBYTECODE

demo: RUN ?= runs/demo
run: RUN ?= runs/mine
RECIPE ?= recorded
# What is ingested; without any of it the corpus must be there already.
SOURCE = $(if $(KALDI_DIR),--kaldi-dir '$(KALDI_DIR)') $(foreach each,$(MANIFEST),--manifest '$(each)') \
  $(if $(LEXICON),--lexicon '$(LEXICON)') $(if $(LANGUAGE_MODEL),--language-model '$(LANGUAGE_MODEL)')

# Processes that make chaos kills, on local paths and again in S3.
KILLS ?= 200
# A file's tests run in one process and share what they set up; the longest files begin.
PYTEST = $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo run test faults chaos packages gpu compat dist docs format lint audit clean

help:
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-8s %s\n", $$1, $$2}' Makefile

setup: $(VENV)/.developed ## the environment of tests and linters, in .venv; demo and run need less

INSTALLED_BY = pyproject.toml constraints.txt $(wildcard */*/*.c */*/*/*.c)
# Python compiles what is imported; to compile all that is installed took a third of the CPU.
define install
	@echo 'Installing Python packages for $(PURPOSE) into $(VENV). This takes about 5 minutes: torch and Spark are large.'
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[$(EXTRAS)]'
	$(BIN)/python -m infra.spark.session
	touch $(VENV)/.ready
endef

$(VENV)/.ready: EXTRAS = demo
$(VENV)/.ready: PURPOSE = all steps and the synthetic corpus
$(VENV)/.ready: $(INSTALLED_BY)
	$(install)

# Tests and linters, beside all that a run needs.
$(VENV)/.developed: EXTRAS = dev,docs
$(VENV)/.developed: PURPOSE = all steps, tests and linters
$(VENV)/.developed: $(INSTALLED_BY)
	$(install)
	touch $@

demo: $(VENV)/.ready ## synthetic corpus, every step, word error rates (10 minutes, 2 cores); RUN=runs/demo
	$(BIN)/python -m jobs.demo --run $(RUN)

run: $(VENV)/.ready ## every step on KALDI_DIR=DIR, on MANIFEST='labelled=URI URI heldout=URI' LEXICON=URI, or on the corpus at corpus.uri; RECIPE=recorded RUN=runs/mine
	$(BIN)/python -m jobs.run --recipe $(RECIPE) --run $(RUN) $(SOURCE)

test: setup ## all tests but those below
	$(PYTEST) --numprocesses 2

# Airflow pins what we pin otherwise, so it has an environment of its own.
$(AIRFLOW)/.ready: infra/airflow/constraints.txt
	$(PYTHON) -m venv $(AIRFLOW)
	$(AIRFLOW)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $< apache-airflow apache-airflow-providers-standard
	touch $@

# S3 servers, with what they need.
$(STORES)/.ready: tests/infra/store/servers.txt
	$(PYTHON) -m venv $(STORES)
	$(STORES)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

packages:
	sh tests/install_packages.sh || echo 'Ceph, sclite, PortAudio or Chromium cannot be installed here: tests that need the first three are skipped'

faults: setup packages $(STORES)/.ready ## a Spark cluster, Ceph, Swift, rclone, sclite, Chromium, PortAudio (apt), every step in an S3 that misbehaves, some kills
	$(PYTEST) --numprocesses 2 -m 'cluster and not chaos' -rs

chaos: setup packages $(STORES)/.ready $(AIRFLOW)/.ready ## those of make faults, and the long ones: KILLS=200, all schedules, Airflow
	$(PYTEST) --numprocesses 4 -m 'cluster or chaos' --kills $(KILLS) -rs
	FUZZ_EXAMPLES=1000 $(PYTEST) --numprocesses 4 tests/fuzzing tests/pipeline tests/training/algorithms

gpu: setup ## tests on a CUDA device, which needs a CUDA build of torch in .venv
	$(PYTEST) -m gpu tests/gpu

compat: setup ## every step with the oldest and the newest versions, and each Spark (CORNERS="oldest")
	$(BIN)/python -m tests.compat $(CORNERS)

dist: $(VENV)/.ready ## code and dependencies for spark-submit on a cluster
	$(BIN)/python -m jobs.package --folder dist
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	cp constraints.txt dist

docs: setup ## the documentation site, in build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: setup ## format the code, and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup docs ## formatting, lint, types, import contracts, templates, images, scripts, make docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/cfn-lint infra/cloudformation/*
	$(BIN)/megahour roles | $(BIN)/cfn-lint
	$(BIN)/hadolint infra/docker/*.Dockerfile
	$(BIN)/shellcheck infra/*/*.sh tests/*.sh

audit: setup ## known vulnerabilities of the pinned dependencies, as advisory services list them
	$(BIN)/python -m tests.dependency_audit

clean: ## remove what the other commands made, runs too
	rm -rf $(VENV) .venv-3.* $(AIRFLOW) $(STORES) build */*/*.so */*/*/*.so *.egg-info dist runs
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
