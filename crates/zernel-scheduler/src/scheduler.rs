//! The sched_ext scheduler: checks the kernel, loads it, keeps it loaded, and reports why it ended.

use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::ops::ControlFlow;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use libbpf_rs::ProgramInput;
use libbpf_rs::btf::Btf;
use libbpf_rs::btf::types::Struct;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use thiserror::Error;
pub use zernel_model::scheduler::SchedCounters;

use crate::cgroup_limits::{CGROUPS, CpuLimit, CpuLimits, read_limits};
pub use crate::loaded_scheduler::LoadedScheduler;
use crate::reader_heart::ReaderHeart;
use crate::sched_ext::SchedExt;
use crate::task_state_pins::TaskStatePins;
use crate::topology::CacheTopology;

/// Generated from the BPF object.
#[allow(
    missing_docs,
    unreachable_pub,
    unsafe_op_in_unsafe_fn,
    clippy::all,
    clippy::pedantic,
    clippy::undocumented_unsafe_blocks
)]
pub(crate) mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/main.skel.rs"));
}

use skeleton::{MainSkel, MainSkelBuilder, OpenMainSkel, types};

/// Time between two looks at whether the scheduler still runs.
const POLL: Duration = Duration::from_millis(50);
/// Time between two readings of `cpu.max`, on kernels that do not report changes.
const LIMITS_EVERY: Duration = Duration::from_secs(1);
/// The callback that reports changes of `cpu.max`.
const REPORTS_LIMITS: &str = "cgroup_set_bandwidth";

/// The tasks with critical threads that go first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Privilege {
    /// Nobody's.
    Nobody,
    /// All tasks.
    All,
    /// Those of a cgroup and its descendants, by its id: the inode number of its folder.
    Cgroup(u64),
    /// Those of a user, by the real uid.
    User(u32),
    /// Those of the process that loads the scheduler, and its descendants.
    OwnTree,
}

impl Privilege {
    /// The kind of privilege, and the id of its cgroup or user.
    pub(crate) fn raw(self) -> (types::privilege, u64) {
        match self {
            Self::Nobody => (types::privilege::PRIVILEGE_NOBODY, 0),
            Self::All => (types::privilege::PRIVILEGE_ALL, 0),
            Self::Cgroup(id) => (types::privilege::PRIVILEGE_CGROUP, id),
            Self::User(uid) => (types::privilege::PRIVILEGE_USER, uid.into()),
            Self::OwnTree => (types::privilege::PRIVILEGE_TREE, 0),
        }
    }
}

/// Numbers that the scheduler works with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedSettings {
    /// Time that a task runs before others get their turn. Slices end at the kernel's ticks.
    pub slice: Duration,
    /// The tasks with critical threads that go first.
    pub privilege: Privilege,
    /// The percentage of their fair share that others keep.
    pub guarantee_percent: u32,
    /// Whether tasks may become privileged later, by [`LoadedScheduler::set_policy`].
    pub may_privilege: bool,
    /// The kernel ejects the scheduler if a task waits for this long. At most [`Self::WATCHDOG`].
    pub watchdog: Duration,
    /// Parts of the policy that are switched off.
    pub without: Vec<PolicyPart>,
}

/// A part of the policy that can be switched off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum PolicyPart {
    /// Threads that a critical thread wakes are critical.
    Handoff = 1 << 0,
    /// Loaders of a trainer that runs out of data go before others.
    Feed = 1 << 1,
    /// Threads of a process whose critical thread blocks go before others.
    Siblings = 1 << 2,
}

impl SchedSettings {
    /// Shorter than a tick of 4 ms, so that a slice that begins at a tick ends at the next one.
    pub const SLICE: Duration = Duration::from_millis(3);
    /// Half of the fair share.
    pub const GUARANTEE_PERCENT: u32 = 50;
    /// The longest time that the kernel lets a task wait. Its own default is 30 s, which users would take for a hang.
    pub const WATCHDOG: Duration = Duration::from_secs(5);

    pub(crate) fn slice_ns(&self) -> u64 {
        u64::try_from(self.slice.as_nanos()).unwrap_or(u64::MAX)
    }
}

impl Default for SchedSettings {
    fn default() -> Self {
        Self {
            slice: Self::SLICE,
            privilege: Privilege::Nobody,
            guarantee_percent: Self::GUARANTEE_PERCENT,
            may_privilege: false,
            watchdog: Self::WATCHDOG,
            without: Vec::new(),
        }
    }
}

