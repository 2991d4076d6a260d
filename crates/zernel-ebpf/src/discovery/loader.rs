//! Dynamic loaders. A probe on a loader reports when a process loads a library.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use zernel_elf::LoaderSymbols;
use zernel_identity::Tenant;

use super::library::MappedFileKind;
use super::programs::DiscoveryPrograms;
use super::scan::Mapping;
use crate::capability::innermost_reason;
use crate::child_task::{ChildOutcome, ChildTask, DescriptorHandover};
use crate::foreign_file::{ForeignFile, ON_FUSE_REASON};
use crate::overlay_layers;
use crate::probe_link::ProbeLink;
use crate::quarantine::{self, FileInProgress};
use crate::tenant_shares::TenantShares;

/// Loaders that may be attached to at once: more than any machine has. Any user can name a file like a loader.
const LOADER_SHARES: TenantShares = TenantShares {
    capacity: 1024,
    reserved_entries: 256,
    minimum_per_tenant: 8,
};
/// How long a file system may take to deliver a loader.
const MAX_READ_TIME: Duration = Duration::from_secs(10);
/// How long a scan waits for new loaders. The next scan takes over loaders that child processes attach to later.
const MAX_WAIT_FOR_NEW_LOADERS: Duration = Duration::from_millis(500);

/// A dynamic loader that some process uses.
#[derive(Debug)]
pub struct Loader {
    /// The device of the loader's file, as in [`MappedFile`](super::MappedFile).
    pub device: u64,
    /// Its inode.
    pub inode: u64,
    /// The loader's path when it was found, as the process saw it.
    pub path: PathBuf,
    /// Why no probe is attached to the loader; `None` if one is. Without a probe, only scans find the libraries that
    /// processes with this loader load after their start.
    pub refusal: Option<String>,
    tenant: Tenant,
    /// The link of the probe on the loader; dropping it detaches the probe.
    _link: Option<ProbeLink>,
}

/// Device and inode of a file.
type DeviceAndInode = (u64, u64);

/// All loaders in use.
#[derive(Default)]
pub(super) struct Loaders {
    known_loaders: HashMap<DeviceAndInode, Loader>,
    pending_loaders: HashMap<DeviceAndInode, PendingLoader>,
}

/// A loader that a child process attaches to.
struct PendingLoader {
    file: ForeignFile,
    tenant: Tenant,
    task: ChildTask<Result<(), String>>,
    _in_progress: FileInProgress,
}

impl Loaders {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Loader> {
        self.known_loaders.values()
    }

    /// Attaches to the new loaders among the mappings. Returns whether probes were attached to any.
    pub(super) fn attach_new_loaders(
        &mut self,
        mappings: &[Mapping],
        programs: &DiscoveryPrograms,
    ) -> bool {
        // While a loader does not answer, others are taken over as they come, without waiting.
        let patience = match self.pending_loaders.is_empty() {
            true => MAX_WAIT_FOR_NEW_LOADERS,
            false => Duration::ZERO,
        };
        for mapping in mappings
            .iter()
            .filter(|m| m.file_kind == MappedFileKind::Loader)
        {
            let key = (mapping.device, mapping.inode);
            if self.known_loaders.contains_key(&key) || self.pending_loaders.contains_key(&key) {
                continue;
            }
            // The file cannot be opened if the process has exited. Another process may map the same loader.
            let Ok(file) = ForeignFile::open(&mapping.map_files()) else {
                continue;
            };
            let Ok(tenant) = Tenant::of_pid(mapping.process.pid) else {
                continue;
            };
            let tenants = self.known_loaders.values().map(|loader| &loader.tenant);
            let tenants =
                tenants.chain(self.pending_loaders.values().map(|pending| &pending.tenant));
            let is_refused = !file.is_regular() || quarantine::is_quarantined(&file.identity);
            if is_refused || !LOADER_SHARES.may_add_entry(&tenant, tenants) {
                continue;
            }
            let mut kept = programs.program_descriptors();
            kept.push(file.as_fd());
            let on_overlay = overlay_layers::refusal_of_overlay(file.as_fd());
            let task =
                ChildTask::start(&tenant, MAX_READ_TIME, &kept, |handover| match on_overlay {
                    Some(reason) => Err(reason.to_owned()),
                    None => attach_to_loader(&file, programs, handover),
                });
            // If no child process can be started, the next scan tries again.
            if let Ok(task) = task {
                let loader = PendingLoader {
                    _in_progress: FileInProgress::new(file.identity),
                    file,
                    tenant,
                    task,
                };
                self.pending_loaders.insert(key, loader);
            }
        }
        self.take_attached_loaders(patience)
    }

    /// Takes over the loaders that child processes have attached to. Returns whether a child process had attached to
    /// a loader.
    fn take_attached_loaders(&mut self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let mut attached = false;
        for (key, mut pending) in std::mem::take(&mut self.pending_loaders) {
            let patience = until.saturating_duration_since(Instant::now());
            match pending.task.wait_for_result(patience) {
                None => {
                    self.pending_loaders.insert(key, pending);
                }
                Some(Ok(ChildOutcome { value, links })) => {
                    let link = value.map(|()| links.into_iter().next());
                    attached |= link.is_ok();
                    self.add_loader(key, pending.file, pending.tenant, link);
                }
                // The next scan tries again to attach to the loader.
                Some(Err(_)) => {}
            }
        }
        attached
    }

    fn add_loader(
        &mut self,
        (device, inode): DeviceAndInode,
        file: ForeignFile,
        tenant: Tenant,
        link: Result<Option<ProbeLink>, String>,
    ) {
        let (link, refusal) = match link {
            Ok(link) => (link, None),
            Err(refusal) => (None, Some(refusal)),
        };
        let loader = Loader {
            device,
            inode,
            path: file.path,
            refusal,
            tenant,
            _link: link,
        };
        self.known_loaders.insert((device, inode), loader);
    }

    /// Detaches from the loaders that no process uses: an attached probe keeps their file system mounted. Returns
    /// whether there was a loader to detach from.
    pub(super) fn detach_unused_loaders(&mut self, mappings: &[Mapping]) -> bool {
        let before = self.known_loaders.len();
        let used = mappings
            .iter()
            .filter(|m| m.file_kind == MappedFileKind::Loader);
        let used: HashSet<_> = used.map(|m| (m.device, m.inode)).collect();
        self.known_loaders.retain(|file, _| used.contains(file));
        self.known_loaders.len() < before
    }
}

/// Finds the function that a loader calls for debuggers, and attaches a probe to it. Runs in a child process.
fn attach_to_loader(
    file: &ForeignFile,
    programs: &DiscoveryPrograms,
    handover: &DescriptorHandover<'_>,
) -> Result<(), String> {
    let access = file.reopen_path();
    let symbols = LoaderSymbols::read(&access).map_err(|error| error.to_string())?;
    if file.is_on_fuse() {
        return Err(ON_FUSE_REASON.to_owned());
    }
    let (_, attached) =
        handover.attach_and_hand_over(|take| take(programs.attach_loader(&access, symbols)?));
    attached.map_err(|error| innermost_reason(&error))
}
