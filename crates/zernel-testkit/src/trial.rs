//! Tests that need something from the machine: root, BPF, a virtual machine. Such tests (trials) run on machines that
//! meet their needs and are listed as skipped on others.
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
//! A trial with an unmet need is ignored, with the reason in its line. The output ends with one line
//! per skipped trial and a count. `ZERNEL_REQUIRE=bpf,vm` names needs that must be met: a trial with
//! such a need fails where it is unmet.

use std::env;
use std::process::ExitCode;

use libtest_mimic::{Arguments, Conclusion, FormatSetting, Trial};

use crate::Need;

/// The variable that names needs whose trials must not be skipped.
pub const REQUIRE_VARIABLE: &str = "ZERNEL_REQUIRE";

/// The beginning of a skipped trial's kind, as it is printed; the reason follows.
const SKIPPED_PREFIX: &str = "skipped: ";

/// The names of all needs. A machine has one version of cgroups, so it meets only one of the needs for them.
const NEED_NAMES: [&str; 11] = [
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
    "fuse",
];

/// Makes a test that runs only where all its needs are met.
pub fn trial(name: &str, needs: &[Need], test: impl FnOnce() + Send + 'static) -> Trial {
    trial_requiring(
        &env::var(REQUIRE_VARIABLE).unwrap_or_default(),
        name,
        needs,
        test,
    )
}

/// Makes a test like [`trial`], where `must_be_met` is the value of [`REQUIRE_VARIABLE`].
fn trial_requiring(
    must_be_met: &str,
    name: &str,
    needs: &[Need],
    test: impl FnOnce() + Send + 'static,
) -> Trial {
    match parse_required_needs(must_be_met).and_then(|required| check_needs(needs, &required)) {
        Ok(NeedsResult::Met) => Trial::test(name, move || {
            test();
            Ok(())
        }),
        // A skipped trial fails if `--ignored` makes it run.
        Ok(NeedsResult::Unmet(why)) => Trial::test(name, {
            let why = why.clone();
            move || Err(why.into())
        })
        .with_kind(format!("{SKIPPED_PREFIX}{why}"))
        .with_ignored_flag(true),
        Err(why) => Trial::test(name, move || Err(why.into())),
    }
}

/// Whether a machine has what a trial needs.
#[derive(Debug, PartialEq, Eq)]
enum NeedsResult {
    Met,
    Unmet(String),
}

/// Splits the list of needs that must be met. An unknown name is an error, because it would let trials be skipped
/// unnoticed.
fn parse_required_needs(list: &str) -> Result<Vec<&str>, String> {
    let names = list
        .split(',')
        .map(str::trim)
        .filter(|name| !name.is_empty());
    names
        .map(|name| match NEED_NAMES.contains(&name) {
            true => Ok(name),
            false => Err(format!(
                "{REQUIRE_VARIABLE} names {name}, but there are only {NEED_NAMES:?}"
            )),
        })
        .collect()
}

/// Checks the needs of a trial: all are met, or the reasons why not. Returns an error if a need that must be met is
/// not.
fn check_needs(needs: &[Need], required: &[&str]) -> Result<NeedsResult, String> {
    let unmet: Vec<_> = needs
        .iter()
        .filter_map(|need| Some((need.name, need.check_once().err()?)))
        .collect();
    let reasons: Vec<_> = unmet
        .iter()
        .map(|(name, why)| format!("needs {name}: {why}"))
        .collect();
    let reasons = reasons.join("; ");
    match unmet.iter().find(|(name, _)| required.contains(name)) {
        Some((name, _)) => Err(format!(
            "{REQUIRE_VARIABLE} asks for {name}, but it {reasons}"
        )),
        None if unmet.is_empty() => Ok(NeedsResult::Met),
        None => Ok(NeedsResult::Unmet(reasons)),
    }
}