/// Why the scheduler did not start, or ended before it was asked to.
#[derive(Debug, Error)]
pub enum SchedError {
    /// The kernel has no sched_ext.
    #[error(
        "this kernel has no sched_ext; use one built with CONFIG_SCHED_CLASS_EXT=y (Debian: 6.16 or newer)"
    )]
    NoSchedExt,
    /// Another scheduler is loaded.
    #[error("the scheduler {0} is loaded; stop it first")]
    OtherScheduler(String),
    /// sysfs cannot be read.
    #[error("cannot read the state of sched_ext: {0}")]
    State(#[source] std::io::Error),
    /// The machine has more CPUs than the scheduler has room for.
    #[error("this machine has {0} CPUs, and the scheduler has room for {max}", max = MAX_CPUS)]
    TooManyCpus(usize),
    /// The kernel refused the BPF object.
    #[error("cannot load the scheduler: {0}{hint}", hint = root_hint())]
    Load(#[from] libbpf_rs::Error),
    /// The kernel ejected the scheduler, because of an error.
    #[error("the kernel ejected the scheduler: {0}")]
    Ejected(String),
    /// The scheduler was unloaded from outside, such as with SysRq-S.
    #[error("the scheduler was unloaded from outside: {0}")]
    Unloaded(String),
    /// The loaded scheduler was not replaced.
    #[error("cannot replace the loaded scheduler: {0}")]
    NotReplaced(String),
}

fn root_hint() -> &'static str {
    match rustix::process::geteuid().is_root() {
        true => "",
        false => "; it needs root",
    }
}

const MAX_CPUS: usize = array_length(|settings| &settings.llc_of_cpu);
/// As in `intf.h`.
const MAX_LLCS: usize = 64;

const fn array_length<const N: usize>(_field: fn(&types::settings) -> &[u8; N]) -> usize {
    N
}

/// Checks that a scheduler can be loaded now.
///
/// # Errors
/// The kernel has no sched_ext, or another scheduler is loaded.
pub fn check() -> Result<(), SchedError> {
    match SchedExt::current().map_err(SchedError::State)? {
        SchedExt::Absent => Err(SchedError::NoSchedExt),
        SchedExt::Loaded { scheduler, .. } => Err(SchedError::OtherScheduler(scheduler)),
        SchedExt::NoScheduler { .. } => Ok(()),
    }
}

