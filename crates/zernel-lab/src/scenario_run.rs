//! Runs one scenario under one scheduler with one seed: a boot, figures, and a verdict.
//!
//! ```no_run
//! use zernel_lab::{Scenario, ScenarioRun, SchedulerChoice, Verdict};
//!
//! let scenario = Scenario::load("scenarios/saturate.toml".as_ref())?;
//! let result = ScenarioRun::new(scenario, SchedulerChoice::Eevdf).guest_program("/usr/bin/zernel").run();
//! assert_eq!(result.verdict(), Verdict::Pass, "{result}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::error::Error;
use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::assertion::{
    Finding, Verdict, first_kernel_warning, judge_run, kernel_warning_in_line, worst_verdict,
};
use crate::deterministic::{DeterministicSettings, TickAlignment};
use crate::guest::find_busybox;
use crate::initramfs::Initramfs;
use crate::kernel::{Kernel, KernelCache, KernelRequest};
use crate::run_cache::{RunCache, RunInputHash};
use crate::scenario::figures::RunFigures;
use crate::scenario::plan::{
    GUEST_PROGRAM_PATH, GuestPlan, PLAN_PATH, SCHEDULER_PROGRAM_PATH, SchedulerChoice,
};
use crate::scenario::{SOFTWARE_GPU_DRIVER_PATH, Scenario};
use crate::software_gpu;
use crate::vm::{CommandOutcome, VmError, VmSpec};

/// Virtual time that a run may take besides its scenario: to boot, to load a scheduler, to stop.
const EXTRA_VIRTUAL_TIME: Duration = Duration::from_secs(38);
/// Time on the host that a run may take.
const RUN_HOST_TIME_LIMIT: Duration = Duration::from_secs(900);
/// Lines that a run keeps of the console's end, and from its first warning on.
const KEPT_CONSOLE_LINES: usize = 40;

/// What the virtual machine prints at the end of a run, as JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestAnswer {
    /// The figures of a run that was measured.
    Figures(RunFigures),
    /// Why the run could not start.
    Error(String),
}

/// A scenario that is to run in a virtual machine, under one scheduler and with one seed.
#[derive(Debug, Clone)]
pub struct ScenarioRun {
    scenario: Scenario,
    scheduler: SchedulerChoice,
    seed: u64,
    ticks: TickAlignment,
    guest_program: Option<PathBuf>,
    uses_cache: bool,
    interrupt_flag: Arc<AtomicBool>,
}

/// The result of a run: figures and findings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// The name of the scenario.
    pub scenario: String,
    /// The name of the scheduler.
    pub scheduler: String,
    /// The seed of the run.
    pub seed: u64,
    /// The figures; `None` if the run failed before they were complete.
    pub figures: Option<RunFigures>,
    /// The verdicts on all assertions.
    pub findings: Vec<Finding>,
    /// The first kernel message that is a warning; `None` without a warning.
    pub kernel_warning: Option<String>,
    /// The kernel's messages after the first warning, and the last ones.
    pub console: String,
    /// Time on the host that the run took.
    pub host_seconds: f64,
}

impl RunResult {
    /// The worst verdict of all findings.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        worst_verdict(&self.findings)
    }
}

impl fmt::Display for RunResult {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            scenario,
            scheduler,
            seed,
            ..
        } = self;
        writeln!(
            formatter,
            "{scenario}, {scheduler}, seed {seed}: {}",
            self.verdict()
        )?;
        for finding in &self.findings {
            writeln!(formatter, "  {:<12} {}", finding.verdict, finding.text)?;
        }
        // An assertion about figures needs no kernel messages as evidence.
        let is_broken = self.figures.is_none() || self.kernel_warning.is_some();
        if self.verdict() == Verdict::Fail && is_broken && !self.console.is_empty() {
            writeln!(formatter, "last kernel messages:\n{}", self.console)?;
        }
        Ok(())
    }
}

impl ScenarioRun {
    /// A run with seed 1 and aligned ticks. Its result comes from the cache if nothing that decides it has changed.
    #[must_use]
    pub fn new(scenario: Scenario, scheduler: SchedulerChoice) -> Self {
        Self {
            scenario,
            scheduler,
            seed: 1,
            ticks: TickAlignment::Aligned,
            guest_program: None,
            uses_cache: true,
            interrupt_flag: Arc::default(),
        }
    }

    /// The same run with another seed.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// The same run with another alignment of the ticks.
    #[must_use]
    pub fn ticks(mut self, ticks: TickAlignment) -> Self {
        self.ticks = ticks;
        self
    }

    /// The same run with the `zernel` binary at this path as the guest program, instead of the running program.
    #[must_use]
    pub fn guest_program(mut self, path: impl Into<PathBuf>) -> Self {
        self.guest_program = Some(path.into());
        self
    }

