//! The events of `discovery.bpf.c`, and the probes on dynamic loaders that raise some of them.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use libbpf_rs::{
    Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder, ProgramMut, RingBuffer,
    RingBufferBuilder, UprobeMultiOpts, UprobeOpts,
};
use zernel_phase::mirrors;
use zerocopy::{FromBytes, IntoBytes};

use super::DiscoveryError;
use super::process::ProcessKey;
use super::sys;
use crate::capability::without_libbpf_messages;
use crate::child_task;
use zernel_elf::LoaderSymbols;

pub(super) static DISCOVERY_OBJECT: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/discovery.bpf.o"));
const TRACEPOINT_PROGRAMS: [&str; 3] = ["executed", "forked", "exited"];
const LOADER_MULTI_PROGRAM: &str = "loader_multi";
const LOADER_PERF_PROGRAM: &str = "loader_perf";

/// libbpf takes milliseconds in an `int`.
const LONGEST_WAIT: Duration = Duration::from_millis(i32::MAX as u64);

/// What happened to a process.
#[derive(Debug, Clone, Copy)]
pub(super) enum ProcessNotice {
    /// It called exec. A process that called exec may have been a process of interest before.
    Executed(ProcessKey, Executable),
    /// A process of interest forked.
    Forked {
        parent: ProcessKey,
        child: ProcessKey,
    },
    /// A process of interest exited.
    Exited(ProcessKey),
    /// The dynamic loader of the process loaded or unloaded a library.
    Loaded(ProcessKey),
}

mirrors! {
    #[cfg(test)]
    pub(super) const MIRRORS;
    structs {
        /// An executable in a mount namespace.
        pub(super) struct Executable = "executable" {
            inode: u64,
            device: u32,
            mount_namespace: u32,
        }

        struct RawEvent = "event" {
            start_boottime_ns: u64,
            child_start_boottime_ns: u64,
            executable: Executable,
            tgid: u32,
            child_tgid: u32,
            kind: u32,
            reserved: u32,
        }
    }
    constants {
        u32 = "event_kind", "EVENT_" {
            EXECUTED = 0,
            FORKED = 1,
            EXITED = 2,
            LOADED = 3,
        }
    }
}

impl RawEvent {
    fn as_process_notice(&self) -> Option<ProcessNotice> {
        let process = ProcessKey::new(self.tgid, self.start_boottime_ns);
        match self.kind {
            EXECUTED => Some(ProcessNotice::Executed(process, self.executable)),
            FORKED => Some(ProcessNotice::Forked {
                parent: process,
                child: ProcessKey::new(self.child_tgid, self.child_start_boottime_ns),
            }),
            EXITED => Some(ProcessNotice::Exited(process)),
            LOADED => Some(ProcessNotice::Loaded(process)),
            _ => None,
        }
    }
}

/// The loaded and attached programs. Links and ring buffer come first, because fields are dropped in order.
pub(super) struct DiscoveryPrograms {
    _tracepoints: Vec<Link>,
    ring: RingBuffer<'static>,
    notices: Arc<Mutex<Vec<ProcessNotice>>>,
    followed_processes: MapHandle,
    pending_loads: MapHandle,
    known_executables: MapHandle,
    bss_map: MapHandle,
    object: Object,
}

impl DiscoveryPrograms {
    /// Loads and attaches everything but the probes on loaders.
    pub(super) fn start() -> Result<Self, DiscoveryError> {
        let object = without_libbpf_messages(|| load_object(true).or_else(|_| load_object(false)))
            .map_err(DiscoveryError::from_load_error)?;
        let tracepoints = TRACEPOINT_PROGRAMS
            .map(|name| find_program(&object, name).and_then(|program| program.attach()))
            .into_iter()
            .collect::<Result<_, _>>()
            .map_err(DiscoveryError::TracepointsNotAttached)?;
        let queue = Arc::default();
        let ring = build_ring_buffer(&object, &queue).map_err(DiscoveryError::EventsUnreadable)?;
        Ok(Self {
            _tracepoints: tracepoints,
            ring,
            notices: queue,
            followed_processes: find_map(&object, "followed_processes")
                .map_err(DiscoveryError::EventsUnreadable)?,
            pending_loads: find_map(&object, "pending_loads")
                .map_err(DiscoveryError::EventsUnreadable)?,
            known_executables: find_map(&object, "known_executables")
                .map_err(DiscoveryError::EventsUnreadable)?,
            bss_map: find_map(&object, ".bss").map_err(DiscoveryError::EventsUnreadable)?,
            object,
        })
    }

