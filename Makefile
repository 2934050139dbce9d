# `make run` and `make test` set themselves up: a virtual environment, this package, then the job.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready

.PHONY: run test lint types bench clean

run: $(READY)
	$(VENV)/bin/python -m experiments.fmcsc $(ARGS)

# In the order of files: those with few tests take longest, and would come last, one after another.
test: $(READY)
	$(VENV)/bin/python -m pytest --numprocesses=auto --dist=loadfile --no-loadscope-reorder $(ARGS)

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(READY)
	$(VENV)/bin/mypy

bench: $(READY)
	$(VENV)/bin/python -m benchmarks.fmcsc $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache

# The stamp is written last: an installation that broke off is made again.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; give one with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@
