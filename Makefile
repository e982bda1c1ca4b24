# Two commands set everything up on a machine that has Python 3.10 or newer and make:
#   make demo    creates .venv, installs, runs the main job (GPT-2 124M in 2 processes)
#   make test    the same, runs the tests
# PIP_ARGS goes to pip, for example
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
# where the default index would bring a CUDA build of torch.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint coverage clean

demo: $(VENV)/hf
	$(BIN)/python examples/gpt2.py

test: $(VENV)/test
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not dist"
	$(BIN)/python -m pytest -q -m dist

lint: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# every type that the installed transformers has: hours, and goes on where it stopped
coverage: $(VENV)/hf
	$(BIN)/python benchmarks/coverage.py --jobs 2 --write

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/hf $(VENV)/test $(VENV)/dev: $(VENV)/%: $(VENV)/created pyproject.toml constraints.txt
	$(INSTALL) -e ".[$*]"
	touch $@