    /// The same run without the observer, whatever the scenario says.
    #[must_use]
    pub fn without_observer(mut self) -> Self {
        self.scenario.observe = false;
        self
    }

    /// The name of the run's scheduler in tables.
    #[must_use]
    pub fn scheduler_name(&self) -> String {
        self.scheduler.name()
    }

    /// The same run, but without a result from the cache.
    #[must_use]
    pub fn without_cache(mut self) -> Self {
        self.uses_cache = false;
        self
    }

    /// The same run, which ends when `flag` is set.
    #[must_use]
    pub fn interrupted_by(mut self, interrupt_flag: Arc<AtomicBool>) -> Self {
        self.interrupt_flag = interrupt_flag;
        self
    }

    /// Runs the scenario. If the result is inconclusive, runs it once more with the next seed. In some boots the
    /// emulator stops the ticks of a CPU. A boot with another seed takes another course.
    #[must_use]
    pub fn run_twice_if_inconclusive(mut self) -> RunResult {
        let first = self.run();
        if first.verdict() != Verdict::Inconclusive {
            return first;
        }
        self.seed += 1;
        self.run()
    }

    /// Boots, runs the scenario once and judges. Whatever goes wrong is a finding.
    #[must_use]
    pub fn run(&self) -> RunResult {
        let start = Instant::now();
        let mut result = RunResult {
            scenario: self.scenario.name.clone(),
            scheduler: self.scheduler.name(),
            seed: self.seed,
            figures: None,
            findings: Vec::new(),
            kernel_warning: None,
            console: String::new(),
            host_seconds: 0.0,
        };
        match self.prepare_boot() {
            Err(problem) => result
                .findings
                .push(finding_with_verdict(Verdict::Skip, problem)),
            Ok(prepared) => {
                let cache = RunCache::from_environment();
                let cached_result = self
                    .uses_cache
                    .then(|| cache.read_result(&prepared.input_hash))
                    .flatten();
                if let Some(cached_result) = cached_result {
                    // A cached result is judged again: the assertions may have changed since, the measured figures have
                    // not.
                    return self.judge_cached_result(cached_result);
                }
                self.boot_and_record(&prepared, &mut result);
                result.host_seconds = start.elapsed().as_secs_f64();
                if result.figures.is_some() {
                    cache.write_result(&prepared.input_hash, &result);
                }
            }
        }
        result
    }

    fn judge_cached_result(&self, cached_result: RunResult) -> RunResult {
        let findings = match &cached_result.figures {
            Some(figures) => judge_run(
                &self.scenario_with_control(),
                figures,
                cached_result.kernel_warning.as_deref(),
            ),
            None => cached_result.findings.clone(),
        };
        RunResult {
            scenario: self.scenario.name.clone(),
            scheduler: self.scheduler.name(),
            findings,
            ..cached_result
        }
    }

    /// The scenario with the assertions that hold for the run's scheduler.
    fn scenario_with_control(&self) -> Scenario {
        match &self.scheduler {
            SchedulerChoice::EevdfWithControl(control) => control
                .apply_to_scenario(&self.scenario)
                .unwrap_or_else(|_| self.scenario.clone()),
            _ => self.scenario.clone(),
        }
    }

    fn prepare_boot(&self) -> Result<PreparedBoot, String> {
        let plan = GuestPlan::new(&self.scenario, &self.scheduler, self.seed)?;
        let kernel = obtain_kernel(&self.scenario.kernel)?;
        let guest = match &self.guest_program {
            Some(path) => path.clone(),
            None => std::env::current_exe().map_err(|error| error.to_string())?,
        };
        let files = self
            .initramfs_of_guest(&plan, &cached_stripped_program(&guest))
            .map_err(|error| error.to_string())?;
        let mut input_hash = RunInputHash::default();
        input_hash.add_file_content(&kernel.image_path)?;
        input_hash.add_file_content(&find_busybox().map_err(|error| error.to_string())?)?;
        let mut archive = Vec::new();
        files
            .write_archive_to(&mut archive)
            .map_err(|error| error.to_string())?;
        input_hash.add_part(&archive);
        drop(archive);
        let image = kernel.image_path.clone();
        let spec = self.vm_spec(kernel, files)?;
        // The path of the kernel's image is left out of the hash: results are the same on every machine.
        let arguments = spec.deterministic_qemu_arguments().into_iter();
        for word in arguments.filter(|word| *word != image) {
            input_hash.add_part(word.as_encoded_bytes());
        }
        input_hash.add_part(qemu_version().as_bytes());
        Ok(PreparedBoot { spec, input_hash })
    }

