# make demo   trains on built-in scenes, XLA on the CPU, and leaves weights and pictures
# make lessons   opens the course in JupyterLab on this machine
# make test   the tests of the package and the lessons
# make test-labs   the labs 10 to 13, in an environment of their own (CI runs both)
# make notebooks   writes notebooks/*.ipynb from notebooks/*.py, and runs those that changed
# make site    builds build/site, the lessons and guides as web pages
# make colab   runs the lessons as on Colab's TPU runtime (ONLY="01 03" runs some)
# make lint   formats and checks the code
#
# The first call makes .venv with the newest of Python 3.13, 3.12, 3.11 that runs (Colab has 3.13).
# PYTHON=/path/to/python chooses another one.

PYTHON ?= $(shell sh tools/find_python.sh)
VENV := .venv
BIN := $(VENV)/bin
LABS := .venv-labs
# uv installs torch's several GB of CUDA packages many times faster than pip.
INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints/colab-tpu.txt

# LLVM's optimiser off: the same graphs, compiled 3 to 5 times faster (run 1.4 times slower).
QUICKLY := OMP_NUM_THREADS=2 PJRT_DEVICE=CPU XLA_FLAGS=--xla_backend_optimization_level=0

.PHONY: demo lessons test test-labs notebooks site colab lint clean

demo: $(VENV)/.base
	PJRT_DEVICE=CPU $(BIN)/python main_tpu.py --use-tpu --epochs 12 --warm-epoch 3 --batch-size 8 \
		--base-size 64 --crop-size 64 --save-dir weight/demo-$$(date +%Y-%m-%d-%H-%M-%S)
	@echo
	@echo "Next: open examples.png and curves.png in that folder, then notebooks/01_choose_a_runtime.ipynb"

lessons: $(VENV)/.jupyter
	$(BIN)/jupyter lab notebooks/01_choose_a_runtime.ipynb

test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/notebooks.py --check
	$(QUICKLY) $(BIN)/python -m pytest --ignore tests/labs
	# The lessons with their exercises solved; --overwrite keeps what they printed, for the last line.
	$(BIN)/python tools/notebooks.py --only lessons --solved solved
	$(QUICKLY) $(BIN)/python -m pytest --nbmake --overwrite solved --nbmake-timeout=900
	$(BIN)/python tools/notebooks.py --warnings solved

test-labs: $(LABS)/.labs
	$(QUICKLY) $(LABS)/bin/python -m pytest tests/labs
	$(LABS)/bin/python tools/notebooks.py --only labs --solved solved-labs
	$(QUICKLY) $(LABS)/bin/python -m pytest --nbmake --overwrite solved-labs --nbmake-timeout=900 --durations=4
	$(LABS)/bin/python tools/notebooks.py --warnings solved-labs

# As a reader has it: with the compiler's optimiser on.
notebooks: $(VENV)/.test $(LABS)/.labs
	$(BIN)/python tools/notebooks.py --only lessons
	$(LABS)/bin/python tools/notebooks.py --only labs

site: $(VENV)/.site
	$(BIN)/python tools/build_site.py

colab: $(VENV)/.test
	OMP_NUM_THREADS=2 XLA_FLAGS=--xla_backend_optimization_level=0 PYTHON="$(PYTHON)" \
		$(BIN)/python tools/colab.py $(if $(ONLY),--only $(ONLY))

lint: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(LABS) .venv-colab build solved solved-labs *.egg-info .pytest_cache .ruff_cache .hypothesis

$(BIN)/uv:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 to 3.13 with venv was found; install one (Debian: apt install python3-venv) or give PYTHON=/path/to/python"; exit 2; }
	"$(PYTHON)" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(VENV)/.base: $(BIN)/uv pyproject.toml constraints/colab-tpu.txt
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.test: $(BIN)/uv pyproject.toml constraints/colab-tpu.txt
	$(INSTALL) --editable '.[test]'
	# The field's metric library is an oracle in the tests. It pins numpy below 2, which Colab's
	# image is not, but runs with it: so it comes without its pins.
	$(INSTALL) --no-deps pyirstdmetrics==1.0.2
	@touch $@

$(LABS)/.labs: $(BIN)/uv pyproject.toml constraints/colab-tpu.txt
	"$(PYTHON)" -m venv --clear $(LABS)
	$(BIN)/uv pip install --quiet --python $(LABS)/bin/python --constraint constraints/colab-tpu.txt --editable '.[labs]'
	# torch_xla's package holds an older torchax: the later installation lies on top.
	$(BIN)/uv pip install --quiet --python $(LABS)/bin/python --constraint constraints/colab-tpu.txt --reinstall-package torchax --editable '.[labs]'
	@touch $@

$(VENV)/.jupyter: $(BIN)/uv pyproject.toml constraints/colab-tpu.txt
	$(INSTALL) --editable '.[jupyter]'
	@touch $@

# Only the tool's packages: the site is built without PyTorch.
$(VENV)/.site: $(BIN)/uv pyproject.toml constraints/colab-tpu.txt
	$(INSTALL) $$($(BIN)/python tools/build_site.py --packages)
	@touch $@
