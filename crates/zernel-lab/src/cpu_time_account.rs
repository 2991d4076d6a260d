//! An account of the CPU time of a run: which time each cgroup used, which the kernel, and which was idle. The parts
//! are measured independently of each other, so that a sum that is not the number of CPUs shows a mistake.
//!
//! A part is a cgroup, whose `cpu.stat` also counts processes that have exited. Kernel threads and processes outside of
//! the parts are counted by their own `schedstat`. Idle time comes from `/proc/stat`, in units of 10 ms.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Largest difference that is accepted between the sum of an account and the number of CPUs, for four CPUs.
pub const ACCOUNT_TOLERANCE_CPUS: f64 = 0.02;

/// A CPU that misses ticks for this long counts as stuck. Rounding loses two ticks of 10 ms at most.
pub const MIN_STUCK_TIME: Duration = Duration::from_millis(100);

/// A reading of all CPU time that takes longer than this is repeated, because its first and its last value would be of
/// different moments.
const MAX_CPU_TIME_READING_DURATION: Duration = Duration::from_millis(2);
const CPU_TIME_READING_ATTEMPTS: usize = 10;

/// Unit of the times in `/proc/stat`.
const NANOSECONDS_PER_TICK: u64 = 10_000_000;
const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// All CPU time that was used up to one moment, by part.
#[derive(Debug, Clone)]
pub struct CpuTimeReading {
    taken_at: Instant,
    cpus: Vec<CpuStat>,
    cgroups: Vec<CgroupReading>,
    kernel_ns: u64,
    other_processes_ns: u64,
}

/// CPU time that one cgroup has used so far.
#[derive(Debug, Clone)]
struct CgroupReading {
    name: String,
    cgroup: PathBuf,
    used_ns: u64,
}

impl CpuTimeReading {
    /// Reads the CPU time of some cgroups, given by name and by path below the cgroup root, and the CPU time of
    /// everything else.
    ///
    /// # Errors
    /// A cgroup or /proc cannot be read.
    pub fn read_with_retries(cgroups: &[(String, PathBuf)]) -> io::Result<Self> {
        let mut best: Option<(Duration, Self)> = None;
        for _ in 0..CPU_TIME_READING_ATTEMPTS {
            let start = Instant::now();
            let reading = Self::read_once(cgroups)?;
            let duration = start.elapsed();
            if best
                .as_ref()
                .is_none_or(|(shortest, _)| duration < *shortest)
            {
                best = Some((duration, reading));
            }
            if duration < MAX_CPU_TIME_READING_DURATION {
                break;
            }
        }
        let (_, reading) = best.expect("there is at least one attempt");
        Ok(reading)
    }

    /// When this reading was taken.
    pub(crate) fn taken_at(&self) -> Instant {
        self.taken_at
    }

    /// Reads all CPU time once, however long that takes.
    pub(crate) fn read_once(cgroups: &[(String, PathBuf)]) -> io::Result<Self> {
        let mut readings = Vec::new();
        for (name, cgroup) in cgroups {
            let path = Path::new(CGROUP_ROOT).join(cgroup).join("cpu.stat");
            readings.push(CgroupReading {
                name: name.clone(),
                cgroup: cgroup.clone(),
                used_ns: cgroup_cpu_ns(&read_text_file(&path)?)?,
            });
        }
        let taken_at = Instant::now();
        let cpus = parse_proc_stat(&read_text_file(Path::new("/proc/stat"))?)?;
        let (kernel_ns, other_processes_ns) = cpu_ns_outside_of_cgroups(cgroups)?;
        Ok(Self {
            taken_at,
            cpus,
            cgroups: readings,
            kernel_ns,
            other_processes_ns,
        })
    }
}

/// The CPU time that was used between two readings, in CPUs: 1.0 is one CPU all the time.
#[derive(Debug, Clone, PartialEq)]
pub struct CpuTimeAccount {
    /// Time between the two readings.
    pub wall_time: Duration,
    /// The number of CPUs, which all other figures must add up to.
    pub cpu_count: usize,
    /// CPUs that each cgroup used, by the name of the cgroup.
    pub cgroups: Vec<(String, f64)>,
    /// CPUs that kernel threads used.
    pub kernel_cpus: f64,
    /// CPUs that processes outside of the cgroups used. The process that reads the times is among them; processes that
    /// have exited are not.
    pub other_processes_cpus: f64,
    /// CPUs that were idle.
    pub idle_cpus: f64,
    /// CPUs that were switched off, in proportion to the time.
    pub offline_cpus: f64,
    /// CPUs that missed their ticks for longer than [`MIN_STUCK_TIME`], with the time that they missed. They had
    /// interrupts disabled, or the host did not execute them.
    pub stuck_cpus: Vec<(usize, Duration)>,
}

