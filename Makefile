# Every target makes its own environment first; a second call re-uses it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HARDWARE := $(if $(shell command -v nvidia-smi 2>/dev/null),cuda,cpu)
READY := $(VENV)/.ready-$(HARDWARE)

.PHONY: demo demo-real demo-vl demo-al demo-tools test check site ranks gpu gpu-bench invariance chaos mutations bench learning slurm clean

TORCHVISION := $(wildcard requirements/torchvision_cpu/*.p*)

$(READY): requirements/torch.txt requirements/$(HARDWARE).txt requirements/dev.txt requirements/docs.txt requirements/torchao.txt setup.py $(TORCHVISION)
	$(PYTHON) -m venv $(VENV)
ifeq ($(HARDWARE),cpu)
	$(BIN)/pip install --quiet -r requirements/torch.txt
	$(BIN)/pip install --quiet --no-deps -r requirements/cpu.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation ./requirements/torchvision_cpu
else
	$(BIN)/pip install --quiet --no-deps -r requirements/cuda.txt
endif
	$(BIN)/pip install --quiet --no-deps -r requirements/docs.txt
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/optional -r requirements/torchao.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

demo: $(READY)  ## a small Qwen3 learns arithmetic on 4 processes (TP2 x PP2), one vLLM engine each
	$(BIN)/python examples/arithmetic/demo.py $(ARGS)

demo-real: $(READY)  ## a published model, SmolLM2-135M-Instruct, learns to add, on 2 processes; ARGS="--seed 1", ARGS=--tools
	$(BIN)/python examples/smollm/demo.py $(ARGS)

demo-vl: $(READY)  ## a small Qwen2.5-VL learns to count shapes in images, on 4 processes as well
	$(BIN)/python examples/shapes/demo.py $(ARGS)

demo-tools: $(READY)  ## a small Qwen3 learns to call a calculator, on 4 processes
	$(BIN)/python examples/calculator/demo.py $(ARGS)

demo-al: $(READY)  ## a small Qwen2-Audio learns to count beeps in recordings, on 2 processes
	$(BIN)/python examples/beeps/demo.py $(ARGS)

test: $(READY)  ## what CI runs: `check`, and the tests in two processes at once
	$(BIN)/python -m tests.in_two

check: site  ## style, formatting and types; the site, with every link
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2 rftmega benchmarks website train_rl.py

site: $(READY)  ## the pages of docs/ as a site, build/site/index.html; a link or an anchor that is not there is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

PART ?= 1/1
ranks: $(READY)  ## the exhaustive half of the tests, many on several ranks; PART=2/3 runs the second third
	$(BIN)/python -m pytest -q -m ranks -n 2 --dist loadfile --no-loadscope-reorder --part $(PART) $(ARGS)

gpu:  ## the tests of a CUDA device, with PYTHON=... and what it has installed: makes no environment, needs no network
	$(PYTHON) -m pytest -q -m gpu tests/gpu

gpu-bench:  ## what one CUDA device does, part by part (PARTS="log_probs push"), with PYTHON=... as for gpu; writes runs/gpu/*.json
	$(PYTHON) -m benchmarks.gpu $(PARTS)

invariance: $(READY)  ## the table of layouts, micro-batches and orders that must agree; writes runs/invariance.json
	$(BIN)/python -m tests.invariance

chaos: $(READY)  ## kill -9 at random moments; the end must equal that of an uninterrupted run; servers elsewhere and nodes of elastic runs that fail; writes runs/*chaos.json
	$(BIN)/python -m tests.chaos
	$(BIN)/python -m tests.server_chaos
	$(BIN)/python -m tests.elastic_chaos

mutations: $(READY)  ## plants bugs one at a time, each of which a test must see; writes runs/mutations.json
	$(BIN)/python -m tests.mutations

bench: $(READY)  ## the ratios of docs/results.md; writes runs/bench.json
	$(BIN)/python -m benchmarks

learning: $(READY)  ## runs that must learn: examples/arithmetic/recipes, three seeds each; writes runs/learning.json
	$(BIN)/python -m tests.learning
	$(BIN)/python -m pytest -q -m learning

slurm: $(READY)  ## runs on a Slurm of two nodes that is started here (as root)
	$(BIN)/python -m pytest -q -m slurm

clean:
	rm -rf runs build *.egg-info .pytest_cache .ruff_cache .mypy_cache
