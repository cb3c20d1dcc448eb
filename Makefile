# make demo · make test · make check · make bench · make install · make clean
#   PY=python3.12          another Python (3.11 or newer)
#   TORCH_INDEX=URL        where to take torch from: the index URL that https://pytorch.org/get-started/locally shows
#   VENV=DIR               where the virtual environment goes

PY ?= python3.11
TORCH_INDEX ?=
VENV ?= .venv

BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==/torch==/p' requirements/core.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: demo test check bench models install clean

demo: $(VENV)/core.stamp
	$(BIN)/python -m miniverl.main +experiment=gkd_demo

test: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	PYTHONPATH=. $(BIN)/lint-imports --no-cache

bench: $(VENV)/bench.stamp
	OMP_NUM_THREADS=1 TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python -m benchmarks.run_all

# Retrains the embedded demo family from its recipes into build/models (docs/demo-models.md).
models: $(VENV)/core.stamp
	rm -rf build/models
	for name in teacher student_low_data student_no_carry; do \
	  OMP_NUM_THREADS=1 $(BIN)/python -m miniverl.main +experiment=make_demo_$$name trainer.resume=never \
	    trainer.run_dir=build/models/$$name || exit 1; done

install: $(VENV)/dev.stamp

$(VENV)/core.stamp: requirements/core.txt requirements/check_torch.py
	test -x $(BIN)/pip || $(PY) -m venv $(VENV)
	$(BIN)/python requirements/check_torch.py "$(TORCH)" "$(TORCH_INDEX)"
	@echo "Installing into $(VENV); the first time, this takes some minutes."
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(PIP) -r requirements/core.txt
	touch $@

$(VENV)/dev.stamp: $(VENV)/core.stamp requirements/dev.txt requirements/rewards.txt
	$(PIP) -r requirements/core.txt -r requirements/rewards.txt -r requirements/dev.txt
	touch $@

$(VENV)/bench.stamp: $(VENV)/core.stamp requirements/bench.txt
	$(PIP) -r requirements/core.txt -r requirements/bench.txt
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis benchmarks/out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