impl CpuTimeAccount {
    /// The account of the time between two readings. A cgroup that is only in the second reading counts as new.
    #[must_use]
    pub fn between_readings(first: &CpuTimeReading, second: &CpuTimeReading) -> Self {
        let wall_time = second.taken_at.saturating_duration_since(first.taken_at);
        let wall_time_ns = wall_time.as_nanos().max(1) as f64;
        let cpus_used =
            |before: u64, after: u64| after.saturating_sub(before) as f64 / wall_time_ns;
        let used_before = |reading: &CgroupReading| {
            let mut cgroups = first.cgroups.iter();
            let same_cgroup = cgroups.find(|earlier| earlier.cgroup == reading.cgroup);
            same_cgroup.map_or(0, |earlier| earlier.used_ns)
        };
        let cgroup_and_cpus = |reading: &CgroupReading| {
            let used_cpus = cpus_used(used_before(reading), reading.used_ns);
            (reading.name.clone(), used_cpus)
        };
        Self {
            wall_time,
            cpu_count: first.cpus.len().max(second.cpus.len()),
            cgroups: second.cgroups.iter().map(cgroup_and_cpus).collect(),
            kernel_cpus: cpus_used(first.kernel_ns, second.kernel_ns),
            other_processes_cpus: cpus_used(first.other_processes_ns, second.other_processes_ns),
            idle_cpus: cpus_in_both_readings(first, second)
                .map(|(before, after)| cpus_used(before.idle_ns, after.idle_ns))
                .sum(),
            offline_cpus: 0.0,
            stuck_cpus: cpus_in_both_readings(first, second)
                .filter_map(|(before, after)| cpu_and_missed_tick_time(before, after, wall_time))
                .collect(),
        }
    }

    /// The same account, with the time for which CPUs were switched off.
    #[must_use]
    pub fn with_offline_time(mut self, offline: &[(usize, Duration)]) -> Self {
        let total_offline: Duration = offline.iter().map(|(_, time)| *time).sum();
        self.offline_cpus =
            total_offline.as_secs_f64() / self.wall_time.as_secs_f64().max(f64::MIN_POSITIVE);
        for (cpu, missed) in &mut self.stuck_cpus {
            let own_periods = offline.iter().filter(|(number, _)| number == cpu);
            *missed = missed.saturating_sub(own_periods.map(|(_, time)| *time).sum());
        }
        self.stuck_cpus
            .retain(|(_, missed)| *missed > MIN_STUCK_TIME);
        self
    }

    /// The sum of all parts of the account, in CPUs.
    #[must_use]
    pub fn sum_cpus(&self) -> f64 {
        let cgroups: f64 = self.cgroups.iter().map(|(_, cpus)| cpus).sum();
        cgroups + self.kernel_cpus + self.other_processes_cpus + self.idle_cpus + self.offline_cpus
    }

    /// Whether the parts add up to the number of CPUs, within [`ACCOUNT_TOLERANCE_CPUS`] per four CPUs and the units of
    /// `/proc/stat`.
    #[must_use]
    pub fn adds_up(&self) -> bool {
        let tolerance = ACCOUNT_TOLERANCE_CPUS * (self.cpu_count as f64 / 4.0).max(1.0);
        (self.sum_cpus() - self.cpu_count as f64).abs() <= tolerance + self.idle_error_cpus()
    }

    /// Largest error of the idle time in CPUs: idle time is rounded to 10 ms on each CPU. CPUs that are always busy
    /// have no such error.
    fn idle_error_cpus(&self) -> f64 {
        let unit_ns = NANOSECONDS_PER_TICK as f64;
        let largest = self.cpu_count as f64 * unit_ns / self.wall_time.as_nanos().max(1) as f64;
        largest.min(self.idle_cpus)
    }
}

