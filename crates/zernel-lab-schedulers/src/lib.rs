//! Small sched_ext schedulers for the lab.
//!
//! [`Fault::None`] is a plain fair queue: one queue for all CPUs, ordered by virtual time. A comparison with it
//! shows how much of a scheduler's gain comes from one shared fair queue alone. Every other [`Fault`] is the same queue,
//! broken in one known way. The lab's tests show that its default assertions find each of them.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use libbpf_rs::{MapCore, MapFlags, Object, ObjectBuilder, OpenObject};
use thiserror::Error;

static FAIR_SCHEDULER_OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/fair.bpf.o"));

/// Time between two checks whether the scheduler still runs.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// `SCX_EXIT_UNREG`: the loader unloaded the scheduler. The kernel's reasons have larger numbers.
const EXIT_KIND_UNLOADED_BY_USER: u32 = 64;

/// What is wrong with the fair queue. The numbers are those of `enum fault` in C.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Fault {
    /// No fault: the fair queue by which schedulers are compared.
    None = 0,
    /// One task in four runs only when no other task wants to.
    Starve = 1,
    /// Tasks are queued for CPUs that their cpuset or affinity excludes.
    IgnoreCpusets = 2,
    /// The queue is not served any more, one second after the scheduler was loaded.
    Stall = 3,
    /// No task is ever queued.
    NeverDispatch = 4,
    /// The tasks of one cgroup are charged a quarter of the time that they use.
    LeakToCgroup = 5,
    /// One wake-up in 200 is forgotten.
    LoseWakeup = 6,
}

impl Fault {
    /// All faults; the fair queue without a fault comes first.
    pub const ALL: [Self; 7] = [
        Self::None,
        Self::Starve,
        Self::IgnoreCpusets,
        Self::Stall,
        Self::NeverDispatch,
        Self::LeakToCgroup,
        Self::LoseWakeup,
    ];

    /// The name of the scheduler with this fault on a command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "fair",
            Self::Starve => "broken-starve",
            Self::IgnoreCpusets => "broken-cpusets",
            Self::Stall => "broken-stall",
            Self::NeverDispatch => "broken-dispatch",
            Self::LeakToCgroup => "broken-leak",
            Self::LoseWakeup => "broken-wakeup",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for Fault {
    type Err = UnknownScheduler;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|fault| fault.name() == name);
        found.ok_or_else(|| UnknownScheduler {
            name: name.to_owned(),
        })
    }
}

/// The lab has no scheduler of this name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "there is no scheduler `{name}` in the lab; use one of {}",
    scheduler_names()
)]
pub struct UnknownScheduler {
    name: String,
}

fn scheduler_names() -> String {
    Fault::ALL.map(Fault::name).join(", ")
}

/// Why a scheduler was not loaded, or ended before the caller stopped it.
#[derive(Debug, Error)]
pub enum SchedulerError {
    /// The kernel refused the BPF object.
    #[error(
        "cannot load the scheduler: {0}; it needs root and a kernel with sched_ext (6.16 or newer)"
    )]
    Load(#[from] libbpf_rs::Error),
    /// The kernel ejected the scheduler.
    #[error("the kernel ejected the scheduler (exit kind {kind}): {message}")]
    Ejected {
        /// The kernel's `scx_exit_kind`, which is the reason as a number.
        kind: u32,
        /// The kernel's message about the reason.
        message: String,
    },
}

/// Loads the scheduler and keeps it loaded until `stop` is set.
///
/// # Errors
/// The kernel refuses or ejects the scheduler.
pub fn run_scheduler(fault: Fault, stop: &AtomicBool) -> Result<(), SchedulerError> {
    let mut open = ObjectBuilder::default().open_memory(FAIR_SCHEDULER_OBJECT)?;
    set_fault(&mut open, fault);
    let mut object = open.load()?;
    let mut maps = object.maps_mut();
    let mut ops = maps
        .find(|map| map.name() == "fair_ops")
        .expect("the object has the scheduler");
    let link = ops.attach_struct_ops()?;
    drop(maps);
    while !stop.load(Ordering::Relaxed) && read_ending(&object)?.kind == 0 {
        thread::sleep(POLL_INTERVAL);
    }
    drop(link);
    let ending = read_ending(&object)?;
    match ending.kind {
        0 | EXIT_KIND_UNLOADED_BY_USER => Ok(()),
        kind => Err(SchedulerError::Ejected {
            kind,
            message: ending.message,
        }),
    }
}

fn set_fault(open: &mut OpenObject, fault: Fault) {
    let mut maps = open.maps_mut();
    let mut section = maps
        .find(|map| map.name() == ".rodata.fault")
        .expect("the object has the section");
    let value = section
        .initial_value_mut()
        .expect("a section of constants has a value");
    value[..4].copy_from_slice(&(fault as u32).to_ne_bytes());
}

/// Why the scheduler ended, as the kernel passed it to the scheduler's last callback.
struct SchedulerEnding {
    /// The kernel's `scx_exit_kind`; 0 while the scheduler runs.
    kind: u32,
    message: String,
}

fn read_ending(object: &Object) -> Result<SchedulerEnding, SchedulerError> {
    let section = object.maps().find(|map| map.name() == ".data.ending");
    let section = section.expect("the object has the section");
    let value = section.lookup(&0_u32.to_ne_bytes(), MapFlags::ANY)?;
    let (kind, message) = value.unwrap_or_default().split_first_chunk().map_or_else(
        || (0, Vec::new()),
        |(kind, message): (&[u8; 4], &[u8])| (u32::from_ne_bytes(*kind), message.to_vec()),
    );
    let message = message.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(SchedulerEnding {
        kind,
        message: String::from_utf8_lossy(message).into_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_names_round_trip() {
        for fault in Fault::ALL {
            assert_eq!(fault.name().parse(), Ok(fault));
        }
        let error = "fare".parse::<Fault>().unwrap_err().to_string();
        assert!(
            error.contains("`fare`") && error.contains("broken-stall"),
            "{error}"
        );
    }

    #[test]
    fn fault_numbers_match_fair_bpf_c() {
        let source = include_str!("fair.bpf.c");
        let start = source.find("enum fault {").unwrap();
        let body = &source[start..start + source[start..].find('}').unwrap()];
        let names: Vec<&str> = body
            .lines()
            .map(str::trim)
            .filter_map(|line| line.strip_suffix(','))
            .collect();
        let expected = [
            "NO_FAULT",
            "STARVE",
            "IGNORE_CPUSETS",
            "STALL",
            "NEVER_DISPATCH",
            "LEAK_TO_CGROUP",
            "LOSE_WAKEUP",
        ];
        assert_eq!(names, expected);
        let numbers = Fault::ALL.map(|fault| fault as u32);
        assert_eq!(numbers, [0, 1, 2, 3, 4, 5, 6]);
    }
}
