PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Processes that run tests; torch has one thread in each.
WORKERS ?= 2

.PHONY: setup demo test test-slow lint bench headline results docs eagle-peer peer wheels test-avx2 test-arm64 clean

setup: $(STAMP)

# What takes long is said, with a dot a second.
ticking = @printf '%s ' $(1); (while sleep 1; do printf .; done) & tick=$$!; trap "kill $$tick; echo" EXIT; $(2)

$(STAMP): pyproject.toml constraints.txt
	$(call ticking,"making $(VENV)",test -x $(BIN)/python || $(PYTHON) -m venv $(VENV))
	$(call ticking,"installing PyTorch",$(BIN)/python -m pip install --quiet --constraint constraints.txt torch)
	$(call ticking,"installing tokenswift and its tools",$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]')
	@touch $(STAMP)

demo: setup
	$(BIN)/tokenswift demo

# Compiled modules are kept whatever the environment says: each worker would compile all tests anew (12 s).
test: setup lint
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile

test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -n $(WORKERS) --dist loadfile
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutants.py $(WORKERS)

# The fast tests as a machine with AVX2 and no more runs them: torch, oneDNN, MKL, OpenBLAS, numpy (whose names for what
# it is to leave out change with its versions) and the kernels here.
AVX2 = ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell \
	TOKENSWIFT_KERNELS=avx2 NPY_DISABLE_CPU_FEATURES="`$(BIN)/python -c 'from numpy._core import _multiarray_umath as m; \
	print(*(f for f in m.__cpu_dispatch__ if f.startswith(("AVX512", "X86_V4")) and m.__cpu_features__[f]))'`"
test-avx2: setup
	$(AVX2) PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile

# The package on arm64 under qemu; says what it lacks where it cannot.
test-arm64: setup
	$(BIN)/python tools/arm64.py build/arm64

lint: setup
	$(BIN)/ruff check setup.py src benchmarks tests tools
	$(BIN)/ruff format --check setup.py src benchmarks tests tools
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python tools/sloc.py

# The forward pass of EAGLE-3 drafters against that of the speculators package, whose pins exclude other packages here:
# it is installed without its requirements, beside this project's environment.
eagle-peer: setup
	test -d build/eagle-peer || $(BIN)/python -m venv build/eagle-peer
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > build/eagle-peer/lib/python3.$$($(BIN)/python -c "import sys; print(sys.version_info.minor)")/site-packages/main.pth
	build/eagle-peer/bin/python -m pip install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0 loguru pydantic-settings python-dotenv
	PYTHONPATH=src:. build/eagle-peer/bin/python -m pytest tests/speculation/eagle/test_peer.py

# Token ids of GGUF vocabularies, and logits of small files, against those of llama.cpp, which is compiled for some minutes by a C++ compiler.
peer: setup
	test -d build/peer || $(BIN)/python -m venv build/peer
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > build/peer/lib/python3.$$($(BIN)/python -c "import sys; print(sys.version_info.minor)")/site-packages/main.pth
	build/peer/bin/python -m pip install --quiet --no-deps diskcache==5.6.3 llama-cpp-python==0.3.36
	PYTHONPATH=src:. build/peer/bin/python -m pytest tests/loader/test_tokenizer_peer.py tests/loader/test_model_peer.py

bench: setup
	$(BIN)/python -m benchmarks run engine drafts --preset cpu

# A real model beside llama.cpp, with the table at the top of README: about 40 minutes on two quiet cores.
# PEER: a Python interpreter that has llama_cpp.
headline: setup
	$(BIN)/python -m benchmarks.real qwen2.5-coder-1.5b-q4_k_m --out benchmarks/results/real.jsonl $(if $(PEER),--peer $(PEER))
	$(BIN)/python -m tools.results

results: setup
	$(BIN)/python -m tools.results

# The sdist, and a wheel of each platform with its kernels inside, in dist; those that can run here are tried. Needs
# gcc, and aarch64-linux-gnu-gcc for arm64 (PLATFORMS=linux-x86_64 leaves that out); zig cc comes from PyPI.
PLATFORMS ?= linux-x86_64 linux-aarch64 macos-arm64
wheels: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[wheels]'
	$(BIN)/python -m tools.wheels --platforms $(PLATFORMS)

docs: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	mkdir -p build
	$(BIN)/python tools/pages.py  # docs/index.md and docs/cli.md
	$(BIN)/zensical build --strict --clean > build/site.log 2>&1 || { cat build/site.log; exit 1; }
	cat build/site.log && ! grep "^griffe:" build/site.log  # docstrings that do not fit their functions

clean:
	rm -rf build dist site docs/cli.md docs/index.md src/*.egg-info
