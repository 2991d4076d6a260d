.PHONY: run test bench setup

# What this machine can do.
run: setup
	cargo run --release --quiet --bin zernel -- doctor

# Everything that must hold before a change lands.
test: setup
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	cargo test --workspace --quiet
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet

bench: setup
	cargo bench --workspace --bench "*" --quiet

setup:
	@scripts/setup
