# make demo       compare all stages on one model and real text; writes demo.json,
#                 .md and .png to results/local
# make test       lint and the suite: each property, on cases drawn anew for each
#                 commit
# make test-all   the suite with all cases, in hours; make test-part PART=2/6 is
#                 a part of them. Without PART another one comes with each commit
# make test-cpus  what compares bits, on processors that this one can pose as
# make record-seconds  measure how long the suite's cases take: by this the cases
#                 of make test are drawn
# make test-gpu   what concerns GPUs of the suite, on this machine's, with NCCL,
#                 by the Python that has torch: PYTHON=python3. Up to four ranks
#                 share a GPU if there are too few. One H100 has run parts of it
# make gpu-check  try this machine's GPUs, in half an hour: common/GPUS.md. It
#                 writes gpu-check.md, a page to post. PYTHON=python3
# make papers     run the papers' numbers: each beside what the engines count
# make scores     hold other libraries to the suite, in about half an hour; writes
#                 to results/local/scores
# make record     record anew what the pages show, in some hours, and write it
#                 into them. In parts: make record-suite, -teeth, -demo,
#                 -activations, -accumulated, -scores, -bench, -second-machine,
#                 -small-models, -small-send-buffers, -growth, -alone, -capacity,
#                 -offload, -infinity, -zeropp (root, iproute2), -muon,
#                 -optimizers, -recipes, -museum, -simulated, -words
# make notebooks  run the notebooks from a clean kernel, and store what comes out
# make site       write the explorer (a page with sliders for a model and its
#                 GPUs) and the lesson pages (two engines side by side, their
#                 memory, a step to go through) to results/local/site: a folder
#                 that any static host takes as it is, and a browser opens
# make slides     write the slides of a lecture of 90 minutes to results/local:
#                 one page, with notes for the lecturer
# make student    write what students are given to results/local/student: a tree
#                 without solutions, and an autograder for Gradescope
# make infinity   train the largest model that this machine's free disk holds
# make readme     write the recorded results into the READMEs
# make lint       ruff's checks and its format, mypy's of public signatures
# make clean      remove .venv
# make help       print this
#
# PIP_ARGS goes to pip. By default it names constraints.txt, the versions that the
# records were made with, and without an NVIDIA device torch's CPU wheels are
# taken if they can be had; PIP_ARGS= takes the newest. With GPUs the same
# commands use them: one rank per GPU, and NCCL.

PYTHON ?= python3
ifeq ($(origin PIP_ARGS),undefined)
WITHOUT_GPU := $(shell ls /dev/nvidia* /dev/dxg > /dev/null 2>&1 || echo yes)
endif
PIP_ARGS ?= --constraint constraints.txt
CPU_WHEELS := https://download.pytorch.org/whl/cpu
RESULTS ?= results/local
BIN := .venv/bin
INSTALLED := .venv/installed
PEERS := TorchDDP ZeroRedundancy FSDP2 FSDP2KeepParameters HSDP DeepSpeed1 DeepSpeed2 DeepSpeed3 DeepSpeedOffload
RECORDS := suite teeth demo activations accumulated scores bench second-machine small-models small-send-buffers growth alone capacity offload infinity zeropp muon optimizers recipes museum simulated

.PHONY: help demo notebooks site slides student infinity test test-gpu test-part test-cpus record-seconds gpu-check test-all papers lint readme scores record $(RECORDS:%=record-%) clean
.NOTPARALLEL:

# The comment at the top of this file.
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: $(INSTALLED)
	mkdir -p $(RESULTS)
	@began=$$(date +%s) && \
	$(BIN)/python -m lab.compare --nproc 4 --oversubscribe --deterministic --model gpt-micro --batch 8 --steps 12 --ranks-per-node 2 --json $(RESULTS)/demo.json && \
	echo "make demo took $$(($$(date +%s) - began)) s. The picture is $(RESULTS)/demo.png. Next: the course, notebooks/README.md; or the code, from stage0_ddp/minimal.py on."

site: $(INSTALLED)
	$(BIN)/python -m course.site --out $(RESULTS)/site

slides: $(INSTALLED)
	mkdir -p $(RESULTS)
	$(BIN)/python -m course.slides --out $(RESULTS)/slides.html

student: $(INSTALLED)
	$(BIN)/python -m course.release --out $(RESULTS)/student

