# Every target does its own set-up. `make demo` trains and compares, `make test` runs the suite.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS ?= runs
DEMO_NVFP4 := tiny_nvfp4_qk_fp8_pv
DEMO_BF16 := tiny_bf16
# Extra overrides for both arms of the demo, for example DEMO="train.steps=20".
DEMO ?=

.PHONY: setup demo test test-gpu test-blackwell lint clean

setup: $(VENV)/.ready

# A machine with a GPU brings the torch that fits its driver: when $(PYTHON) has one, the environment uses it (through a
# .pth file, which also works when $(PYTHON) is itself a virtual environment), and that torch's own triton with it. Otherwise
# constraints.txt pins both.
$(VENV)/.ready: pyproject.toml constraints.txt requirements-blackwell.txt
	$(PYTHON) -m venv $(VENV)
	@if own=$$($(PYTHON) -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null); then \
	  echo "using the torch of $(PYTHON): $$own"; \
	  echo "$$own" > $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/own_torch.pth; \
	  $(BIN)/python -c 'import importlib.metadata as m; own = {p: f"{p}=={m.version(p)}" for p in ("torch", "triton") if any(m.distributions(name=p))}; \
	    print(*(own.get(line.partition("==")[0], line) for line in open("constraints.txt").read().splitlines()), sep="\n")' > $(VENV)/constraints.txt; \
	else cp constraints.txt $(VENV)/constraints.txt; fi
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[dev]'
	if [ "$$(uname -sm)" = "Linux x86_64" ]; then $(BIN)/python -m pip install --quiet --no-deps --requirement requirements-blackwell.txt; fi
	touch $@

demo: setup
	$(BIN)/torchrun --nproc-per-node 1 -m fp4mega.train recipes/runs/$(DEMO_NVFP4).yaml tracking.dir=$(RUNS) $(DEMO)
	$(BIN)/torchrun --nproc-per-node 1 -m fp4mega.train recipes/runs/$(DEMO_BF16).yaml tracking.dir=$(RUNS) $(DEMO)
	$(BIN)/python -m fp4mega.tracking.compare $(RUNS)/tiny__bf16 $(RUNS)/tiny__nvfp4_qk_fp8_pv --plot $(RUNS)/compare.png \
	  --gate finite --gate loss_falls=0.3 --gate valid_loss_gap=2%

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m "not gpu"

test-gpu: setup
	$(BIN)/python -m pytest -m gpu

# On a GB200 or B200: checks the sm_100a kernels and their benchmark. Nobody has run it yet: there was no such machine.
test-blackwell: setup
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[kernels]'
	$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() and torch.cuda.get_device_capability() == (10, 0) else "needs an sm_100 GPU")'
	$(BIN)/python -m pytest -m gpu tests/kernels/cute
	$(BIN)/python -m tests.kernels.cute.time_forward
	$(BIN)/python -m fp4mega.bench attention --backends cute_sm100 --policies direct_p_fast direct_p_accurate \
	  --shapes 1,64/64,8192,128 1,24/24,4096,128

lint: setup
	$(BIN)/ruff check fp4mega tests
	$(BIN)/ruff format --check fp4mega tests
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) $(RUNS) data build *.egg-info
