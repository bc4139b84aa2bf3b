# Needs only make and a Python >= 3.11. Every target works alone on a fresh clone: `make train`, `make test`.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=

# One thread per process: the tests and the local ranks are the parallelism.
export OMP_NUM_THREADS ?= 1

.PHONY: help env train test test-full opcheck lint bench clean

help:
	@echo "make train       train a byte-level GPT on four local ranks   (ARGS='--steps 50 --mesh dp=4')"
	@echo "make test        the quick tests"
	@echo "make test-full   every test, with many more random examples"
	@echo "make opcheck     every op rule against the unsharded op; writes docs/ops.md"
	@echo "make lint        ruff and mypy"
	@echo "make bench       fparallel beside its peers, as ratios"
	@echo "make env         only the virtual environment (.venv)"

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 found. Fix: install one, or run make PYTHON=/path/to/python3."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch $@

train: env
	$(BIN)/fparallel train $(ARGS)

test: env
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not full" $(ARGS)

test-full: env
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --hypothesis-profile=full $(ARGS)

opcheck: env
	@mkdir -p docs
	$(BIN)/python -m fparallel.testing.opcheck --out docs/ops.md $(ARGS)

lint: env
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: env
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	$(BIN)/python -m benchmarks.run $(ARGS)

clean:
	rm -rf $(VENV) runs .hypothesis .mypy_cache .pytest_cache .ruff_cache