    /// The files that the guest needs.
    fn initramfs_of_guest(
        &self,
        plan: &GuestPlan,
        guest: &Path,
    ) -> Result<Initramfs, Box<dyn Error>> {
        let mut files = Initramfs::new();
        files.add_file_with_content(PLAN_PATH, serde_json::to_vec(plan)?, 0o644)?;
        if let SchedulerChoice::Program { path, .. } = &self.scheduler {
            files.add_program_at(path, SCHEDULER_PROGRAM_PATH)?;
        }
        if plan.scenario.needs_software_gpu() {
            let folder = Path::new(SOFTWARE_GPU_DRIVER_PATH)
                .parent()
                .unwrap_or(Path::new("/"));
            for (host, name) in software_gpu::find_libraries()? {
                files.add_host_file(&host, folder.join(name))?;
            }
        }
        files.add_program_at(guest, GUEST_PROGRAM_PATH)?;
        Ok(files)
    }

    fn vm_spec(&self, kernel: Kernel, files: Initramfs) -> Result<VmSpec, String> {
        Ok(VmSpec::new(kernel)
            .topology(self.scenario.parsed_topology()?)
            .memory_mib(self.scenario.memory_mib)
            .command_timeout(RUN_HOST_TIME_LIMIT)
            .boot_timeout(RUN_HOST_TIME_LIMIT)
            .deterministic(self.deterministic_settings())
            .files(files)
            .interrupted_by(Arc::clone(&self.interrupt_flag)))
    }

    fn deterministic_settings(&self) -> DeterministicSettings {
        let scenario_ms = self.scenario.warmup_ms + self.scenario.duration_ms;
        DeterministicSettings::new(self.seed)
            .ticks(self.ticks)
            .virtual_time_limit(EXTRA_VIRTUAL_TIME + Duration::from_millis(scenario_ms))
    }

    fn boot_and_record(&self, prepared: &PreparedBoot, result: &mut RunResult) {
        match prepared
            .spec
            .run(GUEST_PROGRAM_PATH, ["lab", "guest", PLAN_PATH])
        {
            Ok(outcome) => self.record_command_outcome(&outcome, result),
            Err(error) => self.record_vm_error(&error, result),
        }
    }

    fn record_command_outcome(&self, outcome: &CommandOutcome, result: &mut RunResult) {
        result.kernel_warning = first_kernel_warning(&outcome.console_log);
        result.console = kept_console_lines(&outcome.console_log);
        match serde_json::from_slice(&outcome.stdout) {
            Ok(GuestAnswer::Figures(figures)) => {
                let scenario = self.scenario_with_control();
                result.findings = judge_run(&scenario, &figures, result.kernel_warning.as_deref());
                result.figures = Some(figures);
            }
            Ok(GuestAnswer::Error(problem)) => {
                result
                    .findings
                    .push(finding_with_verdict(self.verdict_of_aborted_run(), problem));
            }
            Err(error) => {
                let stderr = String::from_utf8_lossy(&outcome.stderr);
                let text = format!("the guest printed no result ({error}): {stderr}");
                result
                    .findings
                    .push(finding_with_verdict(self.verdict_of_aborted_run(), text));
            }
        }
    }

    fn record_vm_error(&self, error: &VmError, result: &mut RunResult) {
        result.console = error
            .partial_output()
            .map_or_else(String::new, |partial_output| {
                kept_console_lines(&partial_output.console_log)
            });
        let verdict = match error {
            _ if error.is_emulator_crash() => Verdict::Inconclusive,
            VmError::KernelPanic { .. }
            | VmError::VirtualTimeLimitReached { .. }
            | VmError::CommandTimedOut { .. } => self.verdict_of_aborted_run(),
            VmError::QemuMissing | VmError::BusyboxMissing => Verdict::Skip,
            _ => Verdict::Inconclusive,
        };
        result
            .findings
            .push(finding_with_verdict(verdict, error.to_string()));
    }

    /// The verdict if a run breaks off: a scheduler under test is to blame, the kernel's own scheduler is not.
    fn verdict_of_aborted_run(&self) -> Verdict {
        match self.scheduler {
            SchedulerChoice::LabScheduler(_)
            | SchedulerChoice::Zernel(_)
            | SchedulerChoice::Program { .. } => Verdict::Fail,
            SchedulerChoice::Eevdf | SchedulerChoice::EevdfWithControl(_) => Verdict::Inconclusive,
        }
    }
}

/// Everything that a virtual machine needs to boot for this run.
struct PreparedBoot {
    spec: VmSpec,
    input_hash: RunInputHash,
}

fn finding_with_verdict(verdict: Verdict, text: String) -> Finding {
    Finding { verdict, text }
}

