# Both of these do all set-up themselves, into $(VENV): `make demo` and `make test`.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
export NO_ALBUMENTATIONS_UPDATE := 1
# Hundreds of processes import the same files: compile each once, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install demo test test-all test-gpu test-gpus coverage lint format upgrade clean

help:
	@echo "make demo      train, evaluate, export and predict on synthetic street scenes (3 to 9 minutes)"
	@echo "make test      the tests (make test-all: the slow ones too)"
	@echo "make test-gpu  what only a CUDA device can answer (tests/README.md)"
	@echo "make test-gpus whether 2 to 8 GPUs work: ten minutes, one report to send (tools/README.md)"
	@echo "make coverage  the tests, and which lines of segtrain they do not run"
	@echo "make lint      ruff and the import layers (make format: repair what can be repaired)"
	@echo "make upgrade   newest versions of everything; kept in $(CONSTRAINTS) if the tests pass"
	@echo "make clean     remove what these made, VENV=$(VENV) included"

# The requirements are installed again when they change; the package itself when this environment
# belongs to another checkout.
STAMP := $(VENV)/.segtrain-requirements
# The package leaves versions open; these are the ones that the tests last passed with.
CONSTRAINTS := .ci/constraints.txt
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
# Only its evaluator is used, as an oracle; its requirements would pull a GUI in.
ORACLE := --no-deps "cityscapesscripts>=2.2" pyquaternion

$(STAMP): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint $(CONSTRAINTS) --editable ".[dev]"
	$(PIP) --constraint $(CONSTRAINTS) $(ORACLE)
	touch $@

install: $(STAMP)
	@test "$$($(BIN)/python -c 'import segtrain, os; print(os.path.dirname(os.path.dirname(segtrain.__file__)))')" = "$(CURDIR)" \
	  || $(PIP) --no-deps --editable .

demo: install
	$(BIN)/python tools/demo.py

# Each worker begins with a part of the files as a whole, so that what the tests of a file share is
# made once.
WORKERS := -n auto --dist worksteal

# Which tests; .ci/run takes slow ones in, too.
SELECT ?= -m "not slow"

test: install
	$(BIN)/python -m pytest -q $(WORKERS) $(SELECT)

test-all: install
	$(BIN)/python -m pytest -q $(WORKERS)

# One after another: figures of tests that share the device would be of no use.
test-gpu: install
	$(BIN)/python -m pytest -m gpu

test-gpus: install
	$(BIN)/python tools/test_gpus.py $(ARGS)

coverage: install
	$(BIN)/python -m pytest -q $(WORKERS) -m "not slow" --cov --cov-report=term-missing:skip-covered

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch names the versions of the CUDA libraries itself.
upgrade:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade --upgrade-strategy eager --editable ".[dev]"
	$(PIP) --upgrade $(ORACLE)
	$(BIN)/python -m pytest -q $(WORKERS) -m "not slow"
	{ head -1 $(CONSTRAINTS); \
	  $(BIN)/pip freeze --exclude-editable | grep -viE "^(nvidia|cuda|triton)"; } > $(VENV)/frozen
	mv $(VENV)/frozen $(CONSTRAINTS)

clean:
	rm -rf $(VENV) runs/demo build dist *.egg-info .coverage .pytest_cache .ruff_cache .import_linter_cache