# Two processes at once, then what measures time. A failure in the first does not keep the second from running.
TWO := --numprocesses 2 --dist loadfile --no-loadscope-reorder
COUNTS := results/local/counts.json
define suite
@rm -f $(COUNTS)
$(BIN)/python -m pytest $(1) -m "not alone" --counts=$(COUNTS); first=$$?; \
$(BIN)/python -m pytest $(2) -m alone --counts=$(COUNTS) && exit $$first
endef
test: lint
	$(call suite,$(TWO))

test-all: lint
	$(call suite,--all $(TWO),--all)

# Six commits in a row have all of them.
PART ?= $(shell echo $$(($$(git rev-list --count HEAD) % 6 + 1)))/6
test-part: $(INSTALLED)
	$(call suite,--part $(PART) --numprocesses 2 --dist worksteal,--part $(PART))

# Processors as torch, MKL and oneDNN take them for, and one and two threads.
CPUS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=2
BITS := $(addprefix tests/,any_engine engine stages zeropp parallel offload checkpoint)
test-cpus: $(CPUS:%=test-cpu-%)
test-cpu-%: $(INSTALLED)
	$* $(BIN)/python -m pytest $(TWO) $(BITS)

# No .venv: a machine with GPUs has a torch that fits them. What is left out needs no GPU, but further packages.
test-gpu:
	@$(PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make test-gpu: torch finds no GPU here, so nothing was tested")'
	$(PYTHON) -m pytest $(addprefix tests/,any_engine engine ranks tiers checkpoint stages offload zeropp parallel)

gpu-check:
	$(PYTHON) -m lab.gpu_check

papers: $(INSTALLED)
	PYTHONPATH=.:tests/papers $(BIN)/python tests/papers/ledger.py

# A library that does not pass everything is a result too, so the next one runs all the same.
scores: $(INSTALLED)
	for peer in $(PEERS); do $(BIN)/python -m pytest tests --tb no --engine interop.peers:$$peer --scores $(RESULTS)/scores; done; true

record: $(RECORDS:%=record-%) readme

record-suite: $(INSTALLED)
	$(BIN)/python -m pytest --record

record-demo:
	$(MAKE) demo RESULTS=results

record-activations: $(INSTALLED)
	$(BIN)/python -m lab.activations --nproc 4 --oversubscribe --json results/activations.json

record-accumulated: $(INSTALLED)
	$(BIN)/python -m lab.compare --nproc 4 --oversubscribe --model gpt-micro --batch 8 --steps 12 --precision bf16 --accumulate 2 --json results/accumulated.json

# DeepSpeed takes part where it is installed: $(BIN)/python -m pip install --constraint constraints.txt -e '.[peers]'
record-scores:
	$(MAKE) scores RESULTS=results

# DeepSpeed takes part where it is installed, and compiles its optimizer then.
record-bench: $(INSTALLED)
	$(BIN)/python -m lab.bench --nproc 2,4 --oversubscribe --worlds 5 --rounds 4 --json results/bench_cpu.json

# For a machine of another kind than the one above.
record-second-machine: $(INSTALLED)
	$(BIN)/python -m lab.bench --nproc 2,4 --oversubscribe --worlds 5 --rounds 4 --json results/bench_cpu_second_machine.json

record-small-models: $(INSTALLED)
	$(BIN)/python -m lab.bench --models gpt-nano,gpt-micro,gpt-mini --precisions fp32 --nproc 2 --engines stage0_ddp,stage1_os,stage2_grad,stage3_param --peers TorchDDP --worlds 3 --rounds 4 --json results/bench_cpu_small_models.json
	$(BIN)/python -m lab.bench --models gpt-nano,gpt-mini --precisions bf16 --nproc 2 --engines stage0_ddp,stage1_os,stage2_grad,stage3_param --peers TorchDDP,FSDP2 --worlds 3 --rounds 4 --json results/bench_cpu_bf16.json

record-small-send-buffers: $(INSTALLED)
	$(BIN)/python -m lab.bench --nproc 2,4 --oversubscribe --engines stage0_ddp,stage1_os,stage2_grad --peers TorchDDP --precisions fp32 --small-send-buffers --worlds 3 --rounds 4 --json results/bench_cpu_small_send_buffers.json

record-growth: $(INSTALLED)
	$(BIN)/python -m lab.bench --models gpt-1m,gpt-3m,gpt-10m,gpt-30m,gpt-100m --precisions fp32 --nproc 1,2,4 --oversubscribe --peers BareLoop --steps 1 --worlds 1 --rounds 11 --json results/growth_cpu.json

ALONE := --models gpt-1m,gpt-3m,gpt-10m --precisions fp32 --nproc 1
record-alone: $(INSTALLED)
	$(BIN)/python -m lab.bench $(ALONE) --batch 32 --peers BareLoop --worlds 1 --rounds 11 --json results/alone_cpu.json
	$(BIN)/python -m lab.bench $(ALONE) --batch 128 --steps 1 --peers BareLoop --worlds 1 --rounds 11 --json results/alone_cpu_batch128.json

record-capacity: $(INSTALLED)
	$(BIN)/python -m lab.capacity --cap 1GB --nproc 4 --oversubscribe --json results/capacity_cpu.json

CAPACITY := --cap 600MB --precisions bf16 --engines stage0_ddp,stage2_grad,offload
record-offload: $(INSTALLED)
	$(BIN)/python -m lab.capacity $(CAPACITY) --nproc 1 --json results/offload_capacity_1.json
	$(BIN)/python -m lab.capacity $(CAPACITY) --nproc 4 --oversubscribe --json results/offload_capacity_4.json
	$(BIN)/python -m lab.offload.delay --nproc 2 --steps 600 --json results/offload_delay.json
	$(BIN)/python -m lab.offload.delay --nproc 2 --steps 600 --lr 2e-4 --json results/offload_delay_slow.json

WALL := --cap 600MB --precisions bf16 --engines stage0_ddp,offload.nvme --up-to 128 --compare
record-infinity: $(INSTALLED)
	$(BIN)/python -m lab.capacity $(WALL) --nproc 1 --json results/infinity_capacity_1.json
	$(BIN)/python -m lab.capacity $(WALL) --nproc 4 --oversubscribe --json results/infinity_capacity_4.json
	$(BIN)/python -m lab.offload.tiling --nproc 4 --oversubscribe --json results/infinity_tiling.json
	$(MAKE) infinity RESULTS=results

record-zeropp: $(INSTALLED)
	$(BIN)/python -m lab.zeropp.two_nodes --json results/zeropp_two_nodes.json
	$(BIN)/python -m lab.zeropp.two_nodes --only "as it is;all;hybrid" --steps 6 --json results/hybrid_two_nodes.json
	$(BIN)/python -m lab.zeropp.convergence --oversubscribe --json results/zeropp_convergence.json

record-simulated: $(INSTALLED)
	$(BIN)/python -m lab.plan.scaling --json results/scaling.json
	$(BIN)/python -m lab.published --json results/published.json
	$(BIN)/python -m lab.gpu_counts --json results/gpu_counts.json

record-muon: $(INSTALLED)
	$(BIN)/python -m lab.muon --nproc 2 --json results/muon.json

# Of the libraries that are installed: $(BIN)/python -m pip install --constraint constraints.txt -e '.[optimizers]'
record-optimizers: $(INSTALLED)
	$(BIN)/python -m lab.optimizers --json results/optimizers.json

# With the libraries: $(BIN)/python -m pip install --constraint constraints.txt -e '.[words,recipes]'
record-recipes: $(INSTALLED)
	$(BIN)/python -m lab.recipes --json results/words_recipes.json

record-museum: $(INSTALLED)
	$(BIN)/python -m interop.museum --json results/museum.json

infinity: $(INSTALLED)
	mkdir -p $(RESULTS)
	$(BIN)/python -m lab.offload.largest --json $(RESULTS)/infinity_largest.json

notebooks: $(INSTALLED)
	$(BIN)/python -m course.execute

readme: $(INSTALLED)
	$(BIN)/python -m lab.readme

# After make test, whose minutes it records too.
record-teeth: $(INSTALLED)
	PYTHONPATH=$$(echo . tests/*/ | tr ' ' :) $(BIN)/python tests/planted/teeth.py --json results/teeth.json

# tests/seconds.json, by which `make test` draws cases.
record-seconds: $(INSTALLED)
	$(BIN)/python -m pytest $(TWO) -m "not alone" --record-seconds; $(BIN)/python -m pytest -m "alone" --record-seconds

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	@if [ -n "$(WITHOUT_GPU)" ]; then \
	    echo "No NVIDIA device here, so torch comes without CUDA; with it: make PIP_ARGS='$(PIP_ARGS)'"; \
	    $(BIN)/python -m pip install --quiet --no-deps --retries 0 --timeout 15 $(PIP_ARGS) --index-url $(CPU_WHEELS) torch \
	        > /dev/null 2>&1 || echo "Its CPU wheels cannot be had here, so the usual index is asked."; fi
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[tests]'
	touch $@

clean:
	rm -rf .venv
