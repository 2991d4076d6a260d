//! Watches ML processes: attaches the probes, reads what they keep, and governs what they cost.

mod durations;
mod files;
mod kernel;
mod mapped;
mod process;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

pub use files::Watch;
use files::{AttachedFile, RefusedFile};
use kernel::Kernel;
pub use kernel::Rung;
pub use process::{CallCount, MemoryUse, ObservedProcess, Seen};
use zernel_phase::shared::RawTaskState;
use zernel_phase::tracker::TrackerConfig;

use crate::capability::reason;
use crate::library::LibraryKind;
use crate::probes::layout;

/// Why nothing can be observed.
#[derive(Debug, thiserror::Error)]
pub enum ObserveError {
    /// The programs do not load.
    #[error("the kernel does not load the probes ({}); `zernel doctor` says what is missing", reason(.0))]
    Load(#[source] libbpf_rs::Error),
    /// A map cannot be read.
    #[error("what the probes keep cannot be read ({})", reason(.0))]
    Read(#[source] libbpf_rs::Error),
}

/// What the kernel had no room for, by cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[allow(missing_docs)] // documented in bpf/observe.h
pub struct Losses {
    pub processes: u64,
    pub histograms: u64,
    pub calls: u64,
    pub allocations: u64,
    pub memory_accounts: u64,
    pub communicators: u64,
    pub threads: u64,
}

/// The probes, attached. Dropping it detaches everything.
pub struct Observer {
    kernel: Kernel,
    files: Vec<AttachedFile>,
    refused: Vec<RefusedFile>,
    processes: BTreeMap<u32, ObservedProcess>,
}

impl Observer {
    /// Loads the probes; nothing is attached yet.
    pub fn start() -> Result<Self, ObserveError> {
        Self::start_on(&Rung::LADDER)
    }

    /// The same with the best that works of these ways to attach.
    pub fn start_on(rungs: &[Rung]) -> Result<Self, ObserveError> {
        let kernel = Kernel::load(rungs, &TrackerConfig::default()).map_err(ObserveError::Load)?;
        Ok(Self {
            kernel,
            files: Vec::new(),
            refused: Vec::new(),
            processes: BTreeMap::new(),
        })
    }

    /// How functions are attached to.
    #[must_use]
    pub fn rung(&self) -> Rung {
        self.kernel.rung
    }

    /// Attaches to a library file, unless it is attached already.
    pub fn watch_file(&mut self, kind: LibraryKind, access: &Path, path: &Path) -> io::Result<()> {
        let identity = files::identity_at(access)?;
        if self.files.iter().any(|file| file.identity() == identity) {
            return Ok(());
        }
        match AttachedFile::attach(&self.kernel, kind, access, path) {
            Ok(file) => self.files.push(file),
            Err(error) => self.refused.push(RefusedFile::new(path, &error)),
        }
        Ok(())
    }

    /// Takes in the threads and the children that known processes had before they were known. To be
    /// called when a process becomes known, and now and then; what is forked later is taken in at once.
    pub fn adopt(&self) -> Result<(), ObserveError> {
        self.kernel.adopt().map_err(ObserveError::Read)
    }

    /// The state of a thread, as a scheduler sees it; `None` if it belongs to no ML process.
    pub fn task_state(&self, tid: u32) -> Result<Option<RawTaskState>, ObserveError> {
        self.kernel.task_state(tid).map_err(ObserveError::Read)
    }

    /// Takes over what the kernel has kept since the last time.
    pub fn read(&mut self) -> Result<(), ObserveError> {
        for index in 1..layout::PROCESSES {
            let raw = self.kernel.processes.read(index);
            if raw.pid == 0 {
                continue;
            }
            self.processes
                .entry(index as u32)
                .or_insert_with(|| ObservedProcess::new(&raw))
                .read(&self.kernel, index, &raw);
        }
        self.read_memory().map_err(ObserveError::Read)
    }

    fn read_memory(&mut self) -> libbpf_rs::Result<()> {
        let accounts = self.kernel.entries("memory_accounts")?;
        for (key, account) in accounts {
            let key: layout::AccountKey = key;
            if let Some(process) = self.processes.get_mut(&key.process) {
                process.set_memory(&key, &account);
            }
        }
        Ok(())
    }

    /// Every process that was seen, those that ended a short while ago included.
    pub fn processes(&self) -> impl Iterator<Item = &ObservedProcess> {
        self.processes.values()
    }

    /// Switches of ML threads that were not seen, as the next one of the thread shows: what it did
    /// meanwhile is missing from its times.
    #[must_use]
    pub fn missed_switches(&self) -> u64 {
        self.kernel.losses.read(0).switches
    }

    /// What could not be kept.
    #[must_use]
    pub fn losses(&self) -> Losses {
        let raw = self.kernel.losses.read(0);
        Losses {
            processes: raw.processes,
            histograms: raw.histograms,
            calls: raw.calls,
            allocations: raw.allocations,
            memory_accounts: raw.memory_accounts,
            communicators: raw.communicators,
            threads: raw.threads,
        }
    }
}