impl fmt::Display for CpuTimeAccount {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, cpus) in &self.cgroups {
            write!(formatter, "{name} {cpus:.3} + ")?;
        }
        write!(
            formatter,
            "kernel {:.3} + other {:.3} + idle {:.3} = {:.3} of {} CPUs in {:.3} s",
            self.kernel_cpus,
            self.other_processes_cpus,
            self.idle_cpus,
            self.sum_cpus(),
            self.cpu_count,
            self.wall_time.as_secs_f64()
        )?;
        if !self.adds_up() {
            write!(formatter, ": does not add up")?;
        }
        for (cpu, missed) in &self.stuck_cpus {
            let seconds = missed.as_secs_f64();
            write!(formatter, "; CPU {cpu} missed {seconds:.2} s of ticks")?;
        }
        Ok(())
    }
}

/// The CPUs that occur in both readings.
fn cpus_in_both_readings<'a>(
    first: &'a CpuTimeReading,
    second: &'a CpuTimeReading,
) -> impl Iterator<Item = (&'a CpuStat, &'a CpuStat)> {
    first.cpus.iter().filter_map(|before| {
        let mut later = second.cpus.iter();
        let after = later.find(|after| after.cpu == before.cpu)?;
        Some((before, after))
    })
}

/// The time for which a busy CPU missed its ticks. A CPU that idles now and then cannot be judged: it stops its tick
/// while it idles, and its work until the next tick is not counted.
fn cpu_and_missed_tick_time(
    before: &CpuStat,
    after: &CpuStat,
    wall_time: Duration,
) -> Option<(usize, Duration)> {
    let idle_ns = after.idle_ns.saturating_sub(before.idle_ns);
    if idle_ns > NANOSECONDS_PER_TICK {
        return None;
    }
    let accounted_ns = after.accounted_ns.saturating_sub(before.accounted_ns);
    let missed = wall_time.saturating_sub(Duration::from_nanos(accounted_ns));
    (missed > MIN_STUCK_TIME).then_some((before.cpu, missed))
}

fn read_text_file(path: &Path) -> io::Result<String> {
    let with_path =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    fs::read_to_string(path).map_err(with_path)
}

fn malformed_file(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("{what} has another format than expected"),
    )
}

/// CPU time of a cgroup in nanoseconds, from its `cpu.stat`, which counts microseconds.
fn cgroup_cpu_ns(text: &str) -> io::Result<u64> {
    let usage = text
        .lines()
        .find_map(|line| line.strip_prefix("usage_usec "));
    let usage: Option<u64> = usage.and_then(|value| value.trim().parse().ok());
    usage
        .map(|microseconds| microseconds.saturating_mul(1000))
        .ok_or_else(|| malformed_file("cpu.stat"))
}

/// Times of one CPU, from `/proc/stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CpuStat {
    cpu: usize,
    /// Idle time of the CPU and its I/O wait.
    idle_ns: u64,
    /// All time of the CPU that the kernel accounted, idle time included.
    accounted_ns: u64,
}

/// The times of all online CPUs in `/proc/stat`.
fn parse_proc_stat(text: &str) -> io::Result<Vec<CpuStat>> {
    let lines = text.lines().filter_map(|line| line.strip_prefix("cpu"));
    let cpus = lines.filter(|line| !line.starts_with(' '));
    let stats: Option<Vec<CpuStat>> = cpus.map(parse_cpu_line).collect();
    stats
        .filter(|stats| !stats.is_empty())
        .ok_or_else(|| malformed_file("/proc/stat"))
}

/// Parses a line without its `cpu`: number, user, nice, system, idle, iowait, irq, softirq, steal. The fields after
/// these are parts of earlier ones.
fn parse_cpu_line(line: &str) -> Option<CpuStat> {
    let mut fields = line.split_whitespace();
    let cpu = fields.next()?.parse().ok()?;
    let ticks: Vec<u64> = fields
        .take(8)
        .map(|field| field.parse().ok())
        .collect::<Option<_>>()?;
    let [_, _, _, idle, iowait, ..] = ticks[..] else {
        return None;
    };
    let nanoseconds = |ticks: u64| ticks.saturating_mul(NANOSECONDS_PER_TICK);
    Some(CpuStat {
        cpu,
        idle_ns: nanoseconds(idle.saturating_add(iowait)),
        accounted_ns: nanoseconds(ticks.iter().copied().fold(0, u64::saturating_add)),
    })
}

