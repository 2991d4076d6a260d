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
use zernel_phase::shared::layout_hash;

use crate::cache_topology::CacheTopology;
use crate::cgroup_limits::{CGROUP_ROOT, CgroupCpuLimit, LimitsByCgroupId, read_cpu_limits};
pub use crate::loaded_scheduler::LoadedScheduler;
use crate::numa_topology::NumaTopology;
use crate::reader_heartbeat::ReaderHeartbeat;
use crate::sched_ext::SchedExtState;
use crate::task_state_pins::TaskStatePins;

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
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time between two readings of `cpu.max`, on kernels that do not report changes.
const CPU_LIMIT_READ_INTERVAL: Duration = Duration::from_secs(1);
/// The callback that reports changes of `cpu.max`.
const CPU_LIMIT_CALLBACK: &str = "cgroup_set_bandwidth";

/// The tasks with critical threads that go first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Privilege {
    /// No tasks.
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
    pub(crate) fn kind_and_id(self) -> (types::privilege, u64) {
        match self {
            Self::Nobody => (types::privilege::PRIVILEGE_NOBODY, 0),
            Self::All => (types::privilege::PRIVILEGE_ALL, 0),
            Self::Cgroup(id) => (types::privilege::PRIVILEGE_CGROUP, id),
            Self::User(uid) => (types::privilege::PRIVILEGE_USER, uid.into()),
            Self::OwnTree => (types::privilege::PRIVILEGE_TREE, 0),
        }
    }
}

/// Settings of the scheduler: slice, privilege, guarantee, lending, watchdog and NUMA nodes of GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedSettings {
    /// Time that a task runs before others get their turn. Slices end at the kernel's ticks.
    pub slice: Duration,
    /// The tasks with critical threads that go first.
    pub privilege: Privilege,
    /// The percentage of their fair share that others keep.
    pub guarantee_percent: u32,
    /// Whether threads that spin until the GPU is done lend their CPU.
    pub lends: bool,
    /// Whether tasks may become privileged later, by [`LoadedScheduler::set_policy`].
    pub may_privilege: bool,
    /// The kernel ejects the scheduler if a task waits for this long. At most [`Self::MAX_WATCHDOG`].
    pub watchdog: Duration,
    /// Parts of the policy that are switched off.
    pub disabled_parts: Vec<PolicyPart>,
    /// NUMA nodes of the GPUs, in NVML's order. `None`: as the kernel reports them.
    pub gpu_nodes: Option<Vec<u32>>,
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
    /// Threads that use a GPU run on its NUMA node.
    GpuNode = 1 << 3,
}

impl SchedSettings {
    /// Shorter than a tick of 4 ms, so that a slice that begins at a tick ends at the next one.
    pub const DEFAULT_SLICE: Duration = Duration::from_millis(3);
    /// Half of the fair share.
    pub const DEFAULT_GUARANTEE_PERCENT: u32 = 50;
    /// The longest time that the kernel lets a task wait. Its own default is 30 s, which users would take for a hang.
    pub const MAX_WATCHDOG: Duration = Duration::from_secs(5);

    pub(crate) fn slice_ns(&self) -> u64 {
        u64::try_from(self.slice.as_nanos()).unwrap_or(u64::MAX)
    }
}

