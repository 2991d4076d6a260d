//! GPUs and the libraries that drive them.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use procfs::process::{MMapPath, all_processes};

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
    match describe_gpus() {
        Ok(finding) => Row::ok(name, finding),
        Err(NvmlError::LibloadingError(_)) => Row::missing(
            name,
            "libnvidia-ml.so.1 is not on this machine",
            "no GPU utilisation and memory from the driver",
        )
        .remedy("install the NVIDIA driver, if this machine has such a GPU"),
        Err(error) => Row::missing(
            name,
            format!("NVML does not answer: {error}"),
            "no GPU utilisation and memory from the driver",
        )
        .remedy("see whether nvidia-smi works"),
    }
}

fn describe_gpus() -> Result<String, NvmlError> {
    let nvml = Nvml::builder()
        .lib_path(OsStr::new("libnvidia-ml.so.1"))
        .init()?;
    let driver = nvml.sys_driver_version()?;
    let names: Vec<_> = (0..nvml.device_count()?)
        .map(|index| nvml.device_by_index(index)?.name())
        .collect::<Result<_, _>>()?;
    Ok(format!(
        "{} ({}), driver {driver}",
        names.len(),
        names.join(", ")
    ))
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
fn find_library(file: &str) -> BTreeSet<PathBuf> {
    let candidates = linker_cache()
        .into_iter()
        .chain(library_path())
        .chain(python_packages());
    candidates
        .filter(|path| path.file_name() == Some(OsStr::new(file)))
        .chain(mapped(file))
        .filter_map(|path| path.canonicalize().ok())
        .collect()
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

/// Where pip and conda put NVIDIA's libraries: beside every Python in the PATH, and per user.
fn python_packages() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let prefixes = env::split_paths(&path)
        .filter(|folder| folder.join("python3").exists())
        .filter_map(|folder| Some(folder.parent()?.to_owned()))
        .chain(env::var_os("HOME").map(|home| Path::new(&home).join(".local")));
    prefixes
        .flat_map(|prefix| entries(&prefix.join("lib")))
        .flat_map(|python| {
            ["site-packages", "dist-packages"].map(|kind| python.join(kind).join("nvidia"))
        })
        .flat_map(|packages| entries(&packages))
        .flat_map(|package| entries(&package.join("lib")))
        .collect()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect()
}

fn mapped(file: &str) -> Vec<PathBuf> {
    let maps = all_processes()
        .into_iter()
        .flatten()
        .filter_map(|process| process.ok()?.maps().ok());
    maps.flat_map(|maps| maps.0)
        .filter_map(|map| match map.pathname {
            MMapPath::Path(path) => Some(path),
            _ => None,
        })
        .filter(|path| path.file_name() == Some(OsStr::new(file)))
        .collect()
}