/// Loads the scheduler and keeps it loaded until `poll` breaks. `poll` is called as soon as it is loaded, and every
/// 50 ms. When the process ends in any way, the kernel returns to its own scheduler.
///
/// # Errors
/// See [`SchedError`].
pub fn run(
    settings: &SchedSettings,
    poll: impl FnMut(&LoadedScheduler<'_>) -> ControlFlow<()>,
) -> Result<SchedCounters, SchedError> {
    check()?;
    replace(settings, || Ok(()), poll)
}

/// Like [`run`], but another scheduler may be loaded. `unload_other` is called when this scheduler is verified and ready,
/// and unloads the other one. The kernel's own scheduler runs in the short time between the two.
///
/// # Errors
/// See [`SchedError`].
pub fn replace(
    settings: &SchedSettings,
    unload_other: impl FnOnce() -> Result<(), String>,
    poll: impl FnMut(&LoadedScheduler<'_>) -> ControlFlow<()>,
) -> Result<SchedCounters, SchedError> {
    let mut storage = MaybeUninit::uninit();
    let mut open = MainSkelBuilder::default().open(&mut storage)?;
    configure(&mut open, settings)?;
    let polls_limits = !kernel_reports_limits();
    if polls_limits {
        open.struct_ops.zernel_ops_mut().cgroup_set_bandwidth = std::ptr::null_mut();
        open.progs.zernel_cgroup_set_bandwidth.set_autoload(false);
    }
    let mut pins = TaskStatePins::claim(&mut open);
    let mut skel = open.load()?;
    pin_shared_maps(&mut pins, &mut skel, settings)?;
    unload_other().map_err(SchedError::NotReplaced)?;
    // The scheduler that was replaced may have removed its pins.
    pin_shared_maps(&mut pins, &mut skel, settings)?;
    if settings.privilege == Privilege::OwnTree {
        skel.progs
            .privilege_caller
            .test_run(ProgramInput::default())?;
    }
    let link = skel.maps.zernel_ops.attach_struct_ops()?;
    let limits = polls_limits.then(LimitReader::default);
    let heart = ReaderHeart::start(&skel.maps.zernel_heartbeats);
    let loaded = LoadedScheduler::new(&skel);
    wait(&loaded, limits, &heart, poll);
    drop(heart);
    drop(link);
    pins.remove(&skel.maps.zernel_heartbeats);
    loaded.result()
}

/// Pins the maps of task states. Without a bpffs there are no classes, which matters only to privileged threads.
fn pin_shared_maps(
    pins: &mut TaskStatePins,
    skel: &mut MainSkel<'_>,
    settings: &SchedSettings,
) -> Result<(), SchedError> {
    match pins.share_maps(skel) {
        Err(error) if settings.privilege != Privilege::Nobody => Err(error.into()),
        _ => Ok(()),
    }
}

fn configure(open: &mut OpenMainSkel<'_>, settings: &SchedSettings) -> Result<(), SchedError> {
    let topology = CacheTopology::current();
    if topology.cpus > MAX_CPUS {
        return Err(SchedError::TooManyCpus(topology.cpus));
    }
    let watchdog = settings.watchdog.min(SchedSettings::WATCHDOG);
    open.struct_ops.zernel_ops_mut().timeout_ms = watchdog.as_millis() as u32;
    let data = open.maps.bss_data.as_deref_mut();
    let target = &mut data.expect("the object has data").settings;
    target.slice_ns = settings.slice_ns();
    target.watchdog_ns = watchdog.as_nanos() as u64;
    target.guarantee_percent = settings.guarantee_percent;
    (target.privilege, target.privileged_id) = settings.privilege.raw();
    let may_privilege = settings.may_privilege || settings.privilege != Privilege::Nobody;
    target.may_privilege = u32::from(may_privilege);
    let without = settings.without.iter();
    target.policies = !without.fold(0, |set, policy| set | *policy as u32);
    target.cpus = topology.cpus as u32;
    target.llcs = topology.llcs.min(MAX_LLCS) as u32;
    for (target, llc) in target.llc_of_cpu.iter_mut().zip(&topology.llc_of_cpu) {
        *target = (llc % MAX_LLCS) as u8;
    }
    Ok(())
}

/// Whether the kernel informs a scheduler when a `cpu.max` changes.
fn kernel_reports_limits() -> bool {
    let Ok(btf) = Btf::from_vmlinux() else {
        return false;
    };
    let ops = btf.type_by_name::<Struct<'_>>("sched_ext_ops");
    ops.is_some_and(|ops| {
        ops.iter()
            .any(|member| member.name == Some(OsStr::new(REPORTS_LIMITS)))
    })
}

fn wait(
    loaded: &LoadedScheduler<'_>,
    mut limits: Option<LimitReader>,
    heart: &ReaderHeart<'_>,
    mut poll: impl FnMut(&LoadedScheduler<'_>) -> ControlFlow<()>,
) {
    while !loaded.has_ended() && poll(loaded).is_continue() {
        heart.beat();
        if let Some(limits) = &mut limits {
            limits.read_if_due(loaded.skel);
        }
        thread::sleep(POLL);
    }
}

/// Reads the `cpu.max` of all cgroups and passes changes to the scheduler.
#[derive(Debug, Default)]
struct LimitReader {
    known: CpuLimits,
    read: Option<Instant>,
}

impl LimitReader {
    fn read_if_due(&mut self, skel: &MainSkel<'_>) {
        if self.read.is_some_and(|read| read.elapsed() < LIMITS_EVERY) {
            return;
        }
        self.read = Some(Instant::now());
        let limits = read_limits(Path::new(CGROUPS));
        for id in self.known.keys().filter(|id| !limits.contains_key(id)) {
            set_limit(skel, *id, None);
        }
        for (id, limit) in &limits {
            if self.known.get(id) != Some(limit) {
                set_limit(skel, *id, Some(*limit));
            }
        }
        self.known = limits;
    }
}

/// Sets or removes the limit of a cgroup. A cgroup that has vanished needs none.
fn set_limit(skel: &MainSkel<'_>, cgroup_id: u64, limit: Option<CpuLimit>) {
    let words = [
        cgroup_id,
        limit.map_or(0, |limit| limit.quota_ns),
        limit.map_or(0, |limit| limit.period_ns),
    ];
    let mut argument: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let input = ProgramInput {
        context_in: Some(&mut argument),
        ..ProgramInput::default()
    };
    let _ = skel.progs.set_limit.test_run(input);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of an enumerator in `intf.h`.
    fn number(name: &str) -> usize {
        let (_, rest) = include_str!("bpf/intf.h")
            .split_once(&format!("{name} = "))
            .unwrap();
        let (number, _) = rest.split_once(',').unwrap();
        number.parse().unwrap()
    }

    #[test]
    fn numbers_are_those_of_the_bpf_half() {
        assert_eq!(MAX_CPUS, number("MAX_CPUS"));
        assert_eq!(MAX_LLCS, number("MAX_LLCS"));
        let first = 1 << number("FIRST_WAIT_POWER");
        assert_eq!(zernel_model::scheduler::FIRST_WAIT_BUCKET_ENDS_NS, first);
    }
}
