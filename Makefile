# Everything happens in .venv. `make serve` on a machine with Python 3.11+ and make is enough.

PYTHON ?= python3
# The machine's own kind of torch: pip takes a CPU or a CUDA build, whichever its index offers.
TORCH ?= torch==2.13.0
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help env serve test check drill soak starts mutants format bench model clean

help: ## what can be made
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "stopbath needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve,dev,system]'
	touch $(READY)

env: $(READY) ## make the environment

serve: $(READY) ## serve the bundled model on http://127.0.0.1:8000 (ARGS='--ranks 2' …)
	$(BIN)/stopbath serve $(ARGS)

test: $(READY) ## every test
	$(BIN)/python -m pytest $(ARGS)

check: $(READY) ## style, types, layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

drill: $(READY) ## the fault matrix on this machine, 20 times over (30 minutes; ARGS='--repeat 1': 3)
	$(BIN)/stopbath drill --repeat 20 --jobs 3 $(ARGS)

soak: $(READY) ## 2,000 random starts, faults and stops (12 minutes on two cores; ARGS='--seed 7')
	$(BIN)/python -m stopbath.drill.soak --cycles 2000 $(ARGS)

starts: $(READY) ## 300 starts, each hit at a random instant (5 minutes on two cores; ARGS='--seed 7')
	$(BIN)/python -m stopbath.drill.starts --runs 300 $(ARGS)

mutants: $(READY) ## classic defects, one by one in a copy: the tests must notice (6 minutes; ARGS='linger')
	$(BIN)/python scripts/mutants.py $(ARGS)

format: $(READY) ## let ruff lay the code out
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY) ## print the numbers of docs/numbers.md
	$(BIN)/python -m benchmarks $(ARGS)

model: $(READY) ## train the bundled model anew (about 40 minutes on two idle cores; needs npm)
	$(BIN)/python -m training.train_digits --out src/stopbath/pipelines/bundled \
		--classifier-out tests/data --seed 0 --checkpoints .cache/digits $(ARGS)
	$(BIN)/python -m training.evaluate --sheet docs/contact-sheet.png

clean: ## remove the environment and the caches
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