/// CPU time of all kernel threads, and of all processes outside of some cgroups.
fn cpu_ns_outside_of_cgroups(cgroups: &[(String, PathBuf)]) -> io::Result<(u64, u64)> {
    let (mut kernel_ns, mut other_processes_ns) = (0_u64, 0_u64);
    for process in fs::read_dir("/proc")?.flatten() {
        let folder = process.path();
        let is_pid = process
            .file_name()
            .to_string_lossy()
            .bytes()
            .all(|byte| byte.is_ascii_digit());
        if !is_pid {
            continue;
        }
        // A process that exits during the reading cannot be read, so the account lacks its time.
        let (Ok(stat), Ok(cgroup)) = (
            fs::read_to_string(folder.join("stat")),
            fs::read_to_string(folder.join("cgroup")),
        ) else {
            continue;
        };
        let used_ns = threads_cpu_ns(&folder);
        if is_kernel_thread(&stat) {
            kernel_ns = kernel_ns.saturating_add(used_ns);
        } else if !cgroups.iter().any(|(_, part)| is_in_cgroup(&cgroup, part)) {
            other_processes_ns = other_processes_ns.saturating_add(used_ns);
        }
    }
    Ok((kernel_ns, other_processes_ns))
}

/// CPU time of those threads of a process that have not exited.
fn threads_cpu_ns(process: &Path) -> u64 {
    let threads = fs::read_dir(process.join("task"))
        .into_iter()
        .flatten()
        .flatten();
    let used = threads.filter_map(|thread| {
        let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    });
    used.fold(0, u64::saturating_add)
}

/// Whether a text from `/proc/PID/stat` is that of a kernel thread.
fn is_kernel_thread(proc_stat: &str) -> bool {
    const PF_KTHREAD: u64 = 0x0020_0000;
    // The name of the task is in parentheses and may contain anything; the flags are the seventh field after it.
    let fields = proc_stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let flags: Option<u64> = fields
        .split_whitespace()
        .nth(6)
        .and_then(|flags| flags.parse().ok());
    flags.is_some_and(|flags| flags & PF_KTHREAD != 0)
}

