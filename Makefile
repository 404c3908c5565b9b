# Every target does its own set-up. `make demo` trains and compares, `make test` runs the suite.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS ?= runs
DEMO_NVFP4 := tiny_nvfp4_qk_fp8_pv
DEMO_BF16 := tiny_bf16
# Extra overrides for both arms of the demo, for example DEMO="train.steps=20".
DEMO ?=

.PHONY: setup demo test test-gpu lint clean

setup: $(VENV)/.ready

# A machine with a GPU brings the torch that fits its driver: when $(PYTHON) has one, the environment uses it (through a
# .pth file, which also works when $(PYTHON) is itself a virtual environment). Otherwise constraints.txt pins it.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@if own=$$($(PYTHON) -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null); then \
	  echo "using the torch of $(PYTHON): $$own"; \
	  echo "$$own" > $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/own_torch.pth; \
	  grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt; \
	  $(BIN)/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >> $(VENV)/constraints.txt; \
	else cp constraints.txt $(VENV)/constraints.txt; fi
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[dev]'
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

lint: setup
	$(BIN)/ruff check fp4mega tests
	$(BIN)/ruff format --check fp4mega tests
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) $(RUNS) data build *.egg-info
