//! GPUs and the libraries that drive them.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use procfs::process::{MMapPath, all_processes};
use zernel_ebpf::gpu::{Absence, Gpus};

use super::row::Row;

pub(super) fn rows() -> Vec<Row> {
    vec![
        nvml(),
        library("libcuda", "libcuda.so.1", "the NVIDIA driver"),
        library("libnccl", "libnccl.so.2", "NCCL, for example with PyTorch"),
    ]
}

fn nvml() -> Row {
    let name = "NVIDIA GPUs";
    let gpus = Gpus::open();
    let Some(absence) = gpus.absence() else {
        let (count, finding) = describe(&gpus);
        return match count {
            0 => Row::missing(name, finding, "there is no GPU to observe"),
            _ => Row::ok(name, finding),
        };
    };
    Row::missing(
        name,
        absence.to_string(),
        "no GPU utilisation and memory from the driver",
    )
    .remedy(match absence {
        Absence::NoLibrary(_) => "install the NVIDIA driver, if this machine has such a GPU",
        Absence::NotAnswering(_) => "see whether nvidia-smi works",
    })
}

/// How many there are, and what to say of them.
fn describe(gpus: &Gpus) -> (u32, String) {
    let (count, driver) = (gpus.count(), gpus.driver_version());
    let mut names: Vec<_> = gpus.facts().into_iter().map(|gpu| gpu.name).collect();
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

fn library(name: &'static str, file: &str, source: &str) -> Row {
    let found = find_library(file);
    match found.first() {
        Some(first) if found.len() == 1 => Row::ok(name, first.display().to_string()),
        Some(first) => Row::ok(
            name,
            format!("{} and {} more", first.display(), found.len() - 1),
        ),
        None => Row::missing(
            name,
            format!("no {file} in the linker's cache, Python packages or running processes"),
            "its calls cannot be observed until a process loads it",
        )
        .remedy(format!("comes with {source}")),
    }
}

/// Everywhere the library is: what running processes map, what the linker knows, what Python has.
///
/// What processes map is named as they see it, which in a container is not as we do.
fn find_library(file: &str) -> BTreeSet<PathBuf> {
    let on_disk = linker_cache()
        .into_iter()
        .chain(library_path())
        .chain(python_packages());
    on_disk
        .filter_map(|path| is_version_of(&path, file).then(|| path.canonicalize().ok())?)
        .chain(
            mapped()
                .into_iter()
                .filter(|path| is_version_of(path, file)),
        )
        .collect()
}

/// Whether a path names the library, under this or a longer version.
fn is_version_of(path: &Path, file: &str) -> bool {
    let base = file.rsplit_once('.').map_or(file, |(base, _)| base);
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    name.strip_prefix(base)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn linker_cache() -> Vec<PathBuf> {
    // Not in every user's PATH.
    let output = ["ldconfig", "/sbin/ldconfig"]
        .into_iter()
        .find_map(|program| Command::new(program).arg("-p").output().ok());
    let text = output.map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&text)
        .lines()
        .filter_map(|line| Some(PathBuf::from(line.split_once(" => ")?.1)))
        .collect()
}

fn library_path() -> Vec<PathBuf> {
    let variable = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    env::split_paths(&variable)
        .flat_map(|folder| entries(&folder))
        .collect()
}

/// Where pip and conda put NVIDIA's libraries: beside every Python in the PATH, in the system's own
/// places, and per user.
fn python_packages() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let beside_python = env::split_paths(&path).filter_map(|folder| {
        let python = folder.join("python3");
        python
            .exists()
            .then(|| folder.parent().map(Path::to_owned))?
    });
    let prefixes: BTreeSet<_> = beside_python
        .chain(env::var_os("CONDA_PREFIX").map(PathBuf::from))
        .chain(env::var_os("HOME").map(|home| Path::new(&home).join(".local")))
        .chain(["/usr", "/usr/local"].map(PathBuf::from))
        .collect();
    let folders = prefixes
        .into_iter()
        .flat_map(|prefix| ["lib", "lib64"].map(|lib| prefix.join(lib)));
    folders
        .flat_map(|folder| with_python_packages(&folder))
        .collect()
}

/// The files of a library folder, and of NVIDIA's packages in the Pythons below it.
fn with_python_packages(folder: &Path) -> Vec<PathBuf> {
    let files = entries(folder);
    let pythons = files.iter().filter(|entry| {
        let name = entry.file_name().and_then(OsStr::to_str);
        name.is_some_and(|name| name.starts_with("python3"))
    });
    let libraries: Vec<_> = pythons
        .flat_map(|python| {
            ["site-packages", "dist-packages"].map(|kind| python.join(kind).join("nvidia"))
        })
        .flat_map(|packages| entries(&packages))
        .flat_map(|package| entries(&package.join("lib")))
        .collect();
    files.into_iter().chain(libraries).collect()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect()
}

fn mapped() -> Vec<PathBuf> {
    let maps = all_processes()
        .into_iter()
        .flatten()
        .filter_map(|process| process.ok()?.maps().ok());
    let paths = maps
        .flat_map(|maps| maps.0)
        .filter_map(|map| match map.pathname {
            MMapPath::Path(path) => Some(path),
            _ => None,
        });
    paths.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_known_under_every_version() {
        for name in [
            "/a/libcuda.so.1",
            "/a/libcuda.so.580.159.04",
            "/a/libcuda.so",
        ] {
            assert!(is_version_of(Path::new(name), "libcuda.so.1"), "{name}");
        }
        for name in ["/a/libcudart.so.13", "/a/libcuda.so1", "/a/libcuda.a", "/"] {
            assert!(!is_version_of(Path::new(name), "libcuda.so.1"), "{name}");
        }
    }
}
