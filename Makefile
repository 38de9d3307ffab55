# Two commands are all a newcomer needs:   make demo   and   make test
# Both make their own virtual environment in .venv; nothing is installed outside it.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SMALL := $(VENV)/.small

# What one process has compiled, the hundreds that the tests start need not compile again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check docs format bench real soak image release clean help

help:            ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/'

demo: $(SMALL)   ## see the whole loop work in about a minute, without a GPU
	@$(BIN)/plimsoll demo

test: $(READY)   ## the fast tests; no network, no real components
	$(BIN)/python -m pytest -n auto -m "not real and not soak" --ignore=tests/real --durations=15

check: $(READY)  ## lint, format, types, import arrows, spelling and length of the docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md docs --skip='*.svg,*.png'
	$(BIN)/python -m lab.count_words

docs: $(READY)   ## the documentation as a site in site/; fails on a link that leads nowhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(READY) ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## speed and memory, as ratios against a baseline in the same run
	$(BIN)/python -m benchmarks

real: $(READY)   ## against the real vLLM (CPU build); installs it into your cache folder once, about 3 GB
	$(BIN)/python -m lab.engine.install
	$(BIN)/python -m pytest -m "real and not soak" -n 2 --dist loadgroup --durations=25

soak: $(READY)   ## every random input of `make test`, 100,000 simulated worlds, then the long versions of `make real`; output is kept under lab/results/
	PLIMSOLL_SOAK=1 $(BIN)/python -m pytest -n auto -m "not real and not soak" --ignore=tests/real
	$(BIN)/python -m tests.world 0 --count 100000 --cores $$(nproc)
	$(BIN)/python -m tests.world 0 --count 2000 --bugs
	$(BIN)/python -m lab.engine.install
	@mkdir -p lab/results
	@bash -o pipefail -c '$(BIN)/python -m pytest -m "real or soak" --timeout=7200 --durations=20 2>&1 | tee "lab/results/soak-$$(date -u +%Y%m%dT%H%M%SZ).log"'

image:           ## plimsoll as an image (docker, podman or buildah); BASE=debian asks no registry
	@bash lab/image.sh

release:         ## all that a release publishes, in dist/release: wheels, image, SBOM, checksums, one archive for offline sites
	@bash lab/release.sh

$(READY): pyproject.toml lab/venv.sh
	@bash lab/venv.sh $(VENV) dev

$(SMALL): pyproject.toml lab/venv.sh
	@bash lab/venv.sh $(VENV) demo

clean:           ## forget the virtual environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
