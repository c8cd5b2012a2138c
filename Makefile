# Everything below sets its own environment up: .venv for the maintained stack (default),
# .venv-classic with STACK=classic. A second run finds it ready.
STACK ?= maintained
VENV := $(if $(filter classic,$(STACK)),.venv-classic,.venv)
PY := $(VENV)/bin/python
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help env demo test lint clean

help:  ## list these targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10
	@echo
	@echo 'STACK=classic   use OpenMMLab'"'"'s last own releases instead of the maintained fork'
	@echo 'ARGS="..."      further arguments, e.g. make test ARGS="-k registration"'
	@echo 'PYTHON=...      the Python (>= 3.10) that makes the environment'
	@echo 'TORCH_INDEX=... package index for torch, e.g. https://download.pytorch.org/whl/cpu'

env:  ## set the environment up (the other targets do it themselves)
	@bash tools/setup_env.sh $(STACK)

demo: env  ## train, evaluate and draw on the built-in data set: work_dirs/demo/
	$(PY) tools/demo.py $(ARGS)

test: env  ## run the tests, as many at a time as there are cores
	$(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal $(ARGS)

lint: env  ## check style
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

clean:  ## remove caches and built packages, but no environment and no work_dirs
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
	find inline_mm configs tools tests -name __pycache__ -prune -exec rm -rf {} +
