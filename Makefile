# Two commands are all that a newcomer needs: `make book` and `make test`. `make help` lists the others.
# Each sets up .venv by itself. BASE_PYTHON=/path/to/python chooses the interpreter it is made with.
# On Linux without a GPU, an index with PyTorch's CPU build, named to pip in the environment, makes the set-up much smaller.

VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip install --disable-pip-version-check --quiet -c constraints.txt
NOTEBOOKS ?= $(wildcard chapters/*.ipynb)
PORT ?= 8000
COURSE ?= assignments
export SEED

.DEFAULT_GOAL := help
.PHONY: help book test test-fast lint unit oracles-test bad-input-test notebooks-test classroom-test site-test execute explorers serve \
        repository setup clean mutation notebooks-mutation colab colab-test links publish bench release private nbgrader

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

$(PYTHON):
	@for candidate in $(BASE_PYTHON) python3.11 python3.12 python3.13 python3; do \
	    if $$candidate -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then \
	        echo "Making $(VENV) with $$candidate"; \
	        $$candidate -m venv $(VENV) && exit 0; \
	        rm -rf $(VENV); \
	        echo "$$candidate cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; \
	        exit 1; \
	    fi; \
	done; \
	echo "No Python 3.11, 3.12 or 3.13 was found. Install one, or name it: make $(MAKECMDGOALS) BASE_PYTHON=/path/to/python" >&2; \
	exit 1

# The book is built from stored outputs and by static analysis: no torch, and no gptlite.
$(VENV)/.book: pyproject.toml constraints.txt tools/extra.py | $(PYTHON)
	@echo "Installing what builds the book (once, a minute or two)"
	@$(PYTHON) tools/extra.py book > $(VENV)/book.txt
	@$(PIP) -r $(VENV)/book.txt
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(PYTHON)
	@echo "Installing the package and its tests (once, some minutes: torch is large)"
	@$(PIP) -e ".[lab,book,test]"
	@touch $@ $(VENV)/.book

setup: $(VENV)/.test ## install everything that the chapters and the tests use into .venv

book: $(VENV)/.book ## build the book into _build/html, warnings as errors
	@rm -rf _build/html _build/.doctrees _build/jupyter_execute # a cached page would not repeat its warnings
	@$(VENV)/bin/jupyter-book build . -n -W --keep-going --quiet
	@echo "The book is in _build/html/index.html"

test: $(VENV)/.test ## lint, types, unit, oracles, bad input, notebooks, problem sets, the book, the site
	@$(PYTHON) tools/run_tests.py

test-fast: $(VENV)/.test ## the inner loop: lint, types, and one case of each quick test
	@$(PYTHON) tools/run_tests.py lint brief

lint: $(VENV)/.test ## ruff and mypy
	@$(PYTHON) tools/run_tests.py lint

unit: $(VENV)/.test ## tests of the package
	@$(PYTHON) tools/run_tests.py unit

oracles-test: $(VENV)/.test ## the package against independent libraries
	@$(PYTHON) tools/run_tests.py oracles

bad-input-test: $(VENV)/.test ## what is not allowed ends with one clear line
	@$(PYTHON) tools/run_tests.py bad_input

notebooks-test: $(VENV)/.test ## run every chapter and compare its stored outputs
	@$(PYTHON) tools/run_tests.py notebooks

classroom-test: $(VENV)/.test ## grade every problem set with nbgrader: solutions, wrong answers, what breaks
	@$(PYTHON) tools/run_tests.py classroom

site-test: $(VENV)/.test ## build the book and test it in a browser
	@$(PYTHON) tools/run_tests.py book site

execute: $(VENV)/.test ## run every chapter and store its outputs (NOTEBOOKS="chapters/01_gptlite.ipynb" for one)
	@$(PYTHON) tools/execute.py $(NOTEBOOKS)

release: $(VENV)/.test ## write the students' versions of the problem sets (PS="ps3" for one)
	@$(PYTHON) tools/release.py $(PS)

# SEED goes through the environment, so that no character of it means anything to the shell.
private: $(VENV)/.test ## make a course with other numbers and hidden tests of your own: make private SEED=text
	@$(PYTHON) tools/private.py -- "$$SEED" $(PS)

nbgrader: $(VENV)/.test ## run nbgrader in a course: make nbgrader DO="autograde ps1" [COURSE=folder]
	@cd "$(COURSE)" && PATH="$(CURDIR)/$(VENV)/bin:$$PATH" nbgrader $(DO)

mutation: $(VENV)/.test ## break the package line by line and see that a test notices (long)
	@$(PYTHON) tests/mutation/run.py

notebooks-mutation: $(VENV)/.test ## break a technique at a time and see that tests and chapter notice (long; ONLY="05 08")
	@$(PYTHON) tests/notebooks/test_mutations.py --fresh $(if $(ONLY),--only $(ONLY))

colab: $(VENV)/.book ## write the chapters for Colab, in plain Markdown, into _build/colab
	@$(PYTHON) tools/colab.py _build/colab

colab-test: $(VENV)/.test ## run every chapter in an environment like Colab's (long; CHAPTERS="01 08" for some)
	@$(PYTHON) tools/colab_test.py $(CHAPTERS)

bench: $(VENV)/.test ## the package beside other engines on the same weights (about a third of an hour, alone on the machine)
	@$(PIP) -e ".[bench]"
	@$(PYTHON) benchmarks/bench.py --out benchmarks/results/bench.json

explorers: $(VENV)/.test ## write the charts of the pages that are no notebooks
	@$(PYTHON) tools/explorers.py

serve: ## show the built book on http://127.0.0.1:8000 (PORT=... for another port)
	@test -f _build/html/index.html || { echo "Build it first: make book" >&2; exit 1; }
	@echo "http://127.0.0.1:$(PORT)/ (stop with Ctrl-C)"
	@$(PYTHON) -m http.server --bind 127.0.0.1 --directory _build/html $(PORT)

links: $(VENV)/.book ## check every link of the built book, those to elsewhere too
	@$(PYTHON) tools/links.py --outside

publish: $(PYTHON) ## copy the built book to where it is served: make publish DEST=folder, or DEST=host:folder
	@test -n "$(DEST)" || { echo "Say where to: make publish DEST=folder, or DEST=host:folder" >&2; exit 2; }
	@$(PYTHON) tools/publish.py "$(DEST)"

repository: $(PYTHON) ## set the repository's address everywhere: make repository REPO=owner/name
	@$(PYTHON) tools/set_repository.py $(REPO)

clean: ## remove what was built; .venv stays
	@rm -rf _build build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
