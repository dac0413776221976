# make demo    compare all stages on one model and real text; writes results/local/demo.json, .md and .png
# make test    lint and the whole suite
# make test-all    the suite with its exhaustive matrices
# make test-gpu    the suite on the GPUs of this machine, with NCCL, by the Python that has torch: PYTHON=python3.
#                  Several ranks share a GPU where there are too few. Untried: no GPU was at hand
# make readme    writes the recorded results into the READMEs
# make scores    holds other libraries to the suite, in about half an hour; writes results/local/scores
#
# PIP_ARGS goes to pip: for those who want torch's CPU wheels from an index of their choice, for instance.
# With GPUs the same commands use them: one rank per GPU, and NCCL.

PYTHON ?= python3
PIP_ARGS ?=
RESULTS ?= results/local
BIN := .venv/bin
INSTALLED := .venv/installed
PEERS := TorchDDP ZeroRedundancy FSDP2 FSDP2KeepParameters DeepSpeed1 DeepSpeed2 DeepSpeed3

.PHONY: demo test test-gpu test-all lint readme scores clean

demo: $(INSTALLED)
	mkdir -p $(RESULTS)
	$(BIN)/python -m common.compare --nproc 4 --oversubscribe --model gpt-micro --batch 8 --steps 12 --json $(RESULTS)/demo.json

test: lint
	$(BIN)/python -m pytest

# No .venv: a machine with GPUs has a torch that fits them. What is left out needs no GPU, but further packages.
test-gpu:
	@$(PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make test-gpu: torch finds no GPU here, so nothing was tested")'
	$(PYTHON) -m pytest --ignore tests/test_data.py --ignore tests/test_layout.py --ignore tests/test_notebooks.py

# A library that does not pass everything is a result too, so the next one runs all the same.
scores: $(INSTALLED)
	for peer in $(PEERS); do $(BIN)/python -m pytest tests --engine common.peers:$$peer --scores $(RESULTS)/scores; done; true

readme: $(INSTALLED)
	$(BIN)/python -m common.readme

test-all: lint
	$(BIN)/python -m pytest -m ""

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[tests]'
	touch $@

clean:
	rm -rf .venv