impl Default for SchedSettings {
    fn default() -> Self {
        Self {
            slice: Self::DEFAULT_SLICE,
            privilege: Privilege::Nobody,
            guarantee_percent: Self::DEFAULT_GUARANTEE_PERCENT,
            lends: false,
            may_privilege: false,
            watchdog: Self::MAX_WATCHDOG,
            disabled_parts: Vec::new(),
            gpu_nodes: None,
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
    StateUnreadable(#[source] std::io::Error),
    /// The machine has more CPUs than the scheduler has room for.
    #[error("this machine has {0} CPUs, and the scheduler has room for {max}", max = MAX_CPUS)]
    TooManyCpus(usize),
    /// A GPU is said to be on a NUMA node that does not exist, or that has no CPUs.
    #[error("this machine has no NUMA node {0} with CPUs; see /sys/devices/system/node")]
    NoSuchNode(u32),
    /// The kernel refused the BPF object.
    #[error("cannot load the scheduler: {0}{hint}", hint = hint_if_not_root())]
    LoadFailed(#[from] libbpf_rs::Error),
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

fn hint_if_not_root() -> &'static str {
    match rustix::process::geteuid().is_root() {
        true => "",
        false => "; it needs root",
    }
}

const MAX_CPUS: usize = length_of_settings_array(|settings| &settings.llc_of_cpu);
/// As in `intf.h`.
const MAX_LLCS: usize = 64;
const MAX_NODES: usize = 64;

const fn length_of_settings_array<const N: usize>(
    _field: fn(&types::settings) -> &[u8; N],
) -> usize {
    N
}

/// Checks that a scheduler can be loaded now.
///
/// # Errors
/// The kernel has no sched_ext, or another scheduler is loaded.
pub fn check_can_load() -> Result<(), SchedError> {
    match SchedExtState::read_current().map_err(SchedError::StateUnreadable)? {
        SchedExtState::Absent => Err(SchedError::NoSchedExt),
        SchedExtState::Loaded { scheduler, .. } => Err(SchedError::OtherScheduler(scheduler)),
        SchedExtState::NoScheduler { .. } => Ok(()),
    }
}

/// Loads the scheduler and keeps it loaded until `poll` breaks. `poll` is called as soon as it is loaded, and every
/// 50 ms. When the process ends in any way, the kernel returns to its own scheduler.
///
/// # Errors
/// See [`SchedError`].
pub fn run_scheduler(
    settings: &SchedSettings,
    poll: impl FnMut(&LoadedScheduler<'_>) -> ControlFlow<()>,
) -> Result<SchedCounters, SchedError> {
    check_can_load()?;
    replace_scheduler(settings, || Ok(()), poll)
}

/// Like [`run_scheduler`], but another scheduler may be loaded. `unload_other` is called when this scheduler is verified and ready,
/// and unloads the other one. The kernel's own scheduler runs in the short time between the two.
///
/// # Errors
/// See [`SchedError`].
pub fn replace_scheduler(
    settings: &SchedSettings,
    unload_other: impl FnOnce() -> Result<(), String>,
    poll: impl FnMut(&LoadedScheduler<'_>) -> ControlFlow<()>,
) -> Result<SchedCounters, SchedError> {
    let mut storage = MaybeUninit::uninit();
    let mut open_object = MainSkelBuilder::default().open(&mut storage)?;
    configure_object(&mut open_object, settings)?;
    let polls_limits = !kernel_reports_cpu_limits();
    if polls_limits {
        open_object.struct_ops.zernel_ops_mut().cgroup_set_bandwidth = std::ptr::null_mut();
        open_object
            .progs
            .zernel_cgroup_set_bandwidth
            .set_autoload(false);
    }
    let mut pins = TaskStatePins::reuse_pinned_maps(&mut open_object);
    let mut skel = open_object.load()?;
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
    let limit_reader = polls_limits.then(CpuLimitReader::default);
    let heartbeat = ReaderHeartbeat::start(&skel.maps.zernel_heartbeats);
    let loaded = LoadedScheduler::new(&skel);
    wait_until_ended(&loaded, limit_reader, &heartbeat, poll);
    drop(heartbeat);
    drop(link);
    pins.remove_own_pins(&skel.maps.zernel_heartbeats);
    loaded.counters_or_error()
}

/// Pins the maps of task states. Without a bpffs there are no classes, which matters only to privileged threads.
fn pin_shared_maps(
    pins: &mut TaskStatePins,
    skel: &mut MainSkel<'_>,
    settings: &SchedSettings,
) -> Result<(), SchedError> {
    match pins.pin_missing_maps(skel) {
        Err(error) if settings.privilege != Privilege::Nobody => Err(error.into()),
        _ => Ok(()),
    }
}

fn configure_object(
    open_object: &mut OpenMainSkel<'_>,
    settings: &SchedSettings,
) -> Result<(), SchedError> {
    let topology = CacheTopology::read_current();
    if topology.cpu_count > MAX_CPUS {
        return Err(SchedError::TooManyCpus(topology.cpu_count));
    }
    let watchdog = settings.watchdog.min(SchedSettings::MAX_WATCHDOG);
    open_object.struct_ops.zernel_ops_mut().timeout_ms = watchdog.as_millis() as u32;
    let bss = open_object.maps.bss_data.as_deref_mut();
    let target_settings = &mut bss.expect("the object has data").settings;
    target_settings.slice_ns = settings.slice_ns();
    target_settings.watchdog_ns = watchdog.as_nanos() as u64;
    target_settings.guarantee_percent = settings.guarantee_percent;
    target_settings.lends = u32::from(settings.lends);
    target_settings.layout_hash = layout_hash();
    (target_settings.privilege, target_settings.privileged_id) = settings.privilege.kind_and_id();
    let may_privilege = settings.may_privilege || settings.privilege != Privilege::Nobody;
    target_settings.may_privilege = u32::from(may_privilege);
    let disabled_parts = settings.disabled_parts.iter();
    target_settings.enabled_policies = !disabled_parts.fold(0, |set, policy| set | *policy as u32);
    target_settings.cpu_count = topology.cpu_count as u32;
    target_settings.llc_count = topology.llc_count.min(MAX_LLCS) as u32;
    for (target_llc, llc) in target_settings
        .llc_of_cpu
        .iter_mut()
        .zip(&topology.llc_of_cpu)
    {
        *target_llc = (llc % MAX_LLCS) as u8;
    }
    let nodes = NumaTopology::read_current(settings.gpu_nodes.as_deref());
    if let Some(node) = nodes
        .missing_gpu_node()
        .filter(|_| settings.gpu_nodes.is_some())
    {
        return Err(SchedError::NoSuchNode(node));
    }
    configure_nodes(target_settings, &nodes);
    Ok(())
}

/// Sets the nodes of CPUs and GPUs. Nodes without a CPU, and beyond the scheduler's room, are not known.
fn configure_nodes(target_settings: &mut types::settings, nodes: &NumaTopology) {
    let known = |node: &u32| (*node as usize) < MAX_NODES && nodes.cpus_of_node.contains_key(node);
    target_settings.numa_nodes = nodes.cpus_of_node.len() as u32;
    let cpus = target_settings.node_of_cpu.iter_mut();
    for (target, node) in cpus.zip(&nodes.node_of_cpu) {
        *target = node
            .filter(known)
            .map_or(MAX_NODES as u8, |node| node as u8);
    }
    target_settings.node_of_gpu.fill(MAX_NODES as u8);
    let gpus = target_settings.node_of_gpu.iter_mut();
    for (target, node) in gpus.zip(&nodes.node_of_gpu) {
        *target = node
            .filter(known)
            .map_or(MAX_NODES as u8, |node| node as u8);
    }
    let mut listed = target_settings.cpus_by_node.iter_mut();
    let mut first = 0;
    for (node, cpus) in nodes.cpus_of_node.iter().filter(|(node, _)| known(node)) {
        target_settings.first_cpu_of_node[*node as usize] = first;
        target_settings.cpu_count_of_node[*node as usize] = cpus.len() as u16;
        first += cpus.len() as u16;
        for (cpu, target) in cpus.iter().zip(listed.by_ref()) {
            *target = *cpu as u16;
        }
    }
}

/// Whether the kernel informs a scheduler when a `cpu.max` changes.
fn kernel_reports_cpu_limits() -> bool {
    let Ok(btf) = Btf::from_vmlinux() else {
        return false;
    };
    let ops = btf.type_by_name::<Struct<'_>>("sched_ext_ops");
    ops.is_some_and(|ops| {
        ops.iter()
            .any(|member| member.name == Some(OsStr::new(CPU_LIMIT_CALLBACK)))
    })
}

fn wait_until_ended(
    loaded: &LoadedScheduler<'_>,
    mut limit_reader: Option<CpuLimitReader>,
    heartbeat: &ReaderHeartbeat<'_>,
    mut poll: impl FnMut(&LoadedScheduler<'_>) -> ControlFlow<()>,
) {
    while !loaded.has_ended() && poll(loaded).is_continue() {
        heartbeat.record_heartbeat();
        if let Some(limit_reader) = &mut limit_reader {
            limit_reader.read_if_due(loaded.skel);
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Reads the `cpu.max` of all cgroups and passes changes to the scheduler.
#[derive(Debug, Default)]
struct CpuLimitReader {
    passed_limits: LimitsByCgroupId,
    last_read: Option<Instant>,
}

impl CpuLimitReader {
    fn read_if_due(&mut self, skel: &MainSkel<'_>) {
        if self
            .last_read
            .is_some_and(|last_read| last_read.elapsed() < CPU_LIMIT_READ_INTERVAL)
        {
            return;
        }
        self.last_read = Some(Instant::now());
        let limits = read_cpu_limits(Path::new(CGROUP_ROOT));
        for id in self
            .passed_limits
            .keys()
            .filter(|id| !limits.contains_key(id))
        {
            set_cpu_limit(skel, *id, None);
        }
        for (id, limit) in &limits {
            if self.passed_limits.get(id) != Some(limit) {
                set_cpu_limit(skel, *id, Some(*limit));
            }
        }
        self.passed_limits = limits;
    }
}

/// Sets or removes the limit of a cgroup. A cgroup that has vanished needs none.
fn set_cpu_limit(skel: &MainSkel<'_>, cgroup_id: u64, limit: Option<CgroupCpuLimit>) {
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
    let _ = skel.progs.set_cpu_limit.test_run(input);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of an enumerator in `intf.h`.
    fn enumerator_value(name: &str) -> usize {
        let (_, rest) = include_str!("bpf/intf.h")
            .split_once(&format!("{name} = "))
            .unwrap();
        let (number, _) = rest.split_once(',').unwrap();
        number.parse().unwrap()
    }

    #[test]
    fn rust_constants_match_intf_h() {
        assert_eq!(MAX_CPUS, enumerator_value("MAX_CPUS"));
        assert_eq!(MAX_LLCS, enumerator_value("MAX_LLCS"));
        assert_eq!(MAX_NODES, enumerator_value("MAX_NODES"));
        let first = 1 << enumerator_value("FIRST_WAIT_BUCKET_LOG2_NS");
        assert_eq!(zernel_model::scheduler::FIRST_WAIT_BUCKET_ENDS_NS, first);
    }
}
