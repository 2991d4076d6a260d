//! `zernel doctor`: checks what this machine supports, and prints how to fix what is missing.
//!
//! Each check examines one thing and returns one [`Row`]. Kernel versions prove nothing, so features
//! are tried. The verdict, whether `zernel observe` works here, follows from the checks that
//! observing needs.

mod bpf;
mod gpu;
mod kernel;
mod lab;
mod render;
mod row;
mod scheduling;

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

use serde::Serialize;
use zernel_ebpf::capability::{Capability, Refusal};

use kernel::Visibility;
use row::Row;
pub(crate) use scheduling::malformed_functions;

/// Check what this machine supports and print fixes
///
/// Tries every kind of BPF attachment that Zernel may use. Looks for sched_ext, cgroup controllers,
/// GPUs, CUDA and NCCL libraries, and virtual machines. Changes nothing.
///
/// Exits with 0 if `zernel observe` works here, else with 1.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The results of all checks.
#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    observe: Verdict,
    sections: Vec<Section>,
}

/// Whether `zernel observe` works here.
#[derive(Debug, Serialize)]
struct Verdict {
    possible: bool,
    /// The best way to attach uprobes that works.
    rung: Option<&'static str>,
    /// Names of the rows that prevent it.
    blocked_by: Vec<&'static str>,
}

#[derive(Debug, Serialize)]
struct Section {
    title: &'static str,
    rows: Vec<Row>,
}

/// Each capability with the result of trying it.
type Trials = Vec<(Capability, Result<(), Refusal>)>;

pub(crate) fn run(options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    let report = examine();
    let mut text = Vec::new();
    if options.json {
        serde_json::to_writer_pretty(&mut text, &report)?;
        writeln!(text)?;
    } else {
        render::table(&mut text, &report)?;
    }
    crate::print(&text)?;
    Ok(ExitCode::from(u8::from(!report.observe.possible)))
}

fn examine() -> Report {
    let trials: Trials = Capability::ALL
        .into_iter()
        .map(|capability| (capability, capability.try_out()))
        .collect();
    let processes = Visibility::look();
    let section = |title, rows| Section { title, rows };
    Report {
        version: env!("CARGO_PKG_VERSION"),
        observe: verdict(
            &trials,
            &processes,
            kernel::Privilege::own().lacking().is_empty(),
        ),
        sections: vec![
            section("kernel and privilege", kernel::rows(&processes)),
            section("BPF, each tried", bpf::rows(&trials)),
            section("scheduling", scheduling::rows()),
            section("GPU", gpu::rows()),
            section("lab", lab::rows()),
        ],
    }
}

fn verdict(trials: &Trials, processes: &Visibility, privileged: bool) -> Verdict {
    let works = |wanted: Capability| {
        trials
            .iter()
            .any(|(capability, trial)| *capability == wanted && trial.is_ok())
    };
    let rung = Capability::UPROBE_LADDER
        .into_iter()
        .find(|rung| works(*rung));
    let mut blocked_by: Vec<_> = Capability::OBSERVE_NEEDS
        .into_iter()
        .filter(|needed| !works(*needed))
        .map(Capability::name)
        .collect();
    if rung.is_none() {
        blocked_by.push("uprobes of any kind");
    }
    if processes.is_blind() {
        blocked_by.push(kernel::OTHER_PROCESSES);
    }
    if !privileged {
        blocked_by.push(kernel::PRIVILEGE);
    }
    Verdict {
        possible: blocked_by.is_empty(),
        rung: rung.map(Capability::name),
        blocked_by,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_work() -> Trials {
        Capability::ALL.into_iter().map(|c| (c, Ok(()))).collect()
    }

    fn seen(seen: usize, others: usize) -> Visibility {
        Visibility {
            others,
            unseen: vec![String::new(); others - seen],
            in_container: false,
        }
    }

    fn without(missing: &[Capability]) -> Verdict {
        let mut trials = all_work();
        for (capability, trial) in &mut trials {
            if missing.contains(capability) {
                *trial = Err(Refusal::Silent);
            }
        }
        let processes = seen(2, 3);
        verdict(&trials, &processes, true)
    }

    #[test]
    fn without_access_to_other_processes_observing_is_impossible() {
        assert_eq!(
            verdict(&all_work(), &seen(0, 3), true).blocked_by,
            ["other processes"]
        );
        assert!(verdict(&all_work(), &seen(0, 0), true).possible);
    }

    #[test]
    fn without_privilege_observing_is_impossible() {
        assert_eq!(
            verdict(&all_work(), &seen(0, 0), false).blocked_by,
            ["privilege"]
        );
    }

    #[test]
    fn the_best_rung_that_works_is_named() {
        assert_eq!(without(&[]).rung, Some("uprobe.session"));
        let no_session = without(&[Capability::UprobeSession]);
        assert_eq!(
            (no_session.possible, no_session.rung),
            (true, Some("uprobe.multi"))
        );
    }

    #[test]
    fn a_missing_requirement_makes_observing_impossible() {
        assert!(
            without(&[
                Capability::Kprobe,
                Capability::Fentry,
                Capability::Tracepoint
            ])
            .possible
        );
        assert_eq!(
            without(&[Capability::TaskStorage]).blocked_by,
            ["task storage"]
        );
        let no_rung = without(&Capability::UPROBE_LADDER);
        assert_eq!((no_rung.possible, no_rung.rung), (false, None));
    }
}
