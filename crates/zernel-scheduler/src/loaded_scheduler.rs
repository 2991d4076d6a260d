//! The loaded scheduler: what it has counted, and why it ended.

use std::collections::BTreeMap;

use libbpf_rs::{MapCore, MapFlags};
use rustix::time::{ClockId, clock_gettime};
use zernel_model::for_each_sched_counter;
use zernel_model::scheduler::{ClassStatistics, SchedCounters};
use zernel_phase::class::TaskClass;
use zerocopy::{FromBytes, Immutable, KnownLayout};

use crate::scheduler::skeleton::{MainSkel, types};

/// `SCX_EXIT_UNREG`: the loader unloaded the scheduler. The kernel's reasons have larger numbers.
const UNLOADED_BY_USER: u32 = 64;
/// As in `intf.h`.
const WAIT_BUCKETS: usize = 28;

/// The loaded scheduler.
pub struct LoadedScheduler<'a> {
    pub(crate) skel: &'a MainSkel<'a>,
    since_ns: u64,
}

/// `struct class_counters` of `intf.h`.
#[derive(Debug, Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawClassCounters {
    runs: u64,
    run_ns: u64,
    wakeups: u64,
    wait_ns: u64,
    wait_buckets: [u64; WAIT_BUCKETS],
}

const _: () = assert!(size_of::<RawClassCounters>() == size_of::<types::class_counters>());

impl<'a> LoadedScheduler<'a> {
    pub(crate) fn new(skel: &'a MainSkel<'a>) -> Self {
        Self {
            skel,
            since_ns: monotonic_ns(),
        }
    }

    /// When it was loaded, by the monotonic clock.
    #[must_use]
    pub fn since_ns(&self) -> u64 {
        self.since_ns
    }

    /// How often it decided what.
    #[must_use]
    pub fn counters(&self) -> SchedCounters {
        macro_rules! convert {
            ($($name:ident $meaning:literal,)*) => {{
                // Without `..`, so that a counter that is missing in one of the two lists does not compile.
                let types::counters { $($name),* } = self.bss().counters;
                SchedCounters { $($name),* }
            }};
        }
        for_each_sched_counter!(convert)
    }

    /// What the threads of each class did.
    #[must_use]
    pub fn classes(&self) -> BTreeMap<TaskClass, ClassStatistics> {
        let classes = TaskClass::ALL.iter();
        classes.map(|class| (*class, self.class(*class))).collect()
    }

    fn class(&self, class: TaskClass) -> ClassStatistics {
        let key = (class as u32).to_ne_bytes();
        let map = &self.skel.maps.class_counters;
        let values = map.lookup_percpu(&key, MapFlags::ANY).ok().flatten();
        let mut sum = ClassStatistics::default();
        for value in values.unwrap_or_default() {
            if let Ok((counted, _)) = RawClassCounters::read_from_prefix(&value) {
                sum.add(&counted.into());
            }
        }
        sum
    }

    fn bss(&self) -> &types::bss {
        let data = self.skel.maps.bss_data.as_deref();
        data.expect("the object has data")
    }

    fn raw_ending(&self) -> types::ending {
        // The kernel writes it meanwhile.
        // SAFETY: the pointer is valid for a read of this plain type as long as the skeleton lives.
        unsafe { std::ptr::read_volatile(&raw const self.bss().ending) }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.raw_ending().kind != 0
    }

    /// Why the kernel ejected it; `None` if it runs or was unloaded.
    pub(crate) fn ending(&self) -> Option<String> {
        let ending = self.raw_ending();
        (!matches!(ending.kind, 0 | UNLOADED_BY_USER)).then(|| describe(&ending))
    }
}

impl From<RawClassCounters> for ClassStatistics {
    fn from(raw: RawClassCounters) -> Self {
        Self {
            runs: raw.runs,
            run_ns: raw.run_ns,
            wakeups: raw.wakeups,
            wait_ns: raw.wait_ns,
            wait_buckets: raw.wait_buckets.to_vec(),
        }
    }
}

fn describe(ending: &types::ending) -> String {
    let reason = text(&ending.reason);
    match text(&ending.message) {
        message if message.is_empty() => reason,
        message => format!("{reason}: {message}"),
    }
}

fn text(bytes: &[i8]) -> String {
    let bytes = bytes.iter().map(|byte| byte.cast_unsigned());
    let bytes: Vec<u8> = bytes.take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The clock that the scheduler's BPF half reads.
pub(crate) fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}
