//! Tests that need more than a plain machine: run where the means are there, visibly skipped where
//! they are not.
//!
//! A test file with `harness = false` lists its trials:
//!
//! ```no_run
//! use zernel_testkit::{Need, main, root, trial};
//!
//! const BPF: Need = Need { name: "bpf", check: || Err("no BPF here".into()) };
//!
//! fn main_of_the_test_file() -> std::process::ExitCode {
//!     main([
//!         trial("mounts_something", &[root()], || { /* assert!(…) */ }),
//!         trial("loads_a_program", &[root(), BPF], || { /* assert!(…) */ }),
//!     ])
//! }
//! ```
//!
//! A trial whose need is not met is listed as ignored, with the reason in its line and in the count
//! at the end. `ZERNEL_REQUIRE=bpf,vm` names the needs that must be met: with it such a trial fails.

pub mod bench;

use std::env;
use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

/// The variable that names needs whose trials must not be skipped.
pub const REQUIRE: &str = "ZERNEL_REQUIRE";

/// Something a test needs from the machine.
#[derive(Debug, Clone, Copy)]
pub struct Need {
    /// What `ZERNEL_REQUIRE` calls it.
    pub name: &'static str,
    /// Says why it is not there.
    pub check: fn() -> Result<(), String>,
}

/// The need to be root.
#[must_use]
pub fn root() -> Need {
    Need {
        name: "root",
        check: || match rustix::process::geteuid().is_root() {
            true => Ok(()),
            false => Err("not root".into()),
        },
    }
}

/// A test that runs where all its needs are met.
pub fn trial(name: &str, needs: &[Need], test: impl FnOnce() + Send + 'static) -> Trial {
    let required = env::var(REQUIRE).unwrap_or_default();
    match unmet(needs) {
        None => Trial::test(name, move || {
            test();
            Ok(())
        }),
        Some((need, why)) if required.split(',').any(|name| name.trim() == need) => {
            Trial::test(name, move || {
                Err(format!("{REQUIRE} asks for {need}, but: {why}").into())
            })
        }
        Some((need, why)) => Trial::test(name, || Ok(()))
            .with_kind(format!("skipped: needs {need}: {why}"))
            .with_ignored_flag(true),
    }
}

/// Runs the trials as `cargo test` expects it.
pub fn main(trials: impl IntoIterator<Item = Trial>) -> ExitCode {
    let arguments = Arguments::from_args();
    libtest_mimic::run(&arguments, trials.into_iter().collect()).exit_code()
}

fn unmet(needs: &[Need]) -> Option<(&'static str, String)> {
    needs
        .iter()
        .find_map(|need| Some((need.name, (need.check)().err()?)))
}
