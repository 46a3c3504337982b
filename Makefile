# Every target sets up what it needs: a virtual environment with the versions of constraints.txt.

PYTHON ?= python3
VENV ?= .venv
# Test processes; each keeps torch to one thread, so that they do not fight over the cores.
WORKERS ?= 2
# The demo's ranks, as torchrun starts them.
RANKS ?= 2
DEMO_ARGS ?=
BENCH_ARGS ?=
ZOO ?= .zoo
ZOO_ARGS ?=
PROGRAMS ?= 2000
FAULTS_ARGS ?=
TEST_ARGS ?=
SELECTED ?= not maintainer
# A revision that the working tree is compared with, bit for bit.
BEFORE ?=

BIN := $(VENV)/bin
# PYTHONWARNINGS: setuptools warns about every editable install.
INSTALL := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	--constraint constraints.txt
REQUIREMENTS := constraints.txt setup.cfg pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help setup demo docs test check faults zoo coverage bench cuda airbench lint types format clean

help:
	@echo "make demo    train an autoencoder on two ranks with Adam and with KFACAdam"
	@echo "             (DEMO_ARGS=--short: one seed; DEMO_ARGS=--search: learning rates; RANKS=2)"
	@echo "make bench   time K-FAC's steps beside the base optimizer's and peers'"
	@echo "             (BENCH_ARGS='--out benchmarks/results', or --short)"
	@echo "make cuda    prove and time it on a CUDA device, in 12 minutes (BENCH_ARGS='--out FOLDER');"
	@echo "             BENCH_ARGS=--brief: steps at the defaults alone, in 6 minutes"
	@echo "make airbench  train CIFAR-10 in seconds on a CUDA device (BENCH_ARGS='--data FOLDER')"
	@echo "make docs    build the documentation's site into build/site"
	@echo "make test    run the tests that show that an installation works (TEST_ARGS=...)"
	@echo "make check   run what make test leaves out: random programs, benchmarks, long trainings,"
	@echo "             faults and zoo (BEFORE=REVISION compares with it bit for bit)"
	@echo "make coverage  measure what all tests cover"
	@echo "make faults  plant faults one by one in a copy, and see that the tests catch each"
	@echo "             (FAULTS_ARGS='--only TEXT --out FILE')"
	@echo "make zoo     train architectures of four libraries for some steps, and run 2,000 random"
	@echo "             programs, in $(ZOO) (ZOO_ARGS='--sources peft --only LoRA', PROGRAMS=2000)"
	@echo "make lint    ruff: rules, formatting, limits; which floor imports which (make format repairs)"
	@echo "make types   mypy"
	@echo "make setup   only build the environment, in $(VENV)"
	@echo "make clean   remove the environment and all caches"

# The demo's environment: torch, the package itself, scikit-learn, matplotlib and rich.
$(VENV)/demo-ready: $(REQUIREMENTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
		"kaisa_optim needs Python 3.10 or newer; name one: make PYTHON=python3.11 ...")'
	@echo "Setting up $(VENV); torch is large, this can take some minutes"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) pip setuptools
	$(INSTALL) --no-build-isolation --editable '.[bench]'
	@touch $@

# The tests' and the tools' environment adds to it. On Linux the index has torchvision for CUDA's
# torch only; beside another one it can't be imported, and neither can what looks for it.
$(VENV)/all-ready: $(VENV)/demo-ready
	$(INSTALL) --no-build-isolation --editable '.[applications,bench,dev,integrations,test,tools]'
	@$(BIN)/python -c 'import torchvision' 2>$(VENV)/torchvision.log || { \
		echo "torchvision's wheel is not for this build of torch: leaving it out"; \
		$(BIN)/python -m pip uninstall --quiet --yes torchvision; }
	@touch $@

# The site's environment; signatures are read from the package itself.
$(VENV)/docs-ready: $(VENV)/demo-ready
	$(INSTALL) --no-build-isolation --editable '.[docs]'
	@touch $@

setup: $(VENV)/all-ready

# A broken link or an unknown name is an error.
docs: $(VENV)/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	$(BIN)/python docs/readability.py
	@echo "open build/site/index.html"

# OMP_NUM_THREADS: otherwise torchrun warns; the demo sets its threads itself.
demo: $(VENV)/demo-ready
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --local-addr 127.0.0.1 \
		--nproc-per-node $(RANKS) -m benchmarks.demo $(DEMO_ARGS)

# Peers are measured too where they are installed in $(VENV).
bench: $(VENV)/demo-ready
	$(BIN)/python -m benchmarks.step_time $(BENCH_ARGS)

# On a machine with a CUDA device; the tests that have one are run, too.
cuda: $(VENV)/all-ready
	$(BIN)/python -m benchmarks.cuda_trial $(BENCH_ARGS)

airbench: $(VENV)/all-ready
	$(BIN)/python -m benchmarks.airbench $(BENCH_ARGS)

test: $(VENV)/all-ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) -m '$(SELECTED)' $(TEST_ARGS)

# What make test leaves out: it takes an hour.
check: SELECTED = maintainer
check: test faults zoo
	$(if $(BEFORE),$(BIN)/python -m tests.support.compare_revisions $(BEFORE))

# One after the other: it takes about as long as the tests.
faults: $(VENV)/all-ready
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults $(FAULTS_ARGS)

# An environment of its own: torchvision stays in it, though its operators may not load.
$(ZOO)/ready: zoo-constraints.txt $(REQUIREMENTS)
	$(PYTHON) -m venv $(ZOO)
	PYTHONWARNINGS=ignore $(ZOO)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint zoo-constraints.txt --editable '.[test]' timm peft torchvision transformers
	@touch $@

zoo: $(ZOO)/ready
	OMP_NUM_THREADS=1 PROGRAMS=$(PROGRAMS) $(ZOO)/bin/python -m pytest tests/capture/test_programs.py
	OMP_NUM_THREADS=1 $(ZOO)/bin/python -m benchmarks.zoo $(ZOO_ARGS)

# Apart from test: to measure coverage takes half as long again.
coverage: override TEST_ARGS += --cov --cov-report=term --cov-fail-under=97
coverage: SELECTED = maintainer or not maintainer
coverage: test

lint: $(VENV)/all-ready
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/lint-imports --no-cache

format: $(VENV)/all-ready
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

types: $(VENV)/all-ready
	$(BIN)/python -m mypy

clean:
	rm -rf $(VENV) $(ZOO) build dist *.egg-info .coverage .coverage.* htmlcov demo.png
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find kaisa_optim tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +
