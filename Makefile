# make demo, make test: everything else is set up by them. A virtual environment is made in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install -qq --constraint constraints.txt
WORKERS ?= 2

.PHONY: demo test test-all lint bench clean

demo: $(VENV)/installed
	$(BIN)/patchbayes demo

test: $(VENV)/installed
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS)

test-all: $(VENV)/installed $(VENV)/zoo
	$(BIN)/python -m pytest -n $(WORKERS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/installed $(VENV)/bench
	$(BIN)/python benchmarks/training_overhead.py
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/load_digests.py
	$(BIN)/python benchmarks/prediction.py
	$(BIN)/python benchmarks/prediction.py --early-stopping

# torch is installed before the project, so that pip never looks for another build of it.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch numpy
	$(PIP) --editable ".[cli,corruptions,tensorboard,reproduce,test,lint]"
	touch $@

$(VENV)/zoo: $(VENV)/installed
	$(PIP) --editable ".[zoo,hf,lightning,sklearn]"
	touch $@

$(VENV)/bench: $(VENV)/installed
	$(PIP) --editable ".[bench]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
