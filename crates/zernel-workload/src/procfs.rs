//! Reads a worker's CPU time, run-queue delay and context switches from `/proc`.

use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

use libc::pid_t;
use rustix::fs::{CWD, Mode, OFlags, openat};

use crate::shared_state::KernelCounters;

/// The time that the calling thread has waited for a CPU; `None` if the kernel has no schedstat. Fork safe.
pub(crate) fn own_run_delay_ns() -> Option<u64> {
    // The main thread's numbers are read through `/proc/self`. For this shorter path the kernel creates half as many
    // entries of /proc, which matters with thousands of workers.
    let path = match is_main_thread() {
        true => c"/proc/self/schedstat",
        false => c"/proc/thread-self/schedstat",
    };
    let file = openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut text = [0; 96];
    let length = rustix::io::read(&file, &mut text).ok()?;
    parse_schedstat(&text[..length]).map(|(_, run_delay)| run_delay)
}

fn is_main_thread() -> bool {
    rustix::thread::gettid() == rustix::process::getpid()
}

/// The first two numbers of a schedstat file: nanoseconds on a CPU, and nanoseconds of waiting for a CPU. Fork safe.
fn parse_schedstat(text: &[u8]) -> Option<(u64, u64)> {
    let mut numbers = text.split(u8::is_ascii_whitespace).map(parse_number);
    Some((numbers.next()??, numbers.next()??))
}

fn parse_number(digits: &[u8]) -> Option<u64> {
    (!digits.is_empty()).then_some(())?;
    digits.iter().try_fold(0u64, |number, digit| {
        let digit = digit.is_ascii_digit().then(|| digit - b'0')?;
        number.checked_mul(10)?.checked_add(u64::from(digit))
    })
}

/// Reads the kernel's counters of a worker that cannot refresh them itself: the worker is starved, stuck, or dead and
/// not yet reaped.
pub(crate) fn read_counters(process: pid_t, thread: pid_t, counters: &KernelCounters) {
    let read = |file: &str| {
        std::fs::read_to_string(format!("/proc/{process}/task/{thread}/{file}")).unwrap_or_default()
    };
    if let Some((cpu_ns, run_delay)) = parse_schedstat(read("schedstat").as_bytes()) {
        counters.cpu_ns.store(cpu_ns, Relaxed);
        counters.run_delay_plus_one.store(run_delay + 1, Relaxed);
    }
    for line in read("status").lines() {
        let value = |line: &str| parse_number(line.trim().as_bytes());
        if let Some(switches) = line
            .strip_prefix("voluntary_ctxt_switches:")
            .and_then(value)
        {
            counters.voluntary_switches.store(switches, Relaxed);
        } else if let Some(switches) = line
            .strip_prefix("nonvoluntary_ctxt_switches:")
            .and_then(value)
        {
            counters.involuntary_switches.store(switches, Relaxed);
        }
    }
}

/// Number of processes that the OOM killer has killed on this machine since boot.
pub(crate) fn system_oom_kills() -> u64 {
    oom_kills_in(Path::new("/proc/vmstat")).unwrap_or(0)
}

/// Number of processes that the OOM killer has killed in the cgroup that accounts for the memory of `process`, which is
/// dead but not reaped. Cgroup version 2 only: in version 1 a dead process belongs to the root cgroup.
pub(crate) fn cgroup_oom_kills(process: pid_t) -> Option<u64> {
    let membership = std::fs::read_to_string(format!("/proc/{process}/cgroup")).ok()?;
    cgroup_oom_kills_below(Path::new("/sys/fs/cgroup"), &membership)
}

fn cgroup_oom_kills_below(mount: &Path, membership: &str) -> Option<u64> {
    let cgroup = membership
        .lines()
        .find_map(|line| line.strip_prefix("0::/"))?;
    mount
        .join(cgroup)
        .ancestors()
        .take_while(|folder| folder.starts_with(mount))
        .find_map(|folder| oom_kills_in(&folder.join("memory.events")))
}

fn oom_kills_in(file: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let count = text
        .lines()
        .find_map(|line| line.strip_prefix("oom_kill "))?;
    parse_number(count.trim().as_bytes())
}

impl KernelCounters {
    /// Stores the current counters as those of the worker's first run. Reports count from these.
    pub(crate) fn store_values_at_first_run(&self) {
        let now = [
            &self.cpu_ns,
            &self.run_delay_plus_one,
            &self.voluntary_switches,
            &self.involuntary_switches,
        ];
        for (kept, counter) in self.values_at_first_run.iter().zip(now) {
            kept.store(counter.load(Relaxed), Relaxed);
        }
    }

    /// CPU time since the worker's first run.
    pub(crate) fn cpu_ns(&self) -> u64 {
        self.increase_since_first_run(0, self.cpu_ns.load(Relaxed))
    }

    /// Time of waiting for a CPU since the worker's first run; `None` if the kernel does not count it.
    pub(crate) fn run_delay_ns(&self) -> Option<u64> {
        let run_delay_plus_one = self.run_delay_plus_one.load(Relaxed);
        (run_delay_plus_one > 0).then(|| self.increase_since_first_run(1, run_delay_plus_one))
    }

    /// Voluntary and involuntary context switches since the worker's first run.
    pub(crate) fn context_switches(&self) -> (u64, u64) {
        let voluntary = self.increase_since_first_run(2, self.voluntary_switches.load(Relaxed));
        (
            voluntary,
            self.increase_since_first_run(3, self.involuntary_switches.load(Relaxed)),
        )
    }

    fn increase_since_first_run(&self, counter: usize, now: u64) -> u64 {
        now.saturating_sub(self.values_at_first_run[counter].load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oom_kills_are_read_from_nearest_memory_cgroup() {
        let mount = tempfile::tempdir().unwrap();
        let mount = mount.path();
        std::fs::create_dir_all(mount.join("job/part")).unwrap();
        let kills = || cgroup_oom_kills_below(mount, "4:memory:/\n0::/job/part\n");
        assert_eq!(kills(), None);
        std::fs::write(mount.join("job/memory.events"), "oom 4\noom_kill 3\n").unwrap();
        assert_eq!(kills(), Some(3));
        std::fs::write(mount.join("job/part/memory.events"), "oom 0\noom_kill 0\n").unwrap();
        assert_eq!(kills(), Some(0));
        assert_eq!(cgroup_oom_kills_below(mount, "4:memory:/job\n"), None);
    }

    #[test]
    fn schedstat_is_parsed_or_refused() {
        assert_eq!(parse_schedstat(b"73669 55863 2\n"), Some((73669, 55863)));
        assert_eq!(parse_schedstat(b"12"), None);
        assert_eq!(parse_schedstat(b""), None);
        assert_eq!(parse_schedstat(b"x 1 2"), None);
        assert_eq!(parse_schedstat(b"99999999999999999999 1 2"), None);
    }
}