    /// The events since the last call. Waits for an event for at most `timeout`.
    pub(super) fn wait_for_notices(
        &self,
        timeout: Duration,
    ) -> Result<Vec<ProcessNotice>, DiscoveryError> {
        match self.ring.poll(timeout.min(LONGEST_WAIT)) {
            Err(error) if error.kind() != libbpf_rs::ErrorKind::Interrupted => {
                return Err(DiscoveryError::EventsUnreadable(error));
            }
            _ => {}
        }
        let mut queue = self.notices.lock().unwrap_or_else(PoisonError::into_inner);
        let notices = std::mem::take(&mut *queue);
        drop(queue);
        for notice in &notices {
            if let ProcessNotice::Loaded(process) = notice {
                // The deletion fails only if the entry is missing already.
                let _ = self.pending_loads.delete(&process.pid.to_ne_bytes());
            }
        }
        Ok(notices)
    }

    /// A descriptor that is readable when there are events of processes.
    pub(super) fn readable_descriptor(&self) -> BorrowedFd<'_> {
        sys::readable_descriptor(&self.ring)
    }

    /// Number of events that found the ring buffer full.
    pub(super) fn lost_event_count(&self) -> u64 {
        let counters = self.bss_map.lookup(&0_u32.to_ne_bytes(), MapFlags::ANY);
        let counters = counters.ok().flatten().unwrap_or_default();
        u64::read_from_prefix(&counters).map_or(0, |(lost, _)| lost)
    }

    /// From now on the kernel reports forks and the exit of this process. If the kernel's table is full, only a full
    /// scan finds the exit.
    pub(super) fn follow_process(&self, process: ProcessKey) {
        let _ = self
            .followed_processes
            .update(&process.pid.to_ne_bytes(), &[1], MapFlags::ANY);
    }

    /// Undoes [`Self::follow_process`].
    pub(super) fn unfollow_process(&self, process: ProcessKey) {
        let _ = self.followed_processes.delete(&process.pid.to_ne_bytes());
    }

    /// Reports the next exec of this executable as if it were the first.
    pub(super) fn forget_executable(&self, executable: &Executable) {
        let _ = self.known_executables.delete(executable.as_bytes());
    }

    /// Reports the next exec of every executable as if it were the first.
    pub(super) fn forget_all_executables(&self) {
        let executables: Vec<_> = self.known_executables.keys().collect();
        for executable in executables {
            let _ = self.known_executables.delete(&executable);
        }
    }

    /// The descriptors that [`Self::attach_loader`] needs.
    pub(super) fn program_descriptors(&self) -> Vec<BorrowedFd<'_>> {
        child_task::program_descriptors(&self.object)
    }

    /// Attaches to the function that the loader in `file` calls after it has loaded a library. Runs in a child process.
    pub(super) fn attach_loader(
        &self,
        file: &Path,
        symbols: LoaderSymbols,
    ) -> libbpf_rs::Result<Link> {
        let multi = UprobeMultiOpts {
            offsets: vec![symbols.hook_offset],
            cookies: vec![symbols.hook_to_state_bytes],
            ..Default::default()
        };
        let perf = UprobeOpts {
            cookie: symbols.hook_to_state_bytes,
            ..Default::default()
        };
        let with_multi = find_program(&self.object, LOADER_MULTI_PROGRAM)
            .and_then(|program| program.attach_uprobe_multi_with_opts(-1, file, "", multi));
        with_multi.or_else(|_| {
            let program = find_program(&self.object, LOADER_PERF_PROGRAM)?;
            program.attach_uprobe_with_opts(-1, file, symbols.hook_offset, perf)
        })
    }
}

fn load_object(with_multi: bool) -> libbpf_rs::Result<Object> {
    let mut object = ObjectBuilder::default().open_memory(DISCOVERY_OBJECT)?;
    for mut program in object.progs_mut() {
        let wanted = with_multi || program.name() != LOADER_MULTI_PROGRAM;
        program.set_autoload(wanted);
    }
    object.load()
}

fn find_program<'a>(object: &'a Object, name: &str) -> libbpf_rs::Result<ProgramMut<'a>> {
    object
        .progs_mut()
        .find(|program| program.name() == name)
        .ok_or_else(|| std::io::Error::other(format!("no program {name}")).into())
}

/// The map whose name ends with `name`: libbpf puts the object's name before `.bss`.
fn find_map(object: &Object, name: &str) -> libbpf_rs::Result<MapHandle> {
    let map = object
        .maps()
        .find(|map| map.name().as_encoded_bytes().ends_with(name.as_bytes()))
        .ok_or_else(|| std::io::Error::other(format!("no map {name}")))?;
    MapHandle::try_from(&map)
}

fn build_ring_buffer(
    object: &Object,
    queue: &Arc<Mutex<Vec<ProcessNotice>>>,
) -> libbpf_rs::Result<RingBuffer<'static>> {
    let events = find_map(object, "events")?;
    let queue = Arc::clone(queue);
    let mut builder = RingBufferBuilder::new();
    builder.add(&events, move |bytes| {
        let notice = RawEvent::read_from_prefix(bytes).ok();
        let notice = notice.and_then(|(event, _)| event.as_process_notice());
        let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.extend(notice);
        0
    })?;
    builder.build()
}
