.PHONY: run check test fuzz soak lab lint bench dist softgpu setup setup-check setup-test
.NOTPARALLEL:

# A training job on simulated GPUs, observed. Only observing needs root; the target never asks for it.
run: setup
	@cargo build --release --bin zernel
	@$(MAKE) --silent softgpu >/dev/null
	@scripts/demo

# A quick check while you work: format, clippy, unit tests, examples of the docs. No root, no BPF, no virtual machine.
check: setup-check lint
	cargo test --workspace --lib --bins --quiet
	cargo test --workspace --doc --quiet

# Everything that must hold before a change lands.
#
# A test may need more than a plain machine: root, bpf, vm, cgroup2, memory-cgroup, overlayfs, torch, python, cc, systemd.
# Without it the test is listed as ignored, with the reason. ZERNEL_REQUIRE names the needs whose tests must not skip.
test: setup-test lint
	cargo test --workspace
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet

# Fuzzes every parser of foreign input for this many minutes of CPU time. A failure prints a seed, which replays it:
# ZERNEL_FUZZ_SEED=SEED cargo test -p CRATE fuzz_TARGET
MINUTES ?= 5
fuzz: setup-test
	ZERNEL_FUZZ_SECONDS=$$(($(MINUTES) * 60)) cargo test --workspace --lib --test fuzz fuzz_ -- --nocapture

# Runs all attacks of a second user for this many minutes, with several restarts of the daemon, and prints what was measured. The
# times of a release build are compared with their limits.
soak: setup-test
	ZERNEL_SOAK_MINUTES=$(MINUTES) cargo test --release -p zernel --test attacks -- --exact soak --nocapture

# Compares schedulers in all scenarios; the report and one plot per scenario go to target/lab. Results are cached by all
# their inputs: one more scheduler boots only its own runs. A verdict needs six seeds.
SCHEDULERS ?= eevdf,ref,fair
SEEDS ?= 1
SCENARIOS ?= $(sort $(wildcard scenarios/*.toml))
lab: softgpu
	cargo build --release --quiet --bin zernel
	@mkdir -p target/lab
	target/release/zernel lab compare $(SCENARIOS) --sched $(SCHEDULERS) --seeds $(SEEDS) \
		--json target/lab/report.json --plots target/lab

lint:
	cargo fmt --all --check
	# Macros declare the modules of the probes and of their snapshots, so cargo fmt does not find them.
	rustfmt --edition 2024 --check crates/zernel-ebpf/src/probes/*/*.rs crates/zernel-model/src/snapshot/*.rs
	cargo clippy --workspace --all-targets --quiet -- -D warnings

bench: setup-test
	cargo bench --workspace --bench "*" --quiet

# What users install: the program and a Debian package of it, in target/dist. On Debian 12.
dist: setup
	@scripts/dist

# The software GPU's libcuda, libnccl and libnvidia-ml, in target/softgpu.
softgpu: setup
	cargo build --release --quiet -p zernel-softgpu -p zernel-softgpu-cuda -p zernel-softgpu-nccl -p zernel-softgpu-nvml
	target/release/softgpu-install target/softgpu

setup:
	@scripts/setup

setup-check:
	@scripts/setup check

setup-test:
	@scripts/setup test
