# Two commands do all the set-up: `make run` judges the bundled kernels here, `make test` tests the project.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: run test lint clean

run: $(STAMP)
	$(BIN)/attnconform run

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -P -m pytest -n 2

lint: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) attnconform-results report.html
