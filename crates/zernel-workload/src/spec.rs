//! Workload files: TOML files with groups of workers and their cgroups. `docs/workload.md` describes every key.
//!
//! ```toml
//! duration_ms = 2000
//!
//! [[group]]
//! name = "spinners"
//! workers = 2
//! work = "spin_wait"
//!
//! [[group]]
//! name = "sleepers"
//! workers = 4
//! nice = 5
//! work.bursty = { burst_us = 500, sleep_us = 1000 }
//!
//! [[cgroup]]
//! name = "background"
//! groups = ["sleepers"]
//! weight = 50
//! ```
//!
//! [`WorkloadSpec::load`] reads and checks a file, [`WorkloadSpec::run`] runs it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags, open};
use serde::{Deserialize, Serialize};

use crate::affinity::Affinity;
use crate::cgroup::{CgroupSpec, WorkloadCgroups};
use crate::config::{CloneMode, WorkSpec, WorkloadConfig};
use crate::error::{Error, Result};
use crate::handle::WorkloadHandle;
use crate::report::WorkerReport;
use crate::spec_keys::{SpecKey, SpecValue, spec_table};
use crate::topology::Topology;
use crate::workload_plan::{GroupPlan, WorkloadPlan};

/// Time between two calls of the progress callback.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// The smallest group that does some work, for error messages.
const SMALLEST_GROUP_TOML: &str = "[[group]]\nworkers = 1\nwork = \"spin_wait\"";

spec_table! {
    /// A workload as a TOML file states it.
    pub struct WorkloadSpec {
        /// Run time of the workload.
        pub duration_ms: u64 = 10_000,
        /// How workers without a `pcomm` are created.
        pub clone_mode: CloneMode = CloneMode::default(),
        /// Time that the last workers have to stop after the stop request. After that, processes are killed and threads
        /// are abandoned.
        pub stop_grace_ms: u64 = WorkloadConfig::DEFAULT_STOP_GRACE.as_millis() as u64,
        /// Groups of workers; at least one.
        pub groups as "group": Vec<WorkSpec> = Vec::new(),
        /// Cgroups in which groups run. A group that no cgroup names stays in the caller's cgroup.
        pub cgroups as "cgroup": Vec<CgroupSpec> = Vec::new(),
    }
}

/// Progress of a running workload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WorkloadProgress {
    /// Time since the start of the workload.
    pub elapsed: Duration,
    /// Run time that the workload file asks for.
    pub total: Duration,
    /// Rounds that the workers of each group have done so far, by the group's name.
    pub rounds: Vec<(String, u64)>,
}

/// Result of a workload that has run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkloadOutcome {
    /// One report per worker.
    pub reports: Vec<WorkerReport>,
    /// Whether the progress callback stopped the workload before its run time was over.
    pub interrupted: bool,
    /// Cgroup settings that this machine refused, each with the reason.
    pub not_applied: Vec<String>,
}

/// Reads a workload file, or stdin for `-`. Files that are not regular are refused, because reading them may block.
fn read_spec(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    if path.as_os_str() == "-" {
        io::stdin().read_to_string(&mut text)?;
        return Ok(text);
    }
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let mut file = File::from(open(path, flags, Mode::empty())?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::other(
            "it is not a regular file; use `-` to read stdin",
        ));
    }
    file.read_to_string(&mut text)?;
    Ok(text)
}

impl WorkloadSpec {
    /// Reads and checks a workload file, or stdin for `-`.
    pub fn load(path: &Path) -> Result<Self> {
        let file = path.display().to_string();
        let text = read_spec(path).map_err(|error| Error::SpecFile {
            file: file.clone(),
            problem: error.to_string(),
        })?;
        Self::parse(&text, &file)
    }

    /// Parses and checks the text of a workload file. Errors name `file`, and relative paths start at the folder of
    /// `file`.
    pub fn parse(text: &str, file: &str) -> Result<Self> {
        let failed = |problem: String| Error::SpecFile {
            file: file.to_owned(),
            problem,
        };
        let mut spec: Self = toml::from_str(text)
            .map_err(|error| failed(error.to_string().trim_end().to_owned()))?;
        spec.check_workers().map_err(failed)?;
        if let Some(folder) = Path::new(file).parent() {
            spec.resolve_paths(folder);
        }
        spec.groups = WorkloadConfig::from_specs(spec.clone_mode, spec.groups).named_specs();
        spec.check().map_err(|error| failed(error.to_string()))?;
        Ok(spec)
    }

