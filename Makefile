# Two commands make everything: `make corpus` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
CORES ?= 8
CONFIG ?= config/config.yaml
# Everything runs from the environment, as after `source $(VENV)/bin/activate`.
export PATH := $(abspath $(VENV))/bin:$(PATH)
export VIRTUAL_ENV := $(abspath $(VENV))

.PHONY: help setup corpus doctor test test-slow test-all lint format lock schema clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.client  ## create the environment: client, embedded engine and model (200 MB)

corpus: setup  ## set up, then make the training corpus: snakemake --cores 8 merge_training
	snakemake --cores $(CORES) merge_training

doctor: setup  ## check this machine for the run of CONFIG, as in make doctor CONFIG=my.yaml FIX=1
	python -m scripts.doctor --config $(CONFIG) $(if $(FIX),--fix)

test: $(VENV)/.dev  ## set up, then run the quick tests
	python -m pytest -n 2 --dist loadgroup -m "not slow and not chaos and not engines and not slurm and not trainers"

test-slow: $(VENV)/.dev  ## the slow tests: real SGLang and vLLM on the CPU, Slurm, chaos, trainers (about an hour)
	python -m pytest -m "slow or chaos or engines or slurm or trainers"

test-all: test test-slow  ## every test

lint: $(VENV)/.dev  ## what CI checks before the tests
	ruff check .
	ruff format --check .
	mypy
	snakefmt --check Snakefile rules
	snakemake --lint

format: $(VENV)/.dev  ## format all code
	ruff check --fix .
	ruff format .
	snakefmt Snakefile rules

schema: setup  ## write anew what is made from the code: the schemas, docs/configuration.md, validation.md, modules.md
	python -m scripts.describe_config

lock:  ## resolve envs/*.in into envs/*.txt, from nothing
	rm -rf $(VENV)-lock
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/pip install --quiet --requirement envs/client.in
	(echo "# Made by 'make lock' from client.in."; $(VENV)-lock/bin/pip freeze) > envs/client.txt
	$(VENV)-lock/bin/pip install --quiet --requirement envs/client.txt --requirement envs/dev.in
	(echo "# Made by 'make lock' from dev.in."; $(VENV)-lock/bin/pip freeze | grep --invert-match --line-regexp --fixed-strings --file envs/client.txt) > envs/dev.txt
	rm -rf $(VENV)-lock

clean:  ## remove the environment (never results)
	rm -rf $(VENV)

$(VENV)/.client: envs/client.txt envs/embedded.txt
	@$(PYTHON) -c 'import sys; sys.exit("error: Python >= 3.11 is needed, $(PYTHON) is " + sys.version.split()[0] + ": name another one, as in make PYTHON=python3.12 $(MAKECMDGOALS)" if sys.version_info < (3, 11) else 0)'
	@echo "setting up $(VENV): 200 MB to download, 1.2 GB when installed, two or three minutes"
	$(PYTHON) -m venv $(VENV)
	python -m pip install --disable-pip-version-check --requirement envs/client.txt
	python -m pip install --quiet --disable-pip-version-check --no-deps --requirement envs/embedded.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.client envs/dev.txt
	python -m pip install --quiet --disable-pip-version-check --requirement envs/dev.txt
	@touch $@
