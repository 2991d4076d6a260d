//! GPUs and the libraries that drive them.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use procfs::process::all_processes;
use zernel_elf::LibraryKind;
use zernel_identity::gpu::{Gpus, NvmlUnavailable};
use zernel_identity::visit_mapped_regions;

use super::row::CheckRow;

pub(super) fn gpu_rows() -> Vec<CheckRow> {
    vec![
        nvml_row(),
        library_row(LibraryKind::Cuda, "the NVIDIA driver"),
        library_row(LibraryKind::Nccl, "NCCL, for example with PyTorch"),
    ]
}

fn nvml_row() -> CheckRow {
    let name = "NVIDIA GPUs";
    let gpus = Gpus::open();
    let Some(unavailable) = gpus.unavailable_reason() else {
        let (count, finding) = describe_gpus(&gpus);
        return match count {
            0 => CheckRow::missing(name, finding, "there is no GPU to observe"),
            _ => CheckRow::ok(name, finding),
        };
    };
    CheckRow::missing(
        name,
        unavailable.to_string(),
        "no GPU utilisation and memory from the driver",
    )
    .with_remedy(match unavailable {
        NvmlUnavailable::LibraryNotFound(_) => {
            "install the NVIDIA driver, if this machine has such a GPU"
        }
        NvmlUnavailable::LibraryFailed(_) => "check whether nvidia-smi works",
    })
}

/// The number of GPUs, and their description.
fn describe_gpus(gpus: &Gpus) -> (u32, String) {
    let (count, driver) = (gpus.gpu_count(), gpus.driver_version());
    let mut names: Vec<_> = gpus.read_facts().into_iter().map(|gpu| gpu.name).collect();
    match (count as usize).saturating_sub(names.len()) {
        0 => {}
        silent => names.push(format!("{silent} not answering")),
    }
    let driver = driver.as_deref().unwrap_or("of unknown version");
    (
        count,
        format!("{count} ({}), driver {driver}", names.join(", ")),
    )
}

fn library_row(kind: LibraryKind, source: &str) -> CheckRow {
    let name = kind.file_stem();
    let found = find_library(kind);
    match found.first() {
        Some(first) if found.len() == 1 => CheckRow::ok(name, first.display().to_string()),
        Some(first) => CheckRow::ok(
            name,
            format!("{} and {} more", first.display(), found.len() - 1),
        ),
        None => CheckRow::missing(
            name,
            format!("no {name} in the linker's cache, Python packages or running processes"),
            "its calls cannot be observed until a process loads it",
        )
        .with_remedy(format!("comes with {source}")),
    }
}

/// Paths of the library in mappings of running processes, in the linker's cache and in Python packages. The path of a
/// library that a process in a container maps is the path as that process sees it.
fn find_library(kind: LibraryKind) -> BTreeSet<PathBuf> {
    let mut found = kind.installed_paths();
    for process in all_processes().into_iter().flatten().flatten() {
        // A process that has exited maps nothing.
        let _ = visit_mapped_regions(&process, |region| {
            let path = region.path.map(|path| Path::new(OsStr::from_bytes(path)));
            let name = path.and_then(Path::file_name);
            if name.and_then(LibraryKind::from_file_name) == Some(kind) {
                found.extend(path.map(Path::to_owned));
            }
        });
    }
    found
}
