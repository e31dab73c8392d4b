# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each creates the virtual environment .venv first when it is missing or pyproject.toml changed.
# .venv/.ready says that it can run jobs, .venv/.ready-dev that it has what tests, lint and documents need, too.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export RAY_USAGE_STATS_ENABLED = 0
# Tests start hundreds of processes, and to compile everything anew costs each of them 0.2 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-fabric test gate gate-pure gate-real gate-serial nightly test-rdma test-rdma-ray test-torch test-torch-newest test-matrix soak lint docs clean

demo: $(VENV)/.ready
	$(BIN)/bml run examples/train_digits.py --quiet --fabric bcube:3x2 --fault kill:4@step=20 --fault blackhole:2/0@step=30

# The same on an emulated fabric, a Ray node for each server; cables, processes and machines really fail. Needs root.
demo-fabric: $(VENV)/.ready
	$(BIN)/bml run examples/train_digits.py --quiet --fabric bcube:3x2 --fabric-emulated \
	  --fault cut:2/0@step=15 --fault kill:4@step=30 --fault node:6@step=45 --fault switch:1/1@step=60

# The pure tests, of those with many long cases a sample (tests/gate.py), and of the real ones one of each kind: real
# processes, sockets, namespaces, Ray. All of the pure ones with BML_TESTS=all.
test gate-pure gate-real gate-serial: export BML_TESTS ?= sample

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -n auto --durations=20 -m "not (real or ray or matrix or slow or serial)"
	$(BIN)/python -m pytest $$(.ci/workers) -m "smoke and not serial" $$(grep -rl --include='test_*.py' mark.smoke tests | sort)

# The others: long pure tests, real ones beside each other, and those that judge time. Of each it runs a sample
# that is drawn by the tree itself (tests/gate.py); all of them with BML_TESTS=all, as `make nightly` does.
gate: gate-pure gate-real gate-serial

SLOW := grep -rlE --include='test_*.py' 'mark\.slow|from sampled import' tests | sort
gate-pure: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -n auto --durations=20 -m "slow and not (real or ray or matrix or serial)" \
	  $$($(SLOW))

REAL := grep -rlE --include='test_*.py' 'mark\.(real|ray|matrix)' tests | sort
gate-real: $(VENV)/.ready-dev
	@bash .ci/packages
	$(BIN)/python -m pytest $$(.ci/workers) --durations=20 \
	  -m "(real or ray or matrix) and not (smoke or serial)" $$($(REAL))

gate-serial: $(VENV)/.ready-dev
	$(BIN)/python -m pytest --durations=20 -m serial $$(grep -rl --include='test_*.py' mark.serial tests | sort)

# What has no place in the gate: every case, fresh seeds, long runs, the newest PyTorch. Hours; PARTS chooses.
nightly: $(VENV)/.ready-dev
	$(BIN)/python tests/nightly.py $(PARTS)

# RDMA in a virtual machine with soft-RoCE NICs; says so where this machine cannot run one.
test-rdma: $(VENV)/.ready-dev
	@tests/rdma/run.sh $(ARGS) || { status=$$?; [ $$status = 77 ] || exit $$status; }

# A job on Ray over RDMA in such a machine: actors with two NICs each; a cable is cut, a server is killed.
test-rdma-ray: $(VENV)/.ready-dev
	@BML_RDMA_VM_MEM=6G tests/rdma/run.sh --ray $(ARGS) || { status=$$?; [ $$status = 77 ] || exit $$status; }

# PyTorch's own tests of torch.distributed on backend bml; some eight minutes on two cores.
test-torch: $(VENV)/.ready-dev
	$(BIN)/python tests/torch/torch_suite.py build/torch-tests.json

# The tests of bml.torch, and PyTorch's own, on the newest PyTorch, in an environment of its own (6 GB).
NEWEST := build/venv-torch-newest
test-torch-newest: $(VENV)/.ready-dev
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --no-compile torch
	bash .ci/venv $(PYTHON) $(NEWEST) dev
	$(NEWEST)/bin/python -m pytest tests/torch tests/cluster/test_preloading.py
	$(NEWEST)/bin/python tests/torch/torch_suite.py build/torch-tests-newest.json

# Every fault in every phase on every server; about half an hour on two cores.
test-matrix: $(VENV)/.ready-dev
	BML_MATRIX=all $(BIN)/python -m pytest $$(.ci/workers) tests/cluster/test_matrix.py

# Servers that come and go at random for so long, then 1,000 view changes that must leave nothing behind.
SECONDS ?= 600
soak: $(VENV)/.ready-dev
	BML_SOAK_SECONDS=$(SECONDS) BML_SOAK_SEED=$(SEED) BML_SOAK_VIEWS=1000 \
	  $(BIN)/python -m pytest -s tests/cluster/test_churn.py tests/cluster/test_leaks.py

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, from docs/ and the docstrings: build/docs/index.html. A broken link or reference is an error.
docs: $(VENV)/.ready-dev
	$(BIN)/python -m sphinx -b html -W --keep-going -n -q -d build/doctrees docs build/docs

$(VENV)/.ready: pyproject.toml .ci/venv
	bash .ci/venv $(PYTHON) $(VENV) demo
	touch $@

$(VENV)/.ready-dev: pyproject.toml .ci/venv
	bash .ci/venv $(PYTHON) $(VENV) dev
	touch $(VENV)/.ready $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