/// Whether a text from `/proc/PID/cgroup` names a cgroup or one below it.
fn is_in_cgroup(proc_cgroup: &str, cgroup: &Path) -> bool {
    let process_cgroup = proc_cgroup
        .lines()
        .find_map(|line| line.strip_prefix("0::/"));
    process_cgroup.is_some_and(|process_cgroup| Path::new(process_cgroup).starts_with(cgroup))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading_with(taken_at: Instant, training_ns: u64, idle_ns: u64) -> CpuTimeReading {
        CpuTimeReading {
            taken_at,
            cpus: (0..4)
                .map(|cpu| CpuStat {
                    cpu,
                    idle_ns: idle_ns / 4,
                    accounted_ns: (idle_ns + training_ns) / 4,
                })
                .collect(),
            cgroups: vec![CgroupReading {
                name: "training".to_owned(),
                cgroup: "training".into(),
                used_ns: training_ns,
            }],
            kernel_ns: 0,
            other_processes_ns: 0,
        }
    }

    #[test]
    fn cpu_that_misses_ticks_is_stuck() {
        let start = Instant::now();
        let first = reading_with(start, 0, 0);
        let mut second = reading_with(start + Duration::from_secs(2), 8_000_000_000, 0);
        assert_eq!(
            CpuTimeAccount::between_readings(&first, &second).stuck_cpus,
            []
        );
        second.cpus[2].accounted_ns = 400_000_000;
        let account = CpuTimeAccount::between_readings(&first, &second);
        assert_eq!(account.stuck_cpus, [(2, Duration::from_millis(1600))]);
        let text = account.to_string();
        assert!(text.ends_with("; CPU 2 missed 1.60 s of ticks"), "{text}");
        second.cpus[2].idle_ns = 300_000_000;
        assert_eq!(
            CpuTimeAccount::between_readings(&first, &second).stuck_cpus,
            [],
            "it idles"
        );
    }

    #[test]
    fn offline_cpu_is_not_stuck() {
        let start = Instant::now();
        let first = reading_with(start, 0, 0);
        let mut second = reading_with(start + Duration::from_secs(2), 4_000_000_000, 4_000_000_000);
        second.cpus[3].idle_ns = 0;
        for (cpu, seconds) in [2, 2, 2, 1].into_iter().enumerate() {
            second.cpus[cpu].accounted_ns = seconds * 1_000_000_000;
        }
        let off = [(3, Duration::from_secs(1))];
        let account = CpuTimeAccount::between_readings(&first, &second).with_offline_time(&off);
        assert_eq!((account.offline_cpus, account.stuck_cpus.len()), (0.5, 0));
        assert!(account.adds_up(), "{account}");
        let short = [(3, Duration::from_millis(500))];
        let account = CpuTimeAccount::between_readings(&first, &second).with_offline_time(&short);
        assert_eq!(account.stuck_cpus, [(3, Duration::from_millis(500))]);
        assert!(!account.adds_up(), "{account}");
    }

    #[test]
    fn new_cgroup_is_counted_from_zero() {
        let start = Instant::now();
        let first = reading_with(start, 1_000_000_000, 0);
        let mut second = reading_with(start + Duration::from_secs(2), 2_000_000_000, 0);
        second.cgroups.push(CgroupReading {
            name: "late".to_owned(),
            cgroup: "late".into(),
            used_ns: 4_000_000_000,
        });
        let cgroups = CpuTimeAccount::between_readings(&first, &second).cgroups;
        assert_eq!(
            cgroups,
            [("training".to_owned(), 0.5), ("late".to_owned(), 2.0)]
        );
    }

    #[test]
    fn account_with_missing_time_does_not_add_up() {
        let start = Instant::now();
        let first = reading_with(start, 500, 700);
        let end = start + Duration::from_secs(2);
        let account = |training_ms: u64, idle_ms: u64| {
            CpuTimeAccount::between_readings(
                &first,
                &reading_with(
                    end,
                    500 + training_ms * 1_000_000,
                    700 + idle_ms * 1_000_000,
                ),
            )
        };
        assert!(account(8_000, 0).adds_up());
        assert!(account(8_030, 0).adds_up());
        assert!(!account(8_050, 0).adds_up());
        assert!(!account(7_950, 0).adds_up());
        // Idle time is exact to 10 ms for each CPU.
        assert!(account(3_000, 4_950).adds_up());
        assert!(!account(3_000, 4_910).adds_up());
        let text = account(3_000, 4_000).to_string();
        let expected = "training 1.500 + kernel 0.000 + other 0.000 + idle 2.000 = 3.500 of 4 CPUs in 2.000 s: does not add up";
        assert!(text.starts_with(expected), "{text}");
    }

    #[test]
    fn proc_stat_and_cpu_stat_are_parsed() {
        assert_eq!(
            cgroup_cpu_ns("usage_usec 1500\nuser_usec 1000\n").unwrap(),
            1_500_000
        );
        assert!(cgroup_cpu_ns("nothing").is_err());
        let stat = "cpu  9 9 9 9 9\ncpu0 1 2 3 40 5 6 7 8 9 9\ncpu3 1 2 3 10 0 0 0 0\nintr 1\n";
        let stats = parse_proc_stat(stat).unwrap();
        let cpu = |cpu, idle, accounted| CpuStat {
            cpu,
            idle_ns: idle * NANOSECONDS_PER_TICK,
            accounted_ns: accounted * NANOSECONDS_PER_TICK,
        };
        assert_eq!(stats, [cpu(0, 45, 72), cpu(3, 10, 16)]);
        assert!(parse_proc_stat("cpu0 1 2 x y\n").is_err() && parse_proc_stat("").is_err());
        assert!(parse_proc_stat("cpu0 1 2 3\n").is_err());
        assert!(is_kernel_thread("2 (kthreadd) S 0 0 0 0 -1 2129984 0"));
        assert!(!is_kernel_thread("7 (a) b) 2) R 0 0 0 0 -1 4194304 0"));
        assert!(
            is_in_cgroup("0::/a/b\n", Path::new("a"))
                && is_in_cgroup("1:cpu:/x\n0::/a\n", Path::new("a"))
        );
        assert!(
            !is_in_cgroup("0::/ab\n", Path::new("a")) && !is_in_cgroup("0::/\n", Path::new("a"))
        );
    }

    #[test]
    fn cpu_time_of_this_machine_can_be_read() {
        let reading = CpuTimeReading::read_with_retries(&[]).unwrap();
        assert!(!reading.cpus.is_empty() && reading.other_processes_ns > 0);
        assert!(
            CpuTimeReading::read_with_retries(&[("a".to_owned(), "no/such/cgroup".into())])
                .is_err()
        );
    }
}