fn obtain_kernel(version: &str) -> Result<Kernel, String> {
    let request = version
        .parse::<KernelRequest>()
        .map_err(|error| format!("key `kernel`: {error}"))?;
    let cache = KernelCache::from_environment().map_err(|error| error.to_string())?;
    cache
        .obtain_kernel(&request)
        .map_err(|error| error.to_string())
}

fn qemu_version() -> String {
    let program = crate::qemu::find_qemu();
    let output = program.and_then(|program| Command::new(program).arg("--version").output().ok());
    output.map_or_else(String::new, |output| {
        String::from_utf8_lossy(&output.stdout).into_owned()
    })
}

/// A copy of the program without debug information, which a guest would have to unpack at every boot. The copy is kept
/// beside the cached results. Without `strip` on this machine, it is the program itself.
fn cached_stripped_program(program: &Path) -> PathBuf {
    stripped_program_in(
        &RunCache::from_environment().folder().join("guest"),
        program,
    )
}

fn stripped_program_in(cache: &Path, program: &Path) -> PathBuf {
    let Ok(metadata) = fs::metadata(program) else {
        return program.to_owned();
    };
    // The copy is found by time and size of the program, because a build with debug information is large to read.
    let mut input_hash = RunInputHash::default();
    input_hash.add_part(program.as_os_str().as_encoded_bytes());
    input_hash.add_part(&metadata.len().to_le_bytes());
    input_hash.add_part(&metadata.mtime().to_le_bytes());
    input_hash.add_part(&metadata.mtime_nsec().to_le_bytes());
    let folder = cache.join(input_hash.to_string());
    let stripped_path = folder.join("zernel");
    if stripped_path.is_file() {
        return stripped_path;
    }
    let strip = || -> std::io::Result<bool> {
        fs::create_dir_all(&folder)?;
        // Several threads of a comparison may strip the program at once, so each makes its own copy and renames it.
        let scratch = tempfile::tempdir_in(&folder)?;
        let partial_path = scratch.path().join("zernel");
        let status = Command::new("strip")
            .arg("-o")
            .arg(&partial_path)
            .arg(program)
            .status()?;
        if status.success() {
            fs::rename(&partial_path, &stripped_path)?;
        }
        Ok(status.success())
    };
    match strip() {
        Ok(true) => stripped_path,
        _ => program.to_owned(),
    }
}

fn kept_console_lines(console: &str) -> String {
    let lines: Vec<&str> = console.lines().collect();
    let end_start = lines.len().saturating_sub(KEPT_CONSOLE_LINES);
    let before_end = &lines[..end_start];
    let first_warning = before_end
        .iter()
        .position(|line| kernel_warning_in_line(line).is_some());
    let after_warning = before_end[first_warning.unwrap_or(end_start)..]
        .iter()
        .take(KEPT_CONSOLE_LINES);
    let kept_lines: Vec<&str> = after_warning.chain(&lines[end_start..]).copied().collect();
    kept_lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concurrent_stripping_gives_one_program() {
        let cache = tempfile::tempdir().unwrap();
        let program = std::env::current_exe().unwrap();
        let paths: Vec<PathBuf> = std::thread::scope(|scope| {
            let strip = || stripped_program_in(cache.path(), &program);
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(strip)).collect();
            let paths = threads.into_iter().map(|thread| thread.join().unwrap());
            paths.collect()
        });
        assert!(paths.iter().all(|path| *path == paths[0]), "{paths:?}");
        assert!(paths[0].is_file(), "{paths:?}");
        let folder = paths[0].parent().unwrap();
        if folder.starts_with(cache.path()) {
            assert_eq!(fs::read_dir(folder).unwrap().count(), 1);
        }
    }

    #[test]
    fn kept_console_lines_are_end_and_first_warning() {
        let console_of = |warning_line: usize| -> String {
            let text = |line| match line == warning_line {
                true => "[ 1.0] WARNING: x\n".to_owned(),
                false => format!("line {line}\n"),
            };
            (0..200).map(text).collect()
        };
        let kept = kept_console_lines(&console_of(200));
        assert!(
            kept.starts_with("line 160\n") && kept.ends_with("line 199"),
            "{kept}"
        );
        let kept = kept_console_lines(&console_of(50));
        assert!(
            kept.starts_with("[ 1.0] WARNING: x\nline 51\n")
                && kept.contains("\nline 89\nline 160\n")
                && kept.ends_with("line 199"),
            "{kept}"
        );
        let kept = kept_console_lines(&console_of(150));
        assert_eq!(kept.lines().count(), 50, "{kept}");
        assert_eq!(kept_console_lines("one"), "one");
    }
}
