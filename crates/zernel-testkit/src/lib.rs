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

/// The needs there are. Of cgroups a machine may have one version or the other.
const NAMES: [&str; 10] = [
    "root",
    "bpf",
    "vm",
    "cgroup2",
    "memory-cgroup",
    "overlayfs",
    "torch",
    "python",
    "cc",
    "systemd",
];

/// A test that runs where all its needs are met.
pub fn trial(name: &str, needs: &[Need], test: impl FnOnce() + Send + 'static) -> Trial {
    let verdict = required(&env::var(REQUIRE).unwrap_or_default())
        .and_then(|required| means(needs, &required));
    match verdict {
        Ok(Means::There) => Trial::test(name, move || {
            test();
            Ok(())
        }),
        // Fails when it is run in spite of being ignored.
        Ok(Means::Lacking(why)) => Trial::test(name, {
            let why = why.clone();
            move || Err(why.into())
        })
        .with_kind(format!("skipped: {why}"))
        .with_ignored_flag(true),
        Err(why) => Trial::test(name, move || Err(why.into())),
    }
}

/// Whether a trial has what it needs.
#[derive(Debug, PartialEq, Eq)]
enum Means {
    There,
    Lacking(String),
}

/// The needs that must be met; an unknown name is a mistake that would let skips pass.
fn required(list: &str) -> Result<Vec<&str>, String> {
    let names = list
        .split(',')
        .map(str::trim)
        .filter(|name| !name.is_empty());
    names
        .map(|name| match NAMES.contains(&name) {
            true => Ok(name),
            false => Err(format!(
                "{REQUIRE} names {name}, but there are only {NAMES:?}"
            )),
        })
        .collect()
}

/// All that is lacking; an error if any of it is required.
fn means(needs: &[Need], required: &[&str]) -> Result<Means, String> {
    let unmet: Vec<_> = needs
        .iter()
        .filter_map(|need| Some((need.name, (need.check)().err()?)))
        .collect();
    let reasons: Vec<_> = unmet
        .iter()
        .map(|(name, why)| format!("needs {name}: {why}"))
        .collect();
    let reasons = reasons.join("; ");
    match unmet.iter().find(|(name, _)| required.contains(name)) {
        Some((name, _)) => Err(format!("{REQUIRE} asks for {name}, but it {reasons}")),
        None if unmet.is_empty() => Ok(Means::There),
        None => Ok(Means::Lacking(reasons)),
    }
}

/// Runs the trials as `cargo test` expects it.
pub fn main(trials: impl IntoIterator<Item = Trial>) -> ExitCode {
    let arguments = Arguments::from_args();
    libtest_mimic::run(&arguments, trials.into_iter().collect()).exit_code()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MET: Need = Need {
        name: "root",
        check: || Ok(()),
    };
    const UNMET: Need = Need {
        name: "bpf",
        check: || Err("not here".into()),
    };
    const ALSO_UNMET: Need = Need {
        name: "vm",
        check: || Err("nor this".into()),
    };

    #[test]
    fn a_trial_with_all_it_needs_runs() {
        assert_eq!(means(&[], &["vm"]), Ok(Means::There));
        assert_eq!(means(&[MET], &["root"]), Ok(Means::There));
    }

    #[test]
    fn one_that_lacks_something_says_all_of_it() {
        let lacking = Means::Lacking("needs bpf: not here; needs vm: nor this".into());
        assert_eq!(means(&[MET, UNMET, ALSO_UNMET], &["root"]), Ok(lacking));
    }

    #[test]
    fn one_that_lacks_something_required_fails_wherever_it_stands() {
        let why = means(&[UNMET, ALSO_UNMET], &["vm"]).unwrap_err();
        assert!(
            why.contains("asks for vm") && why.contains("not here"),
            "{why}"
        );
    }

    #[test]
    fn a_misspelt_requirement_is_no_requirement_met() {
        assert_eq!(required(" root, vm,"), Ok(vec!["root", "vm"]));
        assert!(required("bfp").unwrap_err().contains("bfp"));
    }
}
