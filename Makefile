.PHONY: run test bench dist softgpu setup

# A training job on simulated GPUs, observed. Root is needed for observing only, and never asked for.
run: setup
	@cargo build --release --bin zernel
	@$(MAKE) --silent softgpu >/dev/null
	@scripts/demo

# Everything that must hold before a change lands.
test: setup
	cargo fmt --all --check
	# A macro declares the modules of the probes, so cargo fmt does not find them.
	rustfmt --edition 2024 --check crates/zernel-ebpf/src/probes/*/*.rs
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	cargo test --workspace
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet

bench: setup
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
