# The daily commands. Each target's script or tool works alone, too.
.PHONY: help setup test all fast lint format budgets site wheel pins resolve demo
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile

setup: ## create .venv with everything that the tests need
	./launch/setup_environment.sh --test

test: ## run the checks and the fast tests, with one real run
	./launch/test.sh

all: ## run every check and test, as CI does
	./launch/test.sh --all

fast: setup ## run the fast tests
	.venv/bin/pytest -n auto --dist loadfile -m "not slow and not long"

lint: setup ## run ruff, mypy --strict and the layer check
	.venv/bin/ruff format --check . && .venv/bin/ruff check . && .venv/bin/mypy && .venv/bin/lint-imports

format: setup ## format the code and apply safe fixes
	.venv/bin/ruff format . && .venv/bin/ruff check --fix .

budgets: setup ## print the size and reach of the code beside their ceilings
	.venv/bin/python tests/test_budgets.py

site: setup ## build the documentation into site/
	.venv/bin/mkdocs build --strict

wheel: setup ## build the wheel into dist/
	rm -rf build && .venv/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

pins: setup ## write requirements_training.txt after a change of the dependencies
	./launch/pin_requirements.sh

resolve: ## resolve the dependencies for Python 3.11 to 3.14 (needs uv and the network)
	mkdir -p build && for version in 3.11 3.12 3.13 3.14; do echo "Python $$version" && \
	uv pip compile --quiet pyproject.toml --extra tensorboard --extra wandb --extra pictures --extra parquet \
	--python-version $$version --no-header --output-file build/resolved_$$version.txt || exit 1; done

demo: ## train the demonstration
	./launch/train.sh
