# `make run` and `make test` set themselves up: a virtual environment, this package, then the job.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
READY_DOCS := $(VENV)/.ready-docs
# The oldest supported versions of all dependencies, in an environment of their own.
LOWEST := .venv-lowest
# Containers often turn bytecode off, and then each process reads all sources for three seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-all test-lowest lint types docs bench deploy-demo fuzz clean

run: $(READY)
	$(VENV)/bin/python -m experiments.fmcsc --flagfile=experiments/fmcsc/presets/best.flags \
	  --flagfile=experiments/fmcsc/presets/best_digits.flags $(ARGS)

# Without what is marked slow (further variants, jobs that are killed, statistics of long runs), and
# without what is marked ci: whole jobs, and the methods that compile longest.
# In the order of files: those with few tests take longest, and would come last, one after another.
test: $(READY)
	$(VENV)/bin/python -m pytest --numprocesses=auto --dist=loadfile --no-loadscope-reorder $(ARGS)

# Fusions are compiled as users' are, which takes twice as long.
test-all:
	XLA_FLAGS="$(XLA_FLAGS)" $(MAKE) test ARGS="-m '' $(ARGS)"

# Damaged files and messages, a thousand of each kind, other ones each time.
fuzz: $(READY)
	JAXFEDMVC_FUZZ=1000 $(VENV)/bin/python -m pytest tests/test_fuzz.py $(ARGS)

# What depends on versions most: a run of every method, file formats, accounting, pictures. DPFMPS is
# left out, in both forms: its labels follow ties, which another release's rounding breaks otherwise.
test-lowest: $(LOWEST)/.ready
	$(LOWEST)/bin/python -m pytest tests/test_golden.py tests/test_federation.py tests/test_privacy.py \
	  tests/data tests/experiments/test_plots.py -m '' \
	  --deselect 'tests/test_golden.py::test_a_run_is_as_it_was[dpfmps]' \
	  --deselect 'tests/test_golden.py::test_a_run_is_as_it_was[dpfmps_p2est]' $(ARGS)

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(READY)
	$(VENV)/bin/mypy

docs: $(READY_DOCS)
	$(VENV)/bin/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build

# Three hospitals and a late one, as processes of this machine, over Flower.
deploy-demo: $(READY)
	$(VENV)/bin/python -m experiments.deploy_demo $(ARGS)

bench: $(READY)
	$(VENV)/bin/python -m benchmarks.fmcsc $(ARGS)

clean:
	rm -rf $(VENV) $(LOWEST) docs/_build docs/reference/generated .mypy_cache .pytest_cache .ruff_cache

# Stamps are written last: an installation that broke off is made again.
INSTALL := -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; give one with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(INSTALL) --editable '.[test]'
	@$(VENV)/bin/python -c 'import experiments.run'  # its bytecode, and no more, is written now
	@touch $@

$(READY_DOCS): $(READY)
	$(VENV)/bin/python $(INSTALL) --editable '.[docs]'
	@touch $@

$(LOWEST)/.ready: pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python \
	  --resolution lowest-direct --editable '.[test]'
	@touch $@
