# SPDX-License-Identifier: Apache-2.0
# Every target makes .venv first if it has to. PYTHON=python3.12 chooses the interpreter.
BIN := .venv/bin
CSRC := $(shell find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.h')
# What tests, linters and pages need. The demo needs less, but takes this where it is there.
BUILT := .venv/.dev
TRAIN := $(or $(wildcard $(BUILT)),.venv/.train)
OUT ?= build/bench
# BENCH=philox runs one of the benchmarks
BENCH ?= all

# FULL=1 for the long form of check-gpu, which takes nine minutes; ARGS="--record" to write its ratios down. Its Python,
# and that of sanitize, is .venv's where that is there, else any with torch: a GPU machine without a network has its own.
CHECKED_BY = $(or $(PYTHON),$(shell ls $(BIN)/python 2>/dev/null),python3)

.PHONY: demo check test test-rest test-all test-sums test-gpu bench check-gpu sanitize docs wheels lint format clean
.DEFAULT_GOAL := test

.venv/.train .venv/.dev: .venv/.%: pyproject.toml setup.py constraints.txt .ci/venv $(CSRC)
	@bash .ci/venv $*

demo: $(TRAIN)
	@bash .ci/timed "3/3 training" $(BIN)/lorakernels finetune --demo

# Does it work here? What was built, and one test file of each part that a run needs; a minute at most.
CHECKS := tests/test_import.py tests/test_config.py tests/ops/test_ops.py tests/csrc/test_philox.py tests/autograd/test_linear.py \
	tests/modules/test_lora_linear_module.py tests/fusion/test_fuse_inputs.py tests/train/test_loop.py
.venv/.pytest: $(TRAIN)
	@$(BIN)/python -c "import hypothesis, pytest, xdist" 2>/dev/null || \
		$(BIN)/python -m pip install -q -c constraints.txt hypothesis pytest pytest-xdist
	@touch $@
check: .venv/.pytest
	@$(BIN)/lorakernels doctor
	$(TEST) -m "not slow" $(CHECKS)

# Two processes of one thread each, where pytest-xdist is there: most tests are too small for threads of their own.
# They take files in the order of tests/conftest.py.
PROCESSES ?= 2
SPREAD = $(shell $(CHECKED_BY) -c "import xdist" 2>/dev/null && echo --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder)

TEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest $(SPREAD)

# What compares values that were trained in two ways, with sums in two orders. It must not depend on this CPU's order:
# here are those of the oldest kernels of ATen, MKL and oneDNN, in two threads, and orders that depend on sizes.
SUMS := tests/train/test_ranks.py tests/train/test_pipeline_ranks.py tests/modules/test_batch.py \
	tests/modules/test_stacked_experts.py
OLDEST := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=2
OF_SIZES := OTHER_SUMS=1 ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 OMP_NUM_THREADS=1

# What protects a change, in five minutes on two cores. The rest is marked `slow`; CONTRIBUTING.md says what that is.
test: $(BUILT)
	$(TEST) -m "not slow" --seconds-file=build/seconds-test.csv $(ARGS)

test-rest: $(BUILT)
	$(TEST) -m slow --seconds-file=build/seconds-rest.csv $(ARGS)

test-all: test test-rest test-sums

test-sums: $(BUILT)
	$(OLDEST) $(BIN)/python -m pytest $(SPREAD) $(SUMS) $(ARGS)
	$(OF_SIZES) $(BIN)/python -m pytest $(SPREAD) $(SUMS) $(ARGS)

bench: $(BUILT)
	$(BIN)/lorakernels bench $(BENCH) --output $(OUT) $(ARGS)

# The tests marked gpu, a process a file, over all GPUs of the machine; ARGS="tests/graphs --limit-s 200" for some.
test-gpu:
	$(CHECKED_BY) tests/spread.py $(ARGS)

check-gpu:
	$(CHECKED_BY) benchmarks/models/check_gpu.py $(if $(FULL),--full) $(ARGS)

# Every kernel of csrc on its smallest calls, a process for each tool and group of tests/csrc/smallest.py, JOBS at once:
# minutes. FULL=1 for all their tests instead: an hour. Tensors are not cached, so that memcheck knows where each ends and
# initcheck that it is new.
SMALLEST := products gradients blocks groups quantize_grad quantize_lora_down lora_grad_a others
TOOLS ?= memcheck racecheck initcheck
JOBS ?= 8
SMALL_RUNS = $(foreach tool,$(TOOLS),$(SMALLEST:%=sanitize-$(tool)-%))
FULL_RUNS = $(TOOLS:%=sanitize-full-%)
SANITIZER = compute-sanitizer --target-processes all --error-exitcode 1

sanitize:
	+$(MAKE) --no-print-directory --keep-going --output-sync --jobs $(JOBS) $(if $(FULL),$(FULL_RUNS),$(SMALL_RUNS))
$(SMALL_RUNS): sanitize-%:
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool $(word 1,$(subst -, ,$*)) \
		$(CHECKED_BY) -m tests.csrc.smallest $(word 2,$(subst -, ,$*))

# initcheck does not see what kernels store by TMA, cuBLAS's and ours: not for what goes through torch, nor for contract
# tests, whose comparisons by torch read such results.
# --unpoisoned: the tests' own fill of new memory would hide from initcheck what a kernel reads before it is written
UNSEEN_memcheck := goes_through_torch
UNSEEN_racecheck := goes_through_torch
UNSEEN_initcheck := goes_through_torch or contract
SANITIZED := tests/csrc tests/kernels tests/ops tests/autograd/test_bias_dropout_add.py

$(FULL_RUNS): sanitize-full-%:
	$(SANITIZER) --tool $* \
		$(CHECKED_BY) -m pytest -q $(SPREAD) -p no:cacheprovider --unpoisoned -m gpu -k "not ($(UNSEEN_$*))" $(SANITIZED)

# The site of docs/ in build/site. A link that leads nowhere is an error.
docs: $(BUILT)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

wheels: $(BUILT)
	bash .ci/wheels

lint: $(BUILT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CSRC)

format: $(BUILT)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC)

clean:
	rm -rf .venv build dist *.egg-info lorakernels/_C*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find lorakernels graphs tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