    /// The tables of a workload file and their keys. The parameters of a work type are
    /// [`WorkType::parameters`](crate::WorkType::parameters).
    #[must_use]
    pub fn documented_tables() -> [(&'static str, Vec<SpecKey>); 3] {
        [
            ("", Self::keys()),
            ("[[group]]", WorkSpec::keys()),
            ("[[cgroup]]", CgroupSpec::keys()),
        ]
    }

    /// Refuses a workload file that has no workers.
    fn check_workers(&self) -> Result<(), String> {
        if self.groups.is_empty() {
            return Err(format!(
                "there is no [[group]]; add one:\n{SMALLEST_GROUP_TOML}"
            ));
        }
        match self.groups.iter().any(|group| group.workers > 0) {
            true => Ok(()),
            false => Err(
                "every group has `workers = 0`; set `workers` of at least one group to 1 or more"
                    .to_owned(),
            ),
        }
    }

    /// Checks every setting of the workload before its first worker exists.
    ///
    /// # Errors
    /// The first invalid setting, with its group and field.
    pub fn check(&self) -> Result<()> {
        let mut names = BTreeSet::new();
        if let Some(twice) = self
            .groups
            .iter()
            .find(|group| !names.insert(group.name.as_str()))
        {
            return Err(Error::invalid(
                &twice.name,
                "name",
                "two groups have this name; rename one",
            ));
        }
        self.check_cgroups(&names)?;
        // An affinity that depends on the machine is not checked here: the machine that runs the workload resolves it.
        let anywhere = |group: &WorkSpec| match group.affinity.is_resolved() {
            true => group.clone(),
            false => group.clone().affinity(Affinity::Inherit),
        };
        let groups = self.groups.iter().map(anywhere).collect();
        WorkloadPlan::new(&WorkloadConfig::from_specs(self.clone_mode, groups)).map(|_| ())
    }

    fn check_cgroups(&self, groups: &BTreeSet<&str>) -> Result<()> {
        let mut names = BTreeSet::new();
        let mut members = BTreeMap::new();
        for cgroup in &self.cgroups {
            cgroup.check_settings()?;
            let name = cgroup.name.as_str();
            if !names.insert(name) {
                let problem = "two cgroups have this name; rename one";
                return Err(Error::invalid(name, "name", problem));
            }
            for group in &cgroup.groups {
                if !groups.contains(group.as_str()) {
                    let problem = format!("there is no group `{group}`");
                    return Err(Error::invalid(name, "groups", problem));
                }
                if members.insert(group.as_str(), name).is_some() {
                    let problem = format!("`{group}` is in another cgroup already");
                    return Err(Error::invalid(name, "groups", problem));
                }
            }
        }
        self.check_containers(&members)
    }

    /// Refuses a container with groups in different cgroups: it is one process. `members` maps a group to its cgroup.
    fn check_containers(&self, members: &BTreeMap<&str, &str>) -> Result<()> {
        let mut containers = BTreeMap::new();
        for group in &self.groups {
            let Some(pcomm) = &group.pcomm else { continue };
            let first: &WorkSpec = containers.entry(pcomm).or_insert(group);
            let cgroup_of = |group: &WorkSpec| members.get(group.name.as_str());
            if cgroup_of(first) != cgroup_of(group) {
                let place = |group: &WorkSpec| match cgroup_of(group) {
                    Some(cgroup) => format!("`{}` in cgroup `{cgroup}`", group.name),
                    None => format!("`{}` in none", group.name),
                };
                let problem = format!(
                    "the container `{pcomm}` is one process and has one cgroup, but {} and {}; \
                     put all its groups in the same",
                    place(first),
                    place(group)
                );
                return Err(Error::invalid(&group.name, "pcomm", problem));
            }
        }
        Ok(())
    }

    /// The configuration of a handle, in which affinities name CPUs of `topology`.
    pub fn config(&self, topology: &Topology) -> Result<WorkloadConfig> {
        WorkloadConfig::from_specs(self.clone_mode, self.groups.clone())
            .stop_grace(Duration::from_millis(self.stop_grace_ms))
            .resolve(topology)
    }

    /// Runs the workload. This function calls `watch` five times per second; if `watch` returns [`ControlFlow::Break`],
    /// the run stops early and the reports are returned.
    ///
    /// No worker or cgroup remains when the run has ended, nor when the caller is killed meanwhile.
    pub fn run(
        &self,
        mut watch: impl FnMut(&WorkloadProgress) -> ControlFlow<()>,
    ) -> Result<WorkloadOutcome> {
        let config = self.config(&Topology::read()?)?;
        let mut cgroups = WorkloadCgroups::create(&self.cgroups, self.clone_mode);
        let mut handle = WorkloadHandle::spawn(&config)?;
        cgroups.move_workers_into_cgroups(&handle);
        handle.start();
        let interrupted = self.watch_until_end(&handle, &mut watch).is_break();
        let reports = handle.stop_and_collect();
        Ok(WorkloadOutcome {
            reports,
            interrupted,
            not_applied: cgroups.remove_all(),
        })
    }

    fn watch_until_end(
        &self,
        handle: &WorkloadHandle,
        watch: &mut impl FnMut(&WorkloadProgress) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let (begin, total) = (Instant::now(), Duration::from_millis(self.duration_ms));
        loop {
            let elapsed = begin.elapsed();
            let progress = WorkloadProgress {
                elapsed,
                total,
                rounds: self.rounds_by_group(handle),
            };
            let verdict = watch(&progress);
            if elapsed >= total {
                return ControlFlow::Continue(());
            }
            verdict?;
            std::thread::sleep(PROGRESS_INTERVAL.min(total - elapsed));
        }
    }

    fn rounds_by_group(&self, handle: &WorkloadHandle) -> Vec<(String, u64)> {
        let plan = &handle.plan;
        let counts = handle.snapshot_iterations();
        let rounds = |group: &GroupPlan| counts[group.workers.clone()].iter().sum();
        // The plan orders groups in another way than the workload file.
        let groups = plan.groups.iter();
        let by_name: BTreeMap<&str, u64> = groups
            .map(|group| (group.name.as_str(), rounds(group)))
            .collect();
        let of_group = |name: &str| by_name.get(name).copied().unwrap_or_default();
        self.groups
            .iter()
            .map(|group| (group.name.clone(), of_group(&group.name)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::WorkType;

    fn parse_error_text(text: &str) -> String {
        WorkloadSpec::parse(text, "job.toml")
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn workload_file_is_parsed_into_config() {
        let spec = WorkloadSpec::parse(
            r#"
            duration_ms = 5
            clone_mode = "thread"
            [[group]]
            workers = 2
            work = "spin_wait"
            [[group]]
            name = "pairs"
            workers = 4
            affinity = { random_subset = { count = 1 } }
            policy = { fifo = { priority = 3 } }
            work.pipe_ping_pong = { compute_us = 7 }
            [[group]]
            name = "train"
            workers = 6
            work.ml_training = { ranks = 2, loaders = 2 }
            "#,
            "job.toml",
        )
        .unwrap();
        assert_eq!((spec.duration_ms, spec.clone_mode), (5, CloneMode::Thread));
        assert_eq!(spec.groups[0].name, "group0");
        assert_eq!(spec.groups[0].work_type, WorkType::SpinWait);
        assert!(
            matches!(&spec.groups[1].work_type, WorkType::PipePingPong(work) if work.compute_us == 7)
        );
    }

    #[test]
    fn unknown_keys_are_refused_in_every_table() {
        for text in [
            "colour = 1\n[[group]]",
            "[[group]]\ncolour = 1",
            "[[group]]\nwork.bursty = { colour = 1 }",
            "[[group]]\nwork.paint = {}",
            "[[group]]\npolicy = { fifo = { colour = 1 } }",
            "[[group]]\naffinity = { random_subset = { count = 1, colour = 1 } }",
            "[[group]]\n[[cgroup]]\ncolour = 1",
            "[[group]]\nwork = \"custom\"",
        ] {
            let error = parse_error_text(text);
            assert!(error.starts_with("job.toml: "), "{text}: {error}");
            assert!(
                error.contains("unknown") || error.contains("unexpected keys"),
                "{text}: {error}"
            );
        }
    }

    #[test]
    fn invalid_group_error_names_group_and_field() {
        for (text, place) in [
            (
                "[[group]]\nname = \"a\"\nnice = 30",
                "group `a`, field `nice`",
            ),
            (
                "[[group]]\nname = \"a\"\n[[group]]\nname = \"a\"",
                "group `a`, field `name`",
            ),
            (
                "[[group]]\n[[cgroup]]\nname = \"c\"\ngroups = [\"b\"]",
                "group `c`, field `groups`: there is no group `b`",
            ),
            (
                "[[group]]\n[[cgroup]]\nname = \"c\"\nweight = 0",
                "group `c`, field `weight`",
            ),
            (
                "[[group]]\n[[cgroup]]\nname = \"../c\"",
                "group `../c`, field `name`",
            ),
            (
                "[[group]]\nworkers = 3\nwork.ml_training = {}",
                "group `group0`, field `workers`",
            ),
            (
                "[[group]]\n[[cgroup]]\nname = \"c\"\n[[cgroup]]\nname = \"c\"",
                "group `c`, field `name`: two cgroups have this name",
            ),
            (
                "[[group]]\nworkers = 2\nwork.ml_training = { traced_steps = 4611686018427387904 }",
                "field `work.traced_steps`: 4611686018427387904 is too many; use 0 to 1000000",
            ),
            (
                "[[group]]\nworkers = 2\nwork.ml_training = { gpu = { driver = \"/no/libcuda.so.1\" } }",
                "field `work.gpu`: there is no GPU driver library at `/no/libcuda.so.1`; `make softgpu` builds",
            ),
        ] {
            let error = parse_error_text(text);
            assert!(error.contains(place), "{text}: {error}");
        }
    }

    #[test]
    fn spec_without_workers_is_refused_with_example() {
        for text in ["", "duration_ms = 5", "[[cgroup]]\nname = 'c'"] {
            let error = parse_error_text(text);
            assert!(
                error.starts_with("job.toml: there is no [[group]]; add one:"),
                "{error}"
            );
            assert!(error.ends_with(SMALLEST_GROUP_TOML), "{error}");
        }
        let error = parse_error_text("[[group]]\nworkers = 0\n[[group]]\nworkers = 0");
        assert!(
            error.starts_with("job.toml: every group has `workers = 0`; set `workers`"),
            "{error}"
        );
        assert!(WorkloadSpec::parse("[[group]]\nworkers = 0\n[[group]]", "job.toml").is_ok());
    }

    #[test]
    fn smallest_group_toml_is_valid() {
        assert!(WorkloadSpec::parse(SMALLEST_GROUP_TOML, "job.toml").is_ok());
    }

    #[test]
    fn relative_paths_start_at_folder_of_workload_file() {
        let folder = std::env::temp_dir();
        let file = folder.join("job.toml");
        let parse = |path: &str| {
            let text = format!("[[group]]\nwork.random_read = {{ folder = '{path}' }}");
            let spec = WorkloadSpec::parse(&text, file.to_str().unwrap()).unwrap();
            match &spec.groups[0].work_type {
                WorkType::RandomRead(work) => work.folder.clone(),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(parse("."), folder.join("."));
        assert_eq!(parse("/"), Path::new("/"));
        let text =
            "[[group]]\nworkers = 2\nwork.ml_training = { gpu = { driver = 'no/libcuda.so.1' } }";
        let error = WorkloadSpec::parse(text, "/jobs/job.toml")
            .unwrap_err()
            .to_string();
        assert!(error.contains("`/jobs/no/libcuda.so.1`"), "{error}");
    }

    #[test]
    fn container_in_two_cgroups_is_refused() {
        let groups = "
            [[group]]
            name = 'a'
            pcomm = 'box'
            [[group]]
            name = 'b'
            pcomm = 'box'
            [[cgroup]]
            name = 'x'
            groups = ['a']
            [[cgroup]]
            name = 'y'
            groups = ['b']
        ";
        let error = parse_error_text(groups);
        let place = "`a` in cgroup `x` and `b` in cgroup `y`";
        assert!(error.contains(place), "{error}");
        let error = parse_error_text(&groups.replace("['b']", "[]"));
        assert!(
            error.contains("`a` in cgroup `x` and `b` in none"),
            "{error}"
        );
        let together = groups.replace("['a']", "['a', 'b']");
        let together = together.replace("groups = ['b']", "");
        assert!(WorkloadSpec::parse(&together, "job.toml").is_ok());
    }

    #[test]
    fn missing_workload_file_is_named() {
        let error = WorkloadSpec::load(Path::new("/nowhere/job.toml"))
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("/nowhere/job.toml: "), "{error}");
    }

    #[test]
    fn a_run_reports_progress_and_can_be_ended_early() {
        let mut spec =
            WorkloadSpec::parse("duration_ms = 600000\n[[group]]\nworkers = 2", "job.toml")
                .unwrap();
        let mut seen = 0;
        let outcome = spec.run(|progress| {
            seen = progress.rounds[0].1;
            if seen > 0 {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        let outcome = outcome.unwrap();
        assert!(outcome.reports.len() == 2 && outcome.not_applied.is_empty());
        assert!(outcome.interrupted);
        assert!(
            outcome
                .reports
                .iter()
                .map(|report| report.iterations)
                .sum::<u64>()
                >= seen
        );
        spec.duration_ms = 1;
        let outcome = spec.run(|_| ControlFlow::Continue(())).unwrap();
        assert!(!outcome.interrupted);
    }

    #[test]
    fn progress_lists_rounds_of_each_group() {
        // The plan lists threads of the caller last, whatever their place in the workload file.
        let text = "
            duration_ms = 600000
            clone_mode = 'thread'
            [[group]]
            name = 'threads'
            [[group]]
            name = 'nobody'
            workers = 0
            [[group]]
            name = 'boxed'
            pcomm = 'box'
            workers = 2
        ";
        let spec = WorkloadSpec::parse(text, "job.toml").unwrap();
        let mut last = Vec::new();
        let outcome = spec.run(|progress| {
            last.clone_from(&progress.rounds);
            match last[0].1 > 0 && last[2].1 > 0 {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        });
        let reports = outcome.unwrap().reports;
        let names: Vec<&str> = last.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["threads", "nobody", "boxed"]);
        for (name, rounds) in &last {
            let members = reports.iter().filter(|report| report.group == *name);
            assert!(members.map(|report| report.iterations).sum::<u64>() >= *rounds);
        }
    }
}
