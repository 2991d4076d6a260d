//! `zernel ps`: lists the training processes of this machine.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt::Write;
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use zernel_phase::task_state::WorkloadPhase;

use crate::daemon_client::DaemonSocket;
use zernel_model::snapshot::{ProcessSnapshot, Snapshot};
use zernel_report::text::shorten_text;

/// List the training processes of this machine
///
/// STEP is the median time of recent steps in milliseconds. DATA and COMM are the shares of time spent waiting for data
/// and in collectives. COST is the overhead of observing, as a share of the busiest thread's time. `-` is unknown. A job or
/// rank `?` may exist: the environment of the process could not be read.
///
/// Needs a running `zernel observe`. Root sees all processes, other users see their own.
///
/// --json prints an array with one object per process: pid, comm, job, rank, gpus (indices), phase,
/// median_step_seconds, data_share, collective_share and cost_share (0 to 1). Unknown values are null. environment_read is
/// false if the environment could not be read, which may have a job and a rank.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    socket: DaemonSocket,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    let trainers = running_trainers(&options.socket.fresh_snapshot()?);
    let text = match options.json {
        true => format!("{:#}\n", serde_json::to_value(&trainers)?),
        false => trainer_table(&trainers),
    };
    crate::print_to_stdout(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// A training process, as the table of `zernel ps` and its `--json` show it.
#[derive(Debug, Serialize)]
struct TrainerRow {
    pid: u32,
    comm: String,
    job: Option<String>,
    rank: Option<u32>,
    environment_read: bool,
    /// NVML indices of the GPUs on which the process holds memory.
    gpus: BTreeSet<u32>,
    phase: Option<WorkloadPhase>,
    /// Median time of recent steps.
    median_step_seconds: Option<f64>,
    /// Share of the training thread's time in waits for data.
    data_share: Option<f64>,
    /// Share of the training thread's time in collectives.
    collective_share: Option<f64>,
    /// Overhead of observing, as a share of the time of the process's busiest thread.
    cost_share: f64,
}

impl TrainerRow {
    fn new(process: &ProcessSnapshot) -> Self {
        let times = process.phases.phase_times.as_ref();
        let share = |phase| times.map(|times| times.phase_fraction(phase));
        Self {
            pid: process.pid,
            comm: process.comm().to_owned(),
            job: process.job().map(str::to_owned),
            rank: process.rank(),
            environment_read: (process.identity.as_ref())
                .is_some_and(|identity| identity.environment_read),
            gpus: (process.probes.gpu_mem.memory_by_caller.iter())
                .filter_map(|memory| memory.gpu_id)
                .collect(),
            phase: process.phases.phase,
            median_step_seconds: process.steps.median_seconds(),
            data_share: share(WorkloadPhase::DataLoading),
            collective_share: share(WorkloadPhase::NcclCollective),
            cost_share: process.cost.busiest_thread_ratio,
        }
    }
}

/// The running trainers by job and rank. Trainers without a job come last.
fn running_trainers(snapshot: &Snapshot) -> Vec<TrainerRow> {
    let observed = snapshot.observed.iter();
    let mut trainers: Vec<TrainerRow> = observed
        .filter(|process| process.is_trainer())
        .map(TrainerRow::new)
        .collect();
    trainers.sort_by_cached_key(|trainer| {
        let job = trainer.job.clone();
        (job.is_none(), job, trainer.rank, trainer.pid)
    });
    trainers
}

fn trainer_table(trainers: &[TrainerRow]) -> String {
    let mut rows = vec![TABLE_HEADER.map(str::to_owned)];
    rows.extend(trainers.iter().map(trainer_cells));
    let widths: Vec<usize> = (0..TABLE_HEADER.len())
        .map(|column| {
            let lengths = rows.iter().map(|row| row[column].chars().count());
            lengths.max().unwrap_or(0)
        })
        .collect();
    rows.iter().map(|row| format_line(row, &widths)).collect()
}

const TABLE_HEADER: [&str; 10] = [
    "PID", "JOB", "RANK", "GPU", "PHASE", "STEP", "DATA", "COMM", "COST", "NAME",
];
/// The columns that are left-aligned. All other columns have numbers and are right-aligned.
const TEXT_COLUMNS: [&str; 3] = ["JOB", "PHASE", "NAME"];

fn trainer_cells(trainer: &TrainerRow) -> [String; 10] {
    let unknown = || "-".to_owned();
    let unread = || if trainer.environment_read { "-" } else { "?" }.to_owned();
    let gpus: Vec<String> = trainer.gpus.iter().map(u32::to_string).collect();
    let job = trainer.job.as_deref();
    [
        trainer.pid.to_string(),
        job.map_or_else(unread, |job| shorten_text(job, 20)),
        trainer.rank.map_or_else(unread, |rank| rank.to_string()),
        if gpus.is_empty() {
            unknown()
        } else {
            gpus.join(",")
        },
        trainer
            .phase
            .map_or_else(unknown, |phase| phase.to_string()),
        (trainer.median_step_seconds)
            .map_or_else(unknown, |seconds| format!("{:.1}", 1e3 * seconds)),
        trainer.data_share.map_or_else(unknown, format_percent),
        trainer
            .collective_share
            .map_or_else(unknown, format_percent),
        format!("{:.2}%", 100.0 * trainer.cost_share),
        shorten_text(&trainer.comm, 15),
    ]
}

fn format_line(row: &[String; 10], widths: &[usize]) -> String {
    let mut line = String::new();
    for ((cell, name), width) in row.iter().zip(TABLE_HEADER).zip(widths) {
        // Writing to a string cannot fail.
        let _ = match TEXT_COLUMNS.contains(&name) {
            true => write!(line, "{cell:<width$}  "),
            false => write!(line, "{cell:>width$}  "),
        };
    }
    format!("{}\n", line.trim_end())
}

fn format_percent(share: f64) -> String {
    format!("{:.0}%", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Two running trainers, a loader and a trainer that exited.
    fn example_trainers() -> Vec<TrainerRow> {
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
            {"pid": 15, "role": "trainer", "identity": {"environment_read": true}, "phase_times": null},
            {"pid": 16, "role": "trainer", "identity": null, "phase_times": null},
        ]});
        running_trainers(&serde_json::from_value(snapshot).unwrap())
    }

    #[test]
    fn the_table_has_a_line_per_running_trainer() {
        let table = trainer_table(&example_trainers());
        let lines: Vec<Vec<&str>> = table
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(lines.len(), 4, "{table}");
        assert_eq!(lines[2][..5], ["15", "-", "-", "-", "-"]);
        assert_eq!(lines[3][..5], ["16", "?", "?", "-", "-"]);
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

    #[test]
    fn the_json_has_an_object_per_running_trainer() {
        let json = serde_json::to_value(example_trainers()).unwrap();
        let expected = json!([
            {
                "pid": 12, "comm": "python\u{1b}[2J", "job": "slurm-7", "rank": 1, "gpus": [3],
                "environment_read": false, "phase": "GpuCompute", "median_step_seconds": 0.0125, "data_share": 0.1,
                "collective_share": 0.2, "cost_share": 0.0034,
            },
            {
                "pid": 15, "comm": "", "job": null, "rank": null, "gpus": [], "phase": null,
                "environment_read": true, "median_step_seconds": null, "data_share": null,
                "collective_share": null, "cost_share": 0.0,
            },
        ]);
        assert_eq!(
            json.as_array().unwrap()[..2],
            expected.as_array().unwrap()[..]
        );
        assert_eq!(json[2]["environment_read"], json!(false));
    }
}
