//! Tests which kinds of BPF programs and maps this machine accepts.
//!
//! The kernel version is no evidence: distributions backport features, configurations disable them, and lockdown and
//! missing capabilities forbid them. So each [`Capability`] has a small BPF program of its own. The test loads,
//! attaches and triggers this program, and checks that the program ran.

use std::error::Error;
use std::ffi::OsStr;
use std::hint::black_box;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use std::{io, thread};

use libbpf_rs::{
    ErrorKind, Iter, Link, MapCore, Object, ObjectBuilder, OpenObject, ProgramMut, UprobeMultiOpts,
    UprobeOpts,
};
use procfs::process::Process;
use rustix::mm::{MapFlags, ProtFlags};

pub(crate) static CAPABILITY_OBJECT: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/capability.bpf.o"));

/// A kind of BPF program or map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum Capability {
    /// Tracepoints with typed arguments (`tp_btf`): scheduler events.
    BtfTracepoint,
    /// Raw tracepoints.
    RawTracepoint,
    /// Classic tracepoints; need tracefs.
    Tracepoint,
    /// A uprobe on the entry and the return of a function in one link: the cheapest way to time a call.
    UprobeSession,
    /// Uprobes on the entries of many functions in one link.
    UprobeMulti,
    /// One function per perf event: slow to attach and detach, but available on old kernels.
    UprobePerf,
    /// State kept by the kernel per task.
    TaskStorage,
    /// Iterator over the mappings of every process: finds the processes that use a library.
    TaskVmaIterator,
    /// An event stream to userspace.
    RingBuffer,
    /// Arrays that userspace reads without a system call.
    MmapArray,
    /// Typed entry probes on kernel functions.
    Fentry,
    /// Probes on kernel functions.
    Kprobe,
}

zernel_phase::mirrors! {
    #[cfg(test)]
    pub(crate) const MIRRORS;
    variants {
        enum Capability = "capability" {
            BtfTracepoint = "TP_BTF",
            RawTracepoint = "RAW_TP",
            Tracepoint = "TRACEPOINT",
            UprobeSession = "UPROBE_SESSION",
            UprobeMulti = "UPROBE_MULTI",
            UprobePerf = "UPROBE_PERF",
            TaskStorage = "TASK_STORAGE",
            TaskVmaIterator = "TASK_VMA",
            RingBuffer = "RINGBUF",
            MmapArray = "MMAP_ARRAY",
            Fentry = "FENTRY",
            Kprobe = "KPROBE",
        } and {
            "CAPABILITIES" = Capability::ALL.len(),
        }
    }
}

impl Capability {
    /// All capabilities, in the order of the run counters in the BPF object.
    pub const ALL: [Self; 12] = [
        Self::BtfTracepoint,
        Self::RawTracepoint,
        Self::Tracepoint,
        Self::UprobeSession,
        Self::UprobeMulti,
        Self::UprobePerf,
        Self::TaskStorage,
        Self::TaskVmaIterator,
        Self::RingBuffer,
        Self::MmapArray,
        Self::Fentry,
        Self::Kprobe,
    ];

    /// Ways to attach to functions of processes, best first.
    pub const UPROBE_KINDS_BEST_FIRST: [Self; 3] =
        [Self::UprobeSession, Self::UprobeMulti, Self::UprobePerf];

    /// Capabilities that observing needs, besides one of [`Self::UPROBE_KINDS_BEST_FIRST`].
    pub const NEEDED_TO_OBSERVE: [Self; 3] =
        [Self::BtfTracepoint, Self::TaskStorage, Self::MmapArray];

