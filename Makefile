# make demo        train on built-in scenes, XLA on the CPU; leaves weights and pictures
# make lessons     open the course in JupyterLab on this machine
# make test-fast   lint, and the tests that need no XLA: under two minutes
# make test        lint, types, and everything but the labs (TIERS="xla unit" runs some)
# make test-labs   the labs 10 to 13, in their own environment (CI runs both)
# make test-torchtpu  TorchTPU's device on XLA:CPU, in its own environment (CI runs it, too)
# make lint        format the code, and fix what can be fixed
# make types       check the types of both packages
# make notebooks   write notebooks/*.ipynb from notebooks/*.py, and run those that changed
# make site        build build/site, the lessons and guides as web pages
# make compiler    the newest TPU compiler, in an environment of its own (tests/xla, docs/compilers.md)
# make colab       run the lessons as on Colab's TPU runtime (ONLY="01 03" runs some)
#
# The first call makes .venv with the newest of Python 3.13, 3.12, 3.11 that runs (Colab has 3.13).
# PYTHON=/path/to/python chooses another one.

PYTHON ?= $(shell sh tools/find_python.sh)
VENV := .venv
BIN := $(VENV)/bin
LABS := .venv-labs
TORCHTPU := .venv-torchtpu
COMPILER := .venv-compiler
# uv installs torch's several GB of CUDA packages many times faster than pip.
INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints/colab-tpu.txt

# LLVM's optimiser off: the same graphs, compiled 3 to 5 times faster (run 1.4 times slower).
XLA_ON_CPU := PJRT_DEVICE=CPU XLA_FLAGS=--xla_backend_optimization_level=0
QUICKLY := OMP_NUM_THREADS=2 $(XLA_ON_CPU)

# In pytest-xdist's workers each process gets one thread: two workers with two threads each need
# five times the CPU time on two cores, most of it waiting.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(XLA_ON_CPU) $(BIN)/python -m pytest -n $(WORKERS)
# The order in which files are handed out: long ones first. A file stays in one worker, because its
# tests share fixtures and compiled programs.
TIERS ?= lessons process xla unit
SOLVED := $(if $(filter lessons,$(TIERS)),solved)

.PHONY: demo lessons test test-fast test-labs test-torchtpu tiers check types notebooks site \
	compiler colab lint clean

demo: $(VENV)/.base
	PJRT_DEVICE=CPU $(BIN)/python main_tpu.py --use-tpu --epochs 12 --warm-epoch 3 --batch-size 8 \
		--base-size 64 --crop-size 64 --save-dir weight/demo-$$(date +%Y-%m-%d-%H-%M-%S)
	@echo
	@echo "Next: open examples.png and curves.png in that folder, then notebooks/01_choose_a_runtime.ipynb"

lessons: $(VENV)/.jupyter
	$(BIN)/jupyter lab notebooks/01_choose_a_runtime.ipynb

test-fast: check
	$(PYTEST) tests/unit

test: check types tiers

tiers: $(VENV)/.test
	$(BIN)/python tools/notebooks.py --check
	# The lessons run with their exercises solved; --overwrite keeps what they print, for --warnings.
	$(if $(SOLVED),$(BIN)/python tools/notebooks.py --only lessons --solved $(SOLVED))
	$(PYTEST) --dist loadfile --no-loadscope-reorder --durations=60 \
		$(if $(SOLVED),--nbmake --overwrite --nbmake-timeout=900 $(SOLVED)) $(addprefix tests/,$(TIERS))
	$(if $(SOLVED),$(BIN)/python tools/notebooks.py --warnings $(SOLVED))

test-labs: $(LABS)/.labs
	$(QUICKLY) $(LABS)/bin/python -m pytest tests/labs
	$(LABS)/bin/python tools/notebooks.py --only labs --solved solved-labs
	$(QUICKLY) $(LABS)/bin/python -m pytest --nbmake --overwrite solved-labs --nbmake-timeout=900 --durations=4
	$(LABS)/bin/python tools/notebooks.py --warnings solved-labs

# Without the autoload: `import torch` would ask for a TPU, for minutes where there is none.
test-torchtpu: $(TORCHTPU)/.torchtpu
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 TPU_SKIP_MDS_QUERY=1 $(QUICKLY) \
		$(TORCHTPU)/bin/python -m pytest tests/torchtpu --durations=5

# As a reader has it: with the compiler's optimiser on.
notebooks: $(VENV)/.test $(LABS)/.labs
	$(BIN)/python tools/notebooks.py --only lessons
	$(LABS)/bin/python tools/notebooks.py --only labs

site: $(VENV)/.site
	$(BIN)/python tools/build_site.py

compiler: $(COMPILER)/.compiler

colab: $(VENV)/.test
	OMP_NUM_THREADS=2 XLA_FLAGS=--xla_backend_optimization_level=0 PYTHON="$(PYTHON)" \
		$(BIN)/python tools/colab.py $(if $(ONLY),--only $(ONLY))

lint: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/pyright

clean:
	rm -rf $(VENV) $(LABS) $(TORCHTPU) $(COMPILER) \
		.venv-colab build solved solved-labs *.egg-info .pytest_cache .ruff_cache .hypothesis

$(BIN)/uv:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 to 3.13 with venv was found; install one (Debian: apt install python3-venv) or give PYTHON=/path/to/python"; exit 2; }
	"$(PYTHON)" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(VENV)/.base: $(BIN)/uv pyproject.toml constraints/colab-tpu.txt
	$(INSTALL) --editable '.[xla]'
	@touch $@

$(VENV)/.test: $(BIN)/uv pyproject.toml constraints/colab-tpu.txt
	$(INSTALL) --editable '.[test]'
	# The tests compare the metrics with this library. It pins numpy below 2 but runs with Colab's
	# numpy 2, so it is installed without its pins.
	$(INSTALL) --no-deps pyirstdmetrics==1.0.2
	@touch $@

$(LABS)/.labs: $(BIN)/uv pyproject.toml constraints/colab-tpu.txt
	"$(PYTHON)" -m venv --clear $(LABS)
	$(BIN)/uv pip install --quiet --python $(LABS)/bin/python --constraint constraints/colab-tpu.txt --editable '.[labs]'
	# torch_xla's package holds an older torchax: the one that is installed last is found.
	$(BIN)/uv pip install --quiet --python $(LABS)/bin/python --constraint constraints/colab-tpu.txt --reinstall-package torchax --editable '.[labs]'
	@touch $@

# The newest torch: no constraints of Colab's hold here.
$(TORCHTPU)/.torchtpu: $(BIN)/uv pyproject.toml
	"$(PYTHON)" -m venv --clear $(TORCHTPU)
	$(BIN)/uv pip install --quiet --python $(TORCHTPU)/bin/python --editable '.[torchtpu,pytest]'
	@touch $@

# Python 3.12 or newer.
$(COMPILER)/.compiler: $(BIN)/uv tpuscope/versions.py
	"$(PYTHON)" -m venv --clear $(COMPILER)
	$(BIN)/uv pip install --quiet --python $(COMPILER)/bin/python \
		$$($(BIN)/python -c "from tpuscope import versions; print(versions.newest_compiler())")
	@touch $@

$(VENV)/.jupyter: $(BIN)/uv pyproject.toml constraints/colab-tpu.txt
	$(INSTALL) --editable '.[jupyter]'
	@touch $@

# Only the tool's packages: the site is built without PyTorch.
$(VENV)/.site: $(BIN)/uv pyproject.toml constraints/colab-tpu.txt
	$(INSTALL) $$($(BIN)/python tools/build_site.py --packages)
	@touch $@
