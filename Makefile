# `make demo` and `make test` do all set-up: they make the environment if there is none or pyproject.toml changed.
VENV := .venv
PYTHON_BIN := $(VENV)/bin/python
STAMP := $(VENV)/.complete

.PHONY: help demo test lint golden env clean

help:
	@echo "make demo     see what the plugin does on a real model; needs no GPU"
	@echo "make test     ruff, mypy and all tests"
	@echo "make lint     ruff and mypy alone"
	@echo "make golden   write the golden traces in traces/ anew; look at the difference before you commit it"
	@echo "make clean    remove the environment and all caches"

env: $(STAMP)

$(STAMP): pyproject.toml .ci/make-env
	@.ci/make-env $(VENV)
	@touch $@

demo: $(STAMP)
	@$(PYTHON_BIN) -m thunder_fusionfix.demo

test: lint
	$(PYTHON_BIN) -m pytest -q -n 2 --dist loadfile

lint: $(STAMP)
	$(PYTHON_BIN) -m ruff check .
	$(PYTHON_BIN) -m ruff format --check .
	$(PYTHON_BIN) -m mypy

golden: $(STAMP)
	$(PYTHON_BIN) -m pytest -q tests/test_golden.py --bless

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
