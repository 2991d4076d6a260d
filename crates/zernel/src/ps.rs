//! `zernel ps`: the training processes of this machine, as the daemon sees them now.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt::Write;
use std::process::ExitCode;

use clap::Args;
use zernel_phase::task_state::WorkloadPhase;

use crate::client::Socket;
use crate::text::shortened;
use zernel_ebpf::observer::snapshot::{Process, Snapshot};

/// List the training processes of this machine, and what they are doing
///
/// One line each: the median of its last steps in milliseconds (STEP), the share of its time that it has waited for data (DATA) and spent in collectives (COMM),
/// and the share that its busiest thread pays for being observed (COST). Needs a running `zernel observe`; who is
/// not root sees their own processes.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    socket: Socket,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    let snapshot = options.socket.snapshot()?;
    crate::print(table(&snapshot).as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

fn table(snapshot: &Snapshot) -> String {
    let mut trainers: Vec<&Process> = snapshot.observed.iter().collect();
    trainers.retain(|process| process.is_trainer());
    // Those of no job come last.
    trainers.sort_by_key(|process| {
        let job = process.job();
        (job.is_none(), job, process.rank(), process.pid)
    });
    let mut rows = vec![HEADER.map(str::to_owned)];
    rows.extend(trainers.into_iter().map(cells));
    let widths: Vec<usize> = (0..HEADER.len())
        .map(|column| {
            let lengths = rows.iter().map(|row| row[column].chars().count());
            lengths.max().unwrap_or(0)
        })
        .collect();
    rows.iter().map(|row| line(row, &widths)).collect()
}

const HEADER: [&str; 10] = [
    "PID", "JOB", "RANK", "GPU", "PHASE", "STEP", "DATA", "COMM", "COST", "NAME",
];
/// The columns that are text; numbers end where the column ends.
const TEXT: [&str; 3] = ["JOB", "PHASE", "NAME"];

fn cells(process: &Process) -> [String; 10] {
    let unknown = || "-".to_owned();
    let share = |phase| {
        let times = process.phase_times.as_ref();
        times.map_or_else(unknown, |times| percent(times.phase_fraction(phase)))
    };
    let gpus: BTreeSet<u32> = process.memory_by_caller.iter().map(|m| m.gpu_id).collect();
    let gpus: Vec<String> = gpus.iter().map(u32::to_string).collect();
    [
        process.pid.to_string(),
        process.job().map_or_else(unknown, |job| shortened(job, 20)),
        process.rank().map_or_else(unknown, |rank| rank.to_string()),
        if gpus.is_empty() {
            unknown()
        } else {
            gpus.join(",")
        },
        process
            .phase
            .map_or_else(unknown, |phase| phase.to_string()),
        (process.steps.median_seconds())
            .map_or_else(unknown, |seconds| format!("{:.1}", 1e3 * seconds)),
        share(WorkloadPhase::DataLoading),
        share(WorkloadPhase::NcclCollective),
        format!("{:.2}%", 100.0 * process.cost.busiest_thread_ratio),
        shortened(process.comm(), 15),
    ]
}

fn line(row: &[String; 10], widths: &[usize]) -> String {
    let mut line = String::new();
    for ((cell, name), width) in row.iter().zip(HEADER).zip(widths) {
        // Writing to a string does not fail.
        let _ = match TEXT.contains(&name) {
            true => write!(line, "{cell:<width$}  "),
            false => write!(line, "{cell:>width$}  "),
        };
    }
    format!("{}\n", line.trim_end())
}

fn percent(share: f64) -> String {
    format!("{:.0}%", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn there_is_a_line_for_each_trainer_that_is_there() {
        let snapshot = json!({"observed": [
            {
                "pid": 12, "role": "trainer", "phase": "GpuCompute",
                "identity": {"comm": "python\u{1b}[2J", "job": "slurm-7", "rank": 1},
                "phase_times": {
                    "data_loading_ns": 10, "gpu_compute_ns": 60, "nccl_collective_ns": 20,
                    "optimizer_step_ns": 5, "unknown_ns": 5,
                },
                "steps": {"boundary": "Backward", "count": 1, "restarts": 0, "recent": [
                    {"begin_ns": 500, "end_ns": 12_500_500, "launches": null, "marks": [0, 1, 0, 0, 0, 0, 0]},
                ]},
                "memory_by_caller": [{"gpu_id": 3}, {"gpu_id": 3}],
                "cost": {"busiest_thread_ratio": 0.0034},
            },
            {"pid": 13, "role": "loader"},
            {"pid": 14, "role": "trainer", "ended_seconds_ago": 1.0},
            {"pid": 15, "role": "trainer", "identity": null, "phase_times": null},
        ]});
        let table = table(&serde_json::from_value(snapshot).unwrap());
        let lines: Vec<Vec<&str>> = table
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(lines.len(), 3, "{table}");
        assert_eq!(lines[2][..5], ["15", "-", "-", "-", "-"]);
        let expected = [
            "12",
            "slurm-7",
            "1",
            "3",
            "GpuCompute",
            "12.5",
            "10%",
            "20%",
            "0.34%",
            "python?[2J",
        ];
        assert_eq!(lines[1], expected);
    }
}
