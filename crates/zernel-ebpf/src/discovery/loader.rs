//! Dynamic loaders: the files that are attached to, to be told when a process loads a library.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::{fs, io};

use libbpf_rs::Link;
use object::{Object, ObjectSegment, ObjectSymbol};

use super::library::Subject;
use super::scan::Mapping;
use super::trace::Trace;
use crate::capability::reason;

/// Called by loaders before and after their list of objects changes, for debuggers to break at.
const HOOK: &[u8] = b"_dl_debug_state";
/// The `struct r_debug` of glibc's loader.
const STATE: &[u8] = b"_r_debug";
/// Where in `struct r_debug` its `r_state` is, on 64 bits.
const STATE_FIELD: u64 = 24;

/// Anyone may name a file like a loader: so large are not even those with debug information,
const LARGEST: u64 = 32 << 20;
/// and so many different ones are not on any machine.
const MOST: usize = 1024;

/// What the probe on a loader needs to know of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LoaderSymbols {
    /// Where in the file the hook is.
    pub(super) offset: usize,
    /// How far behind the hook the state is, in memory; zero if the loader exports none.
    pub(super) state_distance: u64,
}

impl LoaderSymbols {
    fn read(loader: &[u8]) -> Result<Self, String> {
        let file = object::File::parse(loader).map_err(|error| error.to_string())?;
        let address = |name| {
            let mut symbols = file.dynamic_symbols();
            let symbol = symbols.find(|symbol| symbol.name_bytes() == Ok(name));
            symbol.map(|symbol| symbol.address())
        };
        let hook = address(HOOK).ok_or("it has no _dl_debug_state")?;
        let offset = file.segments().find_map(|segment| {
            let within = hook.checked_sub(segment.address())?;
            let (start, size) = segment.file_range();
            let offset = start.checked_add(within).filter(|_| within < size)?;
            usize::try_from(offset).ok()
        });
        Ok(Self {
            offset: offset.ok_or("its _dl_debug_state is in no segment")?,
            state_distance: address(STATE).map_or(0, |state| {
                state.wrapping_add(STATE_FIELD).wrapping_sub(hook)
            }),
        })
    }
}

/// A dynamic loader that some process uses.
#[derive(Debug)]
pub struct Loader {
    /// The device of its file, as in [`MappedFile`](super::MappedFile).
    pub device: u64,
    /// Its inode.
    pub inode: u64,
    /// Its path when it was found, as the process saw it.
    pub path: PathBuf,
    /// Why it could not be attached to: libraries that its processes load after their start are
    /// found only by scanning.
    pub refusal: Option<String>,
    /// Attached while this is held.
    _link: Option<Link>,
}

/// All loaders in use, by device and inode.
#[derive(Default)]
pub(super) struct Loaders(HashMap<(u64, u64), Loader>);

impl Loaders {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Loader> {
        self.0.values()
    }

    /// Attaches to the loaders among the mappings that are new; gives whether there was one.
    pub(super) fn attach(&mut self, mappings: &[Mapping], trace: &Trace) -> bool {
        let mut attached = false;
        for mapping in mappings.iter().filter(|m| m.subject == Subject::Loader) {
            let file = (mapping.device, mapping.inode);
            if self.0.contains_key(&file) || self.0.len() >= MOST {
                continue;
            }
            // A process that is gone shows nothing; another one may show the same file.
            if let Ok(loader) = attach(mapping, trace) {
                attached |= loader.refusal.is_none();
                self.0.insert(file, loader);
            }
        }
        attached
    }

    /// Detaches from the loaders that no process uses, because an attached probe keeps their file
    /// system; gives whether there was one.
    pub(super) fn keep(&mut self, mappings: &[Mapping]) -> bool {
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
    let symbols = match fs::metadata(&file)?.len() {
        0..=LARGEST => LoaderSymbols::read(&fs::read(&file)?),
        size => Err(format!("it has {size} bytes, which no loader has")),
    };
    let link = symbols.and_then(|symbols| {
        let link = trace.attach_loader(&file, symbols);
        link.map_err(|error| reason(&error))
    });
    // A process that ended meanwhile is no fault of its loader.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_loader_is_refused() {
        assert!(LoaderSymbols::read(b"no ELF").is_err());
        let own = fs::read("/proc/self/exe").unwrap();
        let refusal = LoaderSymbols::read(&own).unwrap_err();
        assert!(refusal.contains("_dl_debug_state"), "{refusal}");
    }
}