    /// Its usual name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::BtfTracepoint => "tp_btf",
            Self::RawTracepoint => "raw_tp",
            Self::Tracepoint => "tracepoint",
            Self::UprobeSession => "uprobe.session",
            Self::UprobeMulti => "uprobe.multi",
            Self::UprobePerf => "uprobe (perf event)",
            Self::TaskStorage => "task storage",
            Self::TaskVmaIterator => "iter/task_vma",
            Self::RingBuffer => "ring buffer",
            Self::MmapArray => "mmap array",
            Self::Fentry => "fentry",
            Self::Kprobe => "kprobe",
        }
    }

    /// Name of the BPF program that tests this capability. The map of a program, if it has one, has the program's name
    /// followed by `_map`.
    fn program_name(self) -> &'static str {
        match self {
            Self::BtfTracepoint => "tp_btf",
            Self::RawTracepoint => "raw_tp",
            Self::Tracepoint => "tracepoint",
            Self::UprobeSession => "uprobe_session",
            Self::UprobeMulti => "uprobe_multi",
            Self::UprobePerf => "uprobe_perf",
            Self::TaskStorage => "task_storage",
            Self::TaskVmaIterator => "task_vma",
            Self::RingBuffer => "ringbuf",
            Self::MmapArray => "mmap_array",
            Self::Fentry => "fentry",
            Self::Kprobe => "kprobe",
        }
    }

    /// Loads, attaches and triggers the capability's program, and removes it again.
    pub fn try_out(self) -> Result<(), CapabilityRefusal> {
        let object = self.load_program().map_err(CapabilityRefusal::LoadFailed)?;
        let program = object
            .progs_mut()
            .find(|program| program.name() == self.program_name())
            .expect("every capability has a program");
        let links = self
            .attach_program(&program)
            .map_err(CapabilityRefusal::AttachFailed)?;
        for _ in 0..self.trigger_attempts() {
            self.trigger_program(&object, &links)
                .map_err(CapabilityRefusal::TriggerFailed)?;
            if self.run_count(&object) >= self.runs_per_call() {
                return Ok(());
            }
        }
        Err(CapabilityRefusal::NeverRan)
    }

    /// Number of attempts to trigger the program. A probed call is counted at once, so a uprobe program gets one
    /// attempt: the entries of two calls would pass for the entry and the return of one. A tracepoint on an emulated
    /// machine may take a moment.
    fn trigger_attempts(self) -> u32 {
        if Self::UPROBE_KINDS_BEST_FIRST.contains(&self) {
            1
        } else {
            20
        }
    }

    /// How often the program runs per trigger: twice if it probes the entry and the return of a call.
    fn runs_per_call(self) -> u64 {
        if Self::UPROBE_KINDS_BEST_FIRST.contains(&self) {
            2
        } else {
            1
        }
    }

    fn load_program(self) -> libbpf_rs::Result<Object> {
        without_libbpf_messages(|| {
            let mut object = ObjectBuilder::default().open_memory(CAPABILITY_OBJECT)?;
            self.leave_out_other_capabilities(&mut object)?;
            object.load()
        })
    }

    fn leave_out_other_capabilities(self, object: &mut OpenObject) -> libbpf_rs::Result<()> {
        for mut program in object.progs_mut() {
            let own = program.name() == self.program_name();
            program.set_autoload(own);
        }
        let own_map = format!("{}_map", self.program_name());
        for mut map in object.maps_mut() {
            let others = map.name() != OsStr::new(&own_map)
                && map.name().as_encoded_bytes().ends_with(b"_map");
            map.set_autocreate(!others)?;
        }
        Ok(())
    }

    fn attach_program(self, program: &ProgramMut<'_>) -> libbpf_rs::Result<Vec<Link>> {
        without_libbpf_messages(|| match self {
            Self::UprobeSession => Ok(vec![attach_uprobe_multi(program, false, true)?]),
            Self::UprobeMulti => Ok(vec![
                attach_uprobe_multi(program, false, false)?,
                attach_uprobe_multi(program, true, false)?,
            ]),
            Self::UprobePerf => Ok(vec![
                attach_uprobe_perf(program, false)?,
                attach_uprobe_perf(program, true)?,
            ]),
            _ => Ok(vec![program.attach()?]),
        })
    }

    /// Triggers the capability's program: makes a call or causes an event that the program is attached to.
    fn trigger_program(self, object: &Object, links: &[Link]) -> libbpf_rs::Result<()> {
        match self {
            Self::TaskVmaIterator => {
                for link in links {
                    io::copy(&mut Iter::new(link)?, &mut io::sink())?;
                }
            }
            Self::MmapArray => {
                for map in object.maps().filter(|map| map.name() == "mmap_array_map") {
                    map_and_unmap(map.as_fd())?;
                }
                thread::sleep(Duration::from_millis(1));
            }
            _ => {
                probe_target(1);
                thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    /// How often the capability's program has run so far.
    fn run_count(self, object: &Object) -> u64 {
        let counters = object
            .maps()
            .find(|map| map.name().to_string_lossy().ends_with(".bss"))
            .and_then(|map| {
                map.lookup(&0_u32.to_ne_bytes(), libbpf_rs::MapFlags::ANY)
                    .ok()?
            })
            .unwrap_or_default();
        let own = counters.chunks_exact(8).nth(self as usize);
        own.map_or(0, |hits| {
            u64::from_ne_bytes(hits.try_into().expect("eight bytes"))
        })
    }
}

/// Why a capability is missing.
#[derive(Debug, thiserror::Error)]
pub enum CapabilityRefusal {
    /// The kernel refused the program or its map.
    #[error("the kernel does not load it ({})", innermost_reason(.0))]
    LoadFailed(#[source] libbpf_rs::Error),
    /// The program loaded but could not be attached.
    #[error("it loads but does not attach ({})", innermost_reason(.0))]
    AttachFailed(#[source] libbpf_rs::Error),
    /// The program attached but could not be triggered.
    #[error("it attaches but could not be tried ({})", innermost_reason(.0))]
    TriggerFailed(#[source] libbpf_rs::Error),
    /// The program attached but never ran.
    #[error("it attaches but never runs")]
    NeverRan,
}

impl CapabilityRefusal {
    /// Whether the capability is missing because this process lacks privilege.
    #[must_use]
    pub fn is_permission_denied(&self) -> bool {
        match self {
            Self::LoadFailed(error) | Self::AttachFailed(error) | Self::TriggerFailed(error) => {
                error.kind() == ErrorKind::PermissionDenied
            }
            Self::NeverRan => false,
        }
    }
}

/// Message of the innermost cause, without Rust's ` (os error N)`.
pub(crate) fn innermost_reason(error: &libbpf_rs::Error) -> String {
    let text = innermost_cause(error);
    let (reason, _) = text.split_once(OS_ERROR_MARKER).unwrap_or((&text, ""));
    reason.to_owned()
}

/// The errno of the innermost cause. libbpf-rs shows the errno in its message only.
pub(crate) fn error_number(error: &libbpf_rs::Error) -> Option<i32> {
    let text = innermost_cause(error);
    let (_, number) = text.split_once(OS_ERROR_MARKER)?;
    number.trim_end_matches(')').trim().parse().ok()
}

/// The text between the message of a system error and its number, as Rust prints it.
const OS_ERROR_MARKER: &str = " (os error";

fn innermost_cause(error: &libbpf_rs::Error) -> String {
    let mut cause: &dyn Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

fn attach_uprobe_multi(
    program: &ProgramMut<'_>,
    retprobe: bool,
    session: bool,
) -> libbpf_rs::Result<Link> {
    let options = UprobeMultiOpts {
        offsets: vec![probe_target_offset()?],
        retprobe,
        session,
        ..Default::default()
    };
    program.attach_uprobe_multi_with_opts(-1, OWN_EXECUTABLE_PATH, "", options)
}

fn attach_uprobe_perf(program: &ProgramMut<'_>, retprobe: bool) -> libbpf_rs::Result<Link> {
    let options = UprobeOpts {
        retprobe,
        ..Default::default()
    };
    program.attach_uprobe_with_opts(-1, OWN_EXECUTABLE_PATH, probe_target_offset()?, options)
}

/// Maps the first page of a BPF array, as a reader of histograms would.
fn map_and_unmap(array: BorrowedFd<'_>) -> io::Result<()> {
    let size = rustix::param::page_size();
    // SAFETY: a fresh mapping at an address of the kernel's choice, never dereferenced, and unmapped
    // before its address is used.
    unsafe {
        let page = rustix::mm::mmap(
            std::ptr::null_mut(),
            size,
            ProtFlags::READ,
            MapFlags::SHARED,
            array,
            0,
        )?;
        rustix::mm::munmap(page, size)?;
    }
    Ok(())
}

/// Runs `action` without libbpf's messages: if the kernel refuses a program, that is a result of the test and no
/// error.
pub(crate) fn without_libbpf_messages<T>(action: impl FnOnce() -> T) -> T {
    // The printer is global to the process, so only one thread at a time may replace and restore it.
    static LIBBPF_PRINTER_LOCK: Mutex<()> = Mutex::new(());
    let _alone = LIBBPF_PRINTER_LOCK
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let print = libbpf_rs::set_print(None);
    let result = action();
    libbpf_rs::set_print(print);
    result
}

/// The function that uprobes are tested on.
#[inline(never)]
extern "C" fn probe_target(value: u64) -> u64 {
    black_box(value.wrapping_add(1))
}

const OWN_EXECUTABLE_PATH: &str = "/proc/self/exe";

/// Offset of [`probe_target`] in this program's file.
fn probe_target_offset() -> io::Result<usize> {
    offset_in_own_executable(probe_target as *const ())
}

/// Offset of one of this program's functions in its file.
pub(crate) fn offset_in_own_executable(function: *const ()) -> io::Result<usize> {
    let address = function as u64;
    let maps = Process::myself().and_then(|process| process.maps());
    let maps = maps.map_err(io::Error::other)?;
    let map = maps
        .iter()
        .find(|map| (map.address.0..map.address.1).contains(&address))
        .ok_or_else(|| io::Error::other("this program's own code is in none of its mappings"))?;
    Ok((address - map.address.0 + map.offset) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_in_the_order_of_the_counters() {
        for (index, capability) in Capability::ALL.into_iter().enumerate() {
            assert_eq!(capability as usize, index);
        }
    }
}
