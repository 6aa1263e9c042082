# The daily commands. Each target's script or tool works alone, too.
.PHONY: help setup test fast lint format budgets demo
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile

setup: ## create .venv with everything that the tests need
	./launch/setup_environment.sh --test

test: ## run every check and test, as CI does
	./launch/test.sh

fast: setup ## run the fast tests
	.venv/bin/pytest -n auto --dist loadfile -m "not slow"

lint: setup ## run ruff, mypy --strict and the layer check
	.venv/bin/ruff format --check . && .venv/bin/ruff check . && .venv/bin/mypy && .venv/bin/lint-imports

format: setup ## format the code and apply safe fixes
	.venv/bin/ruff format . && .venv/bin/ruff check --fix .

budgets: setup ## print the size and reach of the code beside their ceilings
	.venv/bin/python tests/test_budgets.py

demo: ## train the demonstration
	./launch/train.sh
