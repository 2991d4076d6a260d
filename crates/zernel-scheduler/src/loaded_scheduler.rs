//! The loaded scheduler: what it has counted, and why it ended.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use libbpf_rs::{MapCore, MapFlags, ProgramInput};
use rustix::time::{ClockId, clock_gettime};
use zernel_model::for_each_sched_counter;
use zernel_model::scheduler::{ClassStatistics, SchedCounters, TenantStatistics};
use zernel_phase::class::TaskClass;
use zerocopy::{FromBytes, Immutable, KnownLayout};

use crate::scheduler::skeleton::{MainSkel, types};
use crate::scheduler::{SchedError, SchedSettings};
use crate::task_state_pins::is_observer_alive;
use crate::tenants::TenantReader;

/// `SCX_EXIT_UNREG`: this process unloaded the scheduler.
const EXIT_KIND_UNLOADED_HERE: u32 = 64;
/// `SCX_EXIT_ERROR`: the first kind that is an error.
const EXIT_KIND_FIRST_ERROR: u32 = 1024;
/// Number of buckets, as in `intf.h`. The assertion on the size of [`RawClassCounters`] compares them.
const WAIT_BUCKET_COUNT: usize = 28;

/// The loaded scheduler.
pub struct LoadedScheduler<'a> {
    pub(crate) skel: &'a MainSkel<'a>,
    loaded_since_ns: u64,
    tenant_reader: RefCell<TenantReader>,
}

/// `struct class_counters` of `intf.h`.
#[derive(Debug, Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawClassCounters {
    runs: u64,
    run_ns: u64,
    wakeups: u64,
    wait_ns: u64,
    wait_buckets: [u64; WAIT_BUCKET_COUNT],
}

const _: () = assert!(size_of::<RawClassCounters>() == size_of::<types::class_counters>());

impl<'a> LoadedScheduler<'a> {
    pub(crate) fn new(skel: &'a MainSkel<'a>) -> Self {
        Self {
            skel,
            loaded_since_ns: monotonic_ns(),
            tenant_reader: RefCell::default(),
        }
    }

    /// When the scheduler was loaded, by the monotonic clock.
    #[must_use]
    pub fn loaded_since_ns(&self) -> u64 {
        self.loaded_since_ns
    }

    /// The slice of the loaded scheduler.
    #[must_use]
    pub fn slice(&self) -> Duration {
        Duration::from_nanos(self.bss().settings.slice_ns)
    }

    /// The percentage of their fair share that tasks without privilege keep.
    #[must_use]
    pub fn guarantee_percent(&self) -> u32 {
        self.bss().settings.guarantee_percent
    }

    /// Whether threads that spin until the GPU is done lend their CPU.
    #[must_use]
    pub fn lends(&self) -> bool {
        self.bss().settings.lends != 0
    }

    /// Whether an observer writes the task states that it reads.
    #[must_use]
    pub fn is_observer_alive(&self) -> bool {
        is_observer_alive(&self.skel.maps.zernel_heartbeats)
    }

    /// How often the scheduler made each kind of decision.
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

    /// The CPU time of the guarantee that others have not got yet. 0 if the kernel does not answer.
    #[must_use]
    pub fn unpaid_guarantee_time(&self) -> Duration {
        let test_run = self
            .skel
            .progs
            .read_promised_time_us
            .test_run(ProgramInput::default());
        Duration::from_micros(test_run.map_or(0, |output| output.return_value.into()))
    }

    /// Time that tasks ran on CPUs that others lent them.
    #[must_use]
    pub fn lent_time(&self) -> Duration {
        Duration::from_nanos(self.bss().lent_ns)
    }

    /// What the threads of each class did.
    #[must_use]
    pub fn class_statistics(&self) -> BTreeMap<TaskClass, ClassStatistics> {
        let classes = TaskClass::ALL.iter();
        classes
            .map(|class| (*class, self.statistics_of_class(*class)))
            .collect()
    }

    /// The tenants that took most time. None if no task can be privileged.
    #[must_use]
    pub fn tenant_statistics(&self) -> Vec<TenantStatistics> {
        self.tenant_reader.borrow_mut().read_tenants(self.skel)
    }

    fn statistics_of_class(&self, class: TaskClass) -> ClassStatistics {
        let key = (class as u32).to_ne_bytes();
        let map = &self.skel.maps.class_counters;
        let values = map.lookup_percpu(&key, MapFlags::ANY).ok().flatten();
        let mut sum = ClassStatistics::default();
        for value in values.unwrap_or_default() {
            if let Ok((class_counters, _)) = RawClassCounters::read_from_prefix(&value) {
                sum.add_from_cpu(&class_counters.into());
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

    /// What the scheduler counted, or why it ended early.
    pub(crate) fn counters_or_error(&self) -> Result<SchedCounters, SchedError> {
        let ending = self.raw_ending();
        match ending.kind {
            0 | EXIT_KIND_UNLOADED_HERE => Ok(self.counters()),
            EXIT_KIND_FIRST_ERROR.. => Err(SchedError::Ejected(describe_ending(&ending))),
            _ => Err(SchedError::Unloaded(describe_ending(&ending))),
        }
    }

    /// Changes slice, privilege, guarantee and lending. Nobody may become privileged unless the settings said so at the start.
    ///
    /// # Errors
    /// The kernel refused it.
    pub fn set_policy(&self, settings: &SchedSettings) -> Result<(), SchedError> {
        let (privilege, id) = settings.privilege.kind_and_id();
        let u64_fields = [settings.slice_ns(), id];
        let lends = u32::from(settings.lends);
        let u32_fields = [privilege.0, settings.guarantee_percent, lends];
        let u64_fields = u64_fields.iter().flat_map(|word| word.to_ne_bytes());
        let u32_fields = u32_fields.iter().flat_map(|word| word.to_ne_bytes());
        let mut policy: Vec<u8> = u64_fields.chain(u32_fields).collect();
        let input = ProgramInput {
            context_in: Some(&mut policy),
            ..ProgramInput::default()
        };
        self.skel.progs.set_policy.test_run(input)?;
        Ok(())
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

fn describe_ending(ending: &types::ending) -> String {
    let reason = text_of_c_string(&ending.reason);
    match text_of_c_string(&ending.message) {
        message if message.is_empty() => reason,
        message => format!("{reason}: {message}"),
    }
}

fn text_of_c_string(bytes: &[i8]) -> String {
    let bytes = bytes.iter().map(|byte| byte.cast_unsigned());
    let bytes: Vec<u8> = bytes.take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The clock that the scheduler's BPF half reads.
pub(crate) fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}
