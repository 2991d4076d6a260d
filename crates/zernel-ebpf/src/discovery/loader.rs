//! Dynamic loaders. A probe on a loader reports when a process loads a library.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::{fs, io};

use libbpf_rs::Link;
use zernel_elf::{LoaderError, LoaderSymbols};

use super::library::Subject;
use super::scan::Mapping;
use super::trace::Trace;
use crate::capability::reason;

/// The most loaders that are attached to: more than any machine has. Any user can name a file like a loader.
const MAX_LOADERS: usize = 1024;

/// A dynamic loader that some process uses.
#[derive(Debug)]
pub struct Loader {
    /// The device of its file, as in [`MappedFile`](super::MappedFile).
    pub device: u64,
    /// Its inode.
    pub inode: u64,
    /// Its path when it was found, as the process saw it.
    pub path: PathBuf,
    /// Why no probe is attached to it, if so. Libraries that its processes load after their start are then found only
    /// by scanning.
    pub refusal: Option<String>,
    /// The probe; dropping it detaches.
    _link: Option<Link>,
}

/// All loaders in use, by device and inode.
#[derive(Default)]
pub(super) struct Loaders(HashMap<(u64, u64), Loader>);

impl Loaders {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Loader> {
        self.0.values()
    }

    /// Attaches to the new loaders among the mappings. Returns whether there was one.
    pub(super) fn attach(&mut self, mappings: &[Mapping], trace: &Trace) -> bool {
        let mut attached = false;
        for mapping in mappings.iter().filter(|m| m.subject == Subject::Loader) {
            let file = (mapping.device, mapping.inode);
            if self.0.contains_key(&file) || self.0.len() >= MAX_LOADERS {
                continue;
            }
            // The file cannot be opened if the process has exited. Another process may map it too.
            if let Ok(loader) = attach(mapping, trace) {
                attached |= loader.refusal.is_none();
                self.0.insert(file, loader);
            }
        }
        attached
    }

    /// Detaches from the loaders that no process uses: an attached probe keeps their file system mounted. Returns
    /// whether there was one.
    pub(super) fn detach_unused(&mut self, mappings: &[Mapping]) -> bool {
        let before = self.0.len();
        let used = mappings.iter().filter(|m| m.subject == Subject::Loader);
        let used: HashSet<_> = used.map(|m| (m.device, m.inode)).collect();
        self.0.retain(|file, _| used.contains(file));
        self.0.len() < before
    }
}

fn attach(mapping: &Mapping, trace: &Trace) -> io::Result<Loader> {
    let file = mapping.map_files();
    let path = fs::read_link(&file)?;
    let symbols = match LoaderSymbols::read(&file) {
        Err(LoaderError::Unreadable(error)) => return Err(error),
        symbols => symbols.map_err(|error| error.to_string()),
    };
    let link = symbols.and_then(|symbols| {
        let link = trace.attach_loader(&file, symbols);
        link.map_err(|error| reason(&error))
    });
    // If the process has exited meanwhile, the loader is not to blame for the error.
    fs::read_link(&file)?;
    let (link, refusal) = match link {
        Ok(link) => (Some(link), None),
        Err(refusal) => (None, Some(refusal)),
    };
    Ok(Loader {
        device: mapping.device,
        inode: mapping.inode,
        path,
        refusal,
        _link: link,
    })
}
