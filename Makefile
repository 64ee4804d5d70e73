# Two commands matter: `make bench` and `make test`. Everything runs from .venv, which the first of them makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install bench headline ablation campaign quality test quick mutants check figures docs ceilings clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v[:2] <= (3, 13) else f"PYTHON={sys.executable}: got Python {v[0]}.{v[1]}, allowed 3.11 to 3.13; run make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

install: $(INSTALLED) ## make .venv with everything in it

bench: $(INSTALLED) ## train one model under four systems; table and figure at the end
	$(BIN)/python -m sweeps.run +experiment=quickstart

# Without a GPU most rivals cannot run, and compiling takes longer than all else. Exit code 75: the time limit came first, and the
# same command goes on.
ON_CPU = $(shell command -v nvidia-smi >/dev/null || echo "system=in_memory,zero3,fsdp2,megatrain measure.repeated=[zero3,megatrain]")
headline: $(INSTALLED) ## the comparison with ZeRO-3, at the largest size this machine has room for
	$(BIN)/python -m sweeps.run +experiment=headline $(ON_CPU) || test $$? = 75

ablation: $(INSTALLED) ## one study: make ablation NAME=double_buffering (see conf/ablation)
	@test -f conf/ablation/$(NAME).yaml || { echo "NAME: got '$(NAME)', allowed $$(ls conf/ablation | sed 's/.yaml//' | paste -sd' '); give one" >&2; exit 2; }
	$(BIN)/python -m sweeps.run +ablation=$(NAME) time_limit_s=21600 $(SET) || test $$? = 75

# In this order whole studies are left behind when the time is up; the same command goes on.
CAMPAIGN = experiment=headline $(addprefix ablation=,ladder batch_size model_size double_buffering optimizer_overlap device_memory context_length \
	checkpoint_interval gradient_slabs pinned precision placement float8 depth width saving)
TIME = 43200
campaign: $(INSTALLED) ## the headline and every study of one GPU, in TIME=43200 seconds
	@end=$$(($$(date +%s) + $(TIME))); failed=; \
	for study in $(CAMPAIGN); do \
		left=$$((end - $$(date +%s))); only=; \
		test $$left -gt 0 || { echo "TIME=$(TIME): it was up before $$study; the same command goes on"; exit 0; }; \
		test $$study != experiment=headline || only="$(ON_CPU)"; \
		$(BIN)/python -m sweeps.run +$$study $$only time_limit_s=$$left $(SET); code=$$?; \
		case $$code in 0|75) ;; 130|143) exit $$code;; *) failed="$$failed $$study";; esac; \
	done; \
	test -z "$$failed" || { echo "without an answer:$$failed"; exit 1; }

# What is trained on is made here, without downloads: sums and products as text, and a small model that has read the standard
# library (BASE). For weights and text of your own see conf/experiment/quality.yaml.
QUALITY = outputs/quality_base
BASE = $(shell command -v nvidia-smi >/dev/null && echo "model=qwen2.5-0.5b train.steps=750 recipe.lr=3e-4 recipe.warmup_steps=100" || echo "model=tiny train.steps=40")
ONLY_EAGER = $(shell command -v nvidia-smi >/dev/null || echo "system.compile=false")
quality: $(INSTALLED) ## does it learn the same? a checkpoint trained on under every system, LoRA and QLoRA beside them
	$(BIN)/python -m sweeps.sums $(QUALITY)/sums.jsonl
	test -d $(QUALITY)/checkpoint || $(BIN)/python -m sweeps.train system=in_memory $(BASE) logging=none output_dir=$(QUALITY)/run train.export=$(QUALITY)/checkpoint
	$(BIN)/python -m sweeps.run +experiment=quality model=checkpoint model.checkpoint=$(QUALITY)/checkpoint data.files=$(QUALITY)/sums.jsonl $(ONLY_EAGER) $(SET) || test $$? = 75

# Three processes of one thread each, for one of them often waits. A file stays in one of them, for its shared fixtures; testpaths has the longest first.
test: $(INSTALLED) ## every test that needs no GPU
	$(BIN)/python -m pytest -m "not gpu" -n 3 --dist loadfile --no-loadscope-reorder

quick: $(INSTALLED) ## the tests that are not marked slow, in under two minutes
	$(BIN)/python -m pytest -q -m "not gpu and not slow" -n 3 --dist loadfile --no-loadscope-reorder

mutants: $(INSTALLED) ## make wrong changes to copies of the engine, one at a time: each must fail some test (an hour)
	$(BIN)/python -m tests.mutants --jobs 2

check: $(INSTALLED) ## lint, format, types, and whether the wrong changes of tests/mutants still fit the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/mutants -k each_change

figures: $(INSTALLED) ## draw every picture anew from the committed rows; as PDF, with LaTeX tables, in outputs/figures
	$(BIN)/python -m analysis figures
	$(BIN)/python -m analysis figures --format pdf

docs: $(INSTALLED) ## write the record's pages, run the notebooks and fill the numbers in README and docs
	$(BIN)/python -m analysis docs
	$(BIN)/python -m analysis notebooks

ceilings: $(INSTALLED) ## what this machine can do: link, memory, matrix product, CPU AdamW
	$(BIN)/python -m sweeps.ceilings

clean: ## remove what the other targets made, .venv too
	rm -rf $(VENV) outputs build *.egg-info .pytest_cache .mypy_cache .ruff_cache
