# Two commands set everything up from nothing: `make demo` and `make test`. All others use what these made.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: help demo test check bench test-cuda test-rbln clean

# Cleared so that nothing of the caller's leaks into the environments or into vLLM.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

ENV := p=$$(scripts/python.sh) && "$$p" scripts/env.py
RUN := .venv/bin/python

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 20

demo:  ## a real vLLM answers a repeated prompt from kvstow (minutes the first time: it installs vLLM's CPU build)
	@$(ENV) demo
	@$(RUN) -m demo $(ARGS)

test:  ## all tests, with vLLM 0.32 and the contract subset with vLLM 0.30 and 0.33
	@$(ENV) contract
	@scripts/test.sh $(ARGS)

check:  ## ruff, mypy, import contracts, banned names, sizes of files
	@$(ENV) test
	@scripts/check.sh

bench:  ## what kvstow costs and gains here, into out/bench.json (ARGS='--only copy' for a part)
	@$(ENV) test
	@$(RUN) -m bench $(ARGS)

test-cuda:  ## the device suite, ordering and bandwidth on a CUDA device: at most 4 minutes, in the Python that runs it
	@scripts/test-cuda.sh

test-rbln:  ## vllm-rbln on an emulated NPU with our connector, 4 minutes (its environment is made beside .venv)
	@$(ENV) rbln
	.venv-rbln/bin/python -m pytest tests/rbln/test_engine.py -m rbln $(ARGS)

clean:  ## remove environments, caches and results
	rm -rf .venv .venv-vllm030 .venv-vllm033 .venv-rbln .cache out dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
