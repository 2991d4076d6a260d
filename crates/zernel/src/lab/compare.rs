//! `zernel lab compare`: schedulers side by side.

use std::error::Error;
use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread::available_parallelism;

use clap::Args;
use zernel_lab::compare::baseline::find_regressions;
use zernel_lab::compare::{
    COMPARISON_RULE, ComparisonProgress, ComparisonReport, SchedulerComparison,
};

use super::scenario::{CommonOptions, WRONG_INPUT_EXIT_CODE, load_scenarios_and_schedulers};
use crate::{help, interrupt_flags, print_to_stdout};

/// Compare schedulers in scenarios, seed by seed
///
/// Every scenario is booted once for each scheduler and seed. Results are kept in ~/.cache/zernel by everything that
/// decides them, so that another scheduler adds only its own boots. The table is printed to stdout.
///
/// Exit code: 1 if a scheduler became worse than in --baseline, else 0. Failed assertions are in the table.
#[derive(Debug, Args)]
#[command(after_help = help::LAB_COMPARE_EXAMPLES)]
pub(super) struct CompareOptions {
    /// Scenario files
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Schedulers, separated by commas, named as for `zernel lab scenario`; all are compared with the first one
    #[arg(
        long,
        value_name = "SCHEDULER,…",
        value_delimiter = ',',
        default_value = "eevdf,fifo,ref,fair"
    )]
    sched: Vec<String>,
    /// Seeds 1 to N of each scenario; 6 are needed to call a scheduler better
    #[arg(long, value_name = "N", default_value_t = 6)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Boots at once [default: number of CPUs]
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    #[command(flatten)]
    common: CommonOptions,
    /// Write the report as JSON, to be a --baseline later
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write one SVG per scenario to this folder
    #[arg(long, value_name = "FOLDER")]
    plots: Option<PathBuf>,
    /// Fail if a scheduler is worse than in this report, which --json wrote
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
}

pub(super) fn run(options: &CompareOptions) -> Result<ExitCode, Box<dyn Error>> {
    let baseline = options.baseline.as_deref().map(read_report).transpose()?;
    let (scenarios, schedulers) =
        match load_scenarios_and_schedulers(&options.files, &options.sched) {
            Ok(loaded) => loaded,
            Err(error) => {
                crate::print_error(&*error);
                return Ok(ExitCode::from(WRONG_INPUT_EXIT_CODE));
            }
        };
    let cpus = available_parallelism().map_or(1, usize::from);
    let comparison = SchedulerComparison {
        scenarios,
        schedulers,
        seed_count: options.seeds,
        parallel_boots: options.jobs.unwrap_or(cpus),
    };
    eprintln!("zernel: {COMPARISON_RULE}");
    let interrupt = interrupt_flags::interrupt_flag()?;
    let report = comparison.run(
        &interrupt,
        |run| options.common.apply_to_run(run),
        show_progress,
    );
    let Some(report) = report else {
        return Ok(ExitCode::from(interrupt_flags::INTERRUPTED_EXIT_CODE));
    };
    print_to_stdout(report.to_string().as_bytes())?;
    if let Some(file) = &options.json {
        fs::write(file, serde_json::to_vec_pretty(&report)?)
            .map_err(|error| error_with_path(file, &error))?;
    }
    if let Some(folder) = &options.plots {
        fs::create_dir_all(folder).map_err(|error| error_with_path(folder, &error))?;
        for scenario in &report.scenarios {
            let file = folder.join(format!("{}.svg", scenario.name));
            fs::write(&file, scenario.to_svg()).map_err(|error| error_with_path(&file, &error))?;
        }
    }
    let worse = baseline.map_or_else(Vec::new, |baseline| find_regressions(&report, &baseline));
    for regression in &worse {
        eprintln!("zernel: worse than the baseline: {regression}");
    }
    Ok(ExitCode::from(u8::from(!worse.is_empty())))
}

fn read_report(file: &Path) -> Result<ComparisonReport, Box<dyn Error>> {
    let text = fs::read(file).map_err(|error| error_with_path(file, &error))?;
    let report = serde_json::from_slice(&text);
    Ok(report.map_err(|error| format!("{}: {error}; write it with --json", file.display()))?)
}

fn error_with_path(file: &Path, error: &io::Error) -> String {
    format!("{}: {error}", file.display())
}

fn show_progress(progress: &ComparisonProgress<'_>) {
    let last = progress.last_result;
    let left = progress.time_left.map_or_else(String::new, |left| {
        format!(", about {} s left", left.as_secs())
    });
    let text = format!(
        "zernel: {} of {}: {}, {}, seed {}: {}{left}",
        progress.finished_runs,
        progress.total_runs,
        last.scenario,
        last.scheduler,
        last.seed,
        last.verdict()
    );
    let mut stderr = io::stderr();
    // On a terminal, each progress message overwrites the one before.
    let _ = match stderr.is_terminal() {
        true => write!(
            stderr,
            "\r\x1b[K{text}{}",
            if progress.finished_runs == progress.total_runs {
                "\n"
            } else {
                ""
            }
        ),
        false => writeln!(stderr, "{text}"),
    };
}