/// Runs the trials as `cargo test` expects it. Prints each skipped trial and a count of them at the end.
pub fn main(trials: impl IntoIterator<Item = Trial>) -> ExitCode {
    let arguments = Arguments::from_args();
    let trials: Vec<Trial> = trials.into_iter().collect();
    let skipped = skipped_trials(&arguments, &trials);
    let conclusion = libtest_mimic::run(&arguments, trials);
    let is_for_people = !matches!(arguments.format, Some(FormatSetting::Json));
    if is_for_people && !arguments.list {
        print!("{}", skipped_summary(&skipped, &conclusion));
    }
    conclusion.exit_code()
}

/// The selected trials that do not run, each with its reason.
fn skipped_trials(arguments: &Arguments, trials: &[Trial]) -> Vec<String> {
    let selected = trials
        .iter()
        .filter(|trial| !arguments.is_filtered_out(trial) && arguments.is_ignored(trial));
    let line = |trial: &Trial| {
        let reason = trial.kind().strip_prefix(SKIPPED_PREFIX)?;
        Some(format!("skipped {}: {reason}", trial.name()))
    };
    selected.filter_map(line).collect()
}

fn skipped_summary(skipped: &[String], conclusion: &Conclusion) -> String {
    let lines: String = skipped.iter().map(|line| format!("{line}\n")).collect();
    let Conclusion {
        num_passed: passed,
        num_failed: failed,
        ..
    } = conclusion;
    let skipped = skipped.len();
    format!("{lines}{passed} passed, {failed} failed, {skipped} skipped\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MET_NEED: Need = Need {
        name: "root",
        check: || Ok(()),
    };
    const UNMET_NEED: Need = Need {
        name: "bpf",
        check: || Err("not here".into()),
    };
    const OTHER_UNMET_NEED: Need = Need {
        name: "vm",
        check: || Err("nor this".into()),
    };

    #[test]
    fn trial_runs_if_all_needs_are_met() {
        assert_eq!(check_needs(&[], &["vm"]), Ok(NeedsResult::Met));
        assert_eq!(check_needs(&[MET_NEED], &["root"]), Ok(NeedsResult::Met));
    }

    #[test]
    fn a_trial_lists_all_its_unmet_needs() {
        let lacking = NeedsResult::Unmet("needs bpf: not here; needs vm: nor this".into());
        assert_eq!(
            check_needs(&[MET_NEED, UNMET_NEED, OTHER_UNMET_NEED], &["root"]),
            Ok(lacking)
        );
    }

    #[test]
    fn a_trial_with_an_unmet_required_need_fails() {
        let why = check_needs(&[UNMET_NEED, OTHER_UNMET_NEED], &["vm"]).unwrap_err();
        assert!(
            why.contains("asks for vm") && why.contains("not here"),
            "{why}"
        );
    }

    #[test]
    fn unknown_required_need_is_error() {
        assert_eq!(parse_required_needs(" root, vm,"), Ok(vec!["root", "vm"]));
        assert!(parse_required_needs("bfp").unwrap_err().contains("bfp"));
    }

    fn two_trials() -> Vec<Trial> {
        let trial = |name, needs| trial_requiring("vm", name, needs, || {});
        vec![
            trial("adds_numbers", &[]),
            trial("loads_a_program", &[UNMET_NEED]),
        ]
    }

    #[test]
    fn a_skipped_trial_is_listed_with_its_reason_and_counted() {
        let arguments = Arguments::default();
        let skipped = skipped_trials(&arguments, &two_trials());
        let conclusion = Conclusion {
            num_filtered_out: 0,
            num_passed: 1,
            num_failed: 0,
            num_ignored: 1,
            num_measured: 0,
        };
        assert_eq!(
            skipped_summary(&skipped, &conclusion),
            "skipped loads_a_program: needs bpf: not here\n1 passed, 0 failed, 1 skipped\n"
        );
    }

    #[test]
    fn a_trial_that_was_not_selected_is_not_listed() {
        let arguments = Arguments::from_iter(["test", "adds"]);
        assert_eq!(
            skipped_trials(&arguments, &two_trials()),
            Vec::<String>::new()
        );
    }
}
