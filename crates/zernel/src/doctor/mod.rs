//! `zernel doctor`: checks what this machine supports, and prints how to fix what is missing.
//!
//! Each check examines one thing and returns one [`CheckRow`]. Kernel versions prove nothing, so features
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
use zernel_ebpf::capability::{Capability, CapabilityRefusal};

use kernel::ProcessVisibility;
use row::CheckRow;
pub(crate) use scheduling::count_malformed_functions;

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
struct DoctorReport {
    version: &'static str,
    observe: ObservingVerdict,
    sections: Vec<ReportSection>,
}

/// Whether `zernel observe` works here.
#[derive(Debug, Serialize)]
struct ObservingVerdict {
    possible: bool,
    /// The best way to attach uprobes that works.
    rung: Option<&'static str>,
    /// Why `zernel observe` cannot work: names of rows of the table, and `uprobes of any kind` if no kind works.
    blocked_by: Vec<&'static str>,
}

#[derive(Debug, Serialize)]
struct ReportSection {
    title: &'static str,
    rows: Vec<CheckRow>,
}

/// Each capability with the result of trying it.
type CapabilityTrials = Vec<(Capability, Result<(), CapabilityRefusal>)>;

pub(crate) fn run(options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    let report = examine_machine();
    let mut text = Vec::new();
    if options.json {
        serde_json::to_writer_pretty(&mut text, &report)?;
        writeln!(text)?;
    } else {
        render::write_table(&mut text, &report)?;
    }
    crate::print_to_stdout(&text)?;
    Ok(ExitCode::from(u8::from(!report.observe.possible)))
}

fn examine_machine() -> DoctorReport {
    let trials: CapabilityTrials = Capability::ALL
        .into_iter()
        .map(|capability| (capability, capability.try_out()))
        .collect();
    let processes = ProcessVisibility::count_readable_processes();
    let section = |title, rows| ReportSection { title, rows };
    DoctorReport {
        version: env!("CARGO_PKG_VERSION"),
        observe: judge_observing(
            &trials,
            &processes,
            kernel::Privilege::of_this_process()
                .missing_capabilities()
                .is_empty(),
        ),
        sections: vec![
            section("kernel and privilege", kernel::kernel_rows(&processes)),
            section("BPF, each tried", bpf::bpf_rows(&trials)),
            section("scheduling", scheduling::scheduling_rows()),
            section("GPU", gpu::gpu_rows()),
            section("lab", lab::lab_rows()),
        ],
    }
}

fn judge_observing(
    trials: &CapabilityTrials,
    processes: &ProcessVisibility,
    privileged: bool,
) -> ObservingVerdict {
    let works = |wanted: Capability| {
        trials
            .iter()
            .any(|(capability, trial)| *capability == wanted && trial.is_ok())
    };
    let rung = Capability::UPROBE_KINDS_BEST_FIRST
        .into_iter()
        .find(|rung| works(*rung));
    let mut blocked_by: Vec<_> = Capability::NEEDED_TO_OBSERVE
        .into_iter()
        .filter(|needed| !works(*needed))
        .map(Capability::name)
        .collect();
    if rung.is_none() {
        blocked_by.push("uprobes of any kind");
    }
    if processes.sees_no_other_process() {
        blocked_by.push(kernel::OTHER_PROCESSES_ROW_NAME);
    }
    if !privileged {
        blocked_by.push(kernel::PRIVILEGE_ROW_NAME);
    }
    ObservingVerdict {
        possible: blocked_by.is_empty(),
        rung: rung.map(Capability::name),
        blocked_by,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trials_that_all_work() -> CapabilityTrials {
        Capability::ALL.into_iter().map(|c| (c, Ok(()))).collect()
    }

    fn visibility_of(seen: usize, others: usize) -> ProcessVisibility {
        ProcessVisibility {
            other_count: others,
            unreadable_processes: vec![String::new(); others - seen],
            is_in_child_pid_namespace: false,
        }
    }

    fn verdict_without(missing: &[Capability]) -> ObservingVerdict {
        let mut trials = trials_that_all_work();
        for (capability, trial) in &mut trials {
            if missing.contains(capability) {
                *trial = Err(CapabilityRefusal::NeverRan);
            }
        }
        let processes = visibility_of(2, 3);
        judge_observing(&trials, &processes, true)
    }

    #[test]
    fn without_access_to_other_processes_observing_is_impossible() {
        assert_eq!(
            judge_observing(&trials_that_all_work(), &visibility_of(0, 3), true).blocked_by,
            ["other processes"]
        );
        assert!(judge_observing(&trials_that_all_work(), &visibility_of(0, 0), true).possible);
    }

    #[test]
    fn without_privilege_observing_is_impossible() {
        assert_eq!(
            judge_observing(&trials_that_all_work(), &visibility_of(0, 0), false).blocked_by,
            ["privilege"]
        );
    }

    #[test]
    fn the_best_rung_that_works_is_named() {
        assert_eq!(verdict_without(&[]).rung, Some("uprobe.session"));
        let no_session = verdict_without(&[Capability::UprobeSession]);
        assert_eq!(
            (no_session.possible, no_session.rung),
            (true, Some("uprobe.multi"))
        );
    }

    #[test]
    fn a_missing_requirement_makes_observing_impossible() {
        assert!(
            verdict_without(&[
                Capability::Kprobe,
                Capability::Fentry,
                Capability::Tracepoint
            ])
            .possible
        );
        assert_eq!(
            verdict_without(&[Capability::TaskStorage]).blocked_by,
            ["task storage"]
        );
        let no_rung = verdict_without(&Capability::UPROBE_KINDS_BEST_FIRST);
        assert_eq!((no_rung.possible, no_rung.rung), (false, None));
    }
}
