# One command each; every one does its own set-up first (instant when nothing changed).
#   PYTHON=/path/to/python3.12   use this Python          TESTS=tests/unit   run these tests only

SHELL := /bin/bash
TESTS ?= tests
PYTHON_BIN := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test check format lock

help: ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/'

setup: ## make .venv from the pinned lock
	@PYTHON="$(PYTHON)" bash scripts/setup.sh

quickstart: setup ## train a small model with GRPO, on two CPU cores, in under 10 minutes
	@$(PYTHON_BIN) -m examples.quickstart

test: setup ## run the tests (TESTS=path: some of them)
	@$(PYTHON_BIN) -m pytest -n 2 $(TESTS)

check: setup ## lint, format, types, rules of the repository
	@.venv/bin/pre-commit run --all-files --show-diff-on-failure

format: setup ## format the code and mend what the linter can
	@.venv/bin/ruff check --fix --quiet . ; .venv/bin/ruff format .

lock: ## resolve requirements/cpu.in into the pinned lock
	@PYTHON="$(PYTHON)" bash scripts/lock.sh
