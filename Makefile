# SPDX-License-Identifier: Apache-2.0
# Every target makes .venv first if it has to. PYTHON=python3.12 chooses the interpreter.
BIN := .venv/bin
BUILT := .venv/.installed
OUT ?= build/bench
# BENCH=philox runs one of the benchmarks
BENCH ?= all

.PHONY: demo test bench sanitize lint format clean
.DEFAULT_GOAL := test

$(BUILT): pyproject.toml setup.py constraints.txt .ci/venv $(wildcard csrc/*)
	bash .ci/venv

demo: $(BUILT)
	$(BIN)/lorakernels finetune --demo

test: $(BUILT)
	$(BIN)/python -m pytest $(ARGS)

bench: $(BUILT)
	$(BIN)/lorakernels bench $(BENCH) --output $(OUT) $(ARGS)

# what goes through torch is cuBLAS's: initcheck does not see what its kernels store by TMA
sanitize: $(BUILT)
	for tool in memcheck racecheck initcheck; do \
		compute-sanitizer --tool $$tool --error-exitcode 1 $(BIN)/python -m pytest -p no:cacheprovider -m gpu \
			-k "not goes_through_torch" tests/csrc tests/kernels tests/autograd/test_bias_dropout_add.py || exit 1; \
	done

lint: $(BUILT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror csrc/*

format: $(BUILT)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/*

clean:
	rm -rf .venv build dist *.egg-info lorakernels/_C*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find lorakernels graphs tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
