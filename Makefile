# `make demo` and `make test` do all the set-up on a fresh machine.
#
#   make demo       train on real proteins within a budget (EXAMPLE_ARGS= passes more options)
#   make test       every test on $(PYTHON); the manager's and the rewrite's on a second Python too
#   make sanitize   the C++ tests under AddressSanitizer+UBSan and under ThreadSanitizer
#   make bench      the benchmarks, quick form; results in results/
#   make lint       formatting, lint, types
#
# The environment is rebuilt only when pyproject.toml changes, the extension only when its sources
# do. PYTHON chooses the interpreter, OTHER_PYTHON the second one (empty: none).

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -n 2
BUILD_JOBS ?= 2
OTHER_PYTHON ?= $(shell PYTHON='$(PYTHON)' .ci/other-python)
OTHER_VENV = $(VENV)-other

NATIVE_SOURCES := CMakeLists.txt $(wildcard xla_ext/*.cc xla_ext/*.h)
# What a second version of Python and JAX can break: everything that touches jaxprs or the module.
OTHER_TESTS = tests/manager tests/rewrite tests/managed tests/planning tests/loops tests/targets
# Not here: `table` runs most of these again, `alphafold_memory` takes JAX's CUDA plugin, and
# `alphafold_training` half an hour and more.
BENCHMARKS = memory planner planner_gap alphafold_trunk memory_limit beyond_memory call_overhead spill_bandwidth \
    while_loop pilot

export CMAKE_BUILD_PARALLEL_LEVEL = $(BUILD_JOBS)
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: venv demo test test-main test-other sanitize bench lint format clean

venv: $(VENV)/native.stamp

# $(1): environment, $(2): interpreter, $(3): extra
define environment
$(1)/dependencies.stamp: pyproject.toml
	$(2) -m venv $(1)
	$(1)/bin/python -m pip install --quiet 'scikit-build-core>=0.10' 'nanobind>=2.4' 'jax>=0.10.2' \
	    cmake ninja
	$(1)/bin/python -m pip install --quiet --no-build-isolation -Cbuild-dir=build/{wheel_tag} \
	    -e '.[$(3)]'
	touch $$@ $(1)/native.stamp

$(1)/native.stamp: $(1)/dependencies.stamp $(NATIVE_SOURCES)
	$(1)/bin/python -m pip install --quiet --no-build-isolation --no-deps \
	    -Cbuild-dir=build/{wheel_tag} -e .
	touch $$@
endef

$(eval $(call environment,$(VENV),$(PYTHON),all))
$(eval $(call environment,$(OTHER_VENV),$(OTHER_PYTHON),test))

demo: venv
	$(VENV)/bin/python examples/train_alphafold.py --demo $(EXAMPLE_ARGS)

test: test-main test-other

test-main: venv
	JAX_PLATFORMS=cpu $(VENV)/bin/python -m pytest $(PYTEST_ARGS)

ifeq ($(strip $(OTHER_PYTHON)),)
test-other:
	@echo "Skipped the tests on a second Python: neither python3.13 nor python3.11 was found" \
	    "beside $(PYTHON); set OTHER_PYTHON to the path of one."
else
test-other: $(OTHER_VENV)/native.stamp
	JAX_PLATFORMS=cpu $(OTHER_VENV)/bin/python -m pytest $(PYTEST_ARGS) $(OTHER_TESTS)
endif

SANITIZERS = address thread
FLAGS_address = address,undefined
FLAGS_thread = thread

sanitize: $(SANITIZERS:%=sanitize-%)

sanitize-%: venv
	mkdir -p build
	PATH="$(abspath $(VENV))/bin:$$PATH" cmake -S . -B build/sanitize-$* -G Ninja \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DJDYNOFF_MODULE=OFF -DJDYNOFF_TESTS=ON \
	    -DJDYNOFF_SANITIZE=$(FLAGS_$*) > build/sanitize-$*.log
	PATH="$(abspath $(VENV))/bin:$$PATH" cmake --build build/sanitize-$* -j $(BUILD_JOBS)
	PATH="$(abspath $(VENV))/bin:$$PATH" ctest --test-dir build/sanitize-$* --output-on-failure

bench: venv
	mkdir -p results
	status=0; for name in $(BENCHMARKS); do \
	    $(VENV)/bin/python -m benchmarks.$$name --quick --json results/$$name.json || status=1; \
	done; exit $$status

lint: venv
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/clang-format --dry-run -Werror xla_ext/*.cc xla_ext/*.h xla_ext/tests/*.cc \
	    xla_ext/tests/*.h
	$(VENV)/bin/mypy

format: venv
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/clang-format -i xla_ext/*.cc xla_ext/*.h xla_ext/tests/*.cc xla_ext/tests/*.h

clean:
	rm -rf build results $(VENV) $(OTHER_VENV)
