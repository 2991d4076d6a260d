//! Finds the installed files of a kind of library.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::LibraryKind;

impl LibraryKind {
    /// Returns the installed files of this kind: from the linker cache, `LD_LIBRARY_PATH` and
    /// Python packages. Files inside containers are not included.
    #[must_use]
    pub fn installed_paths(self) -> BTreeSet<PathBuf> {
        let paths = paths_in_linker_cache()
            .into_iter()
            .chain(paths_in_library_path())
            .chain(paths_in_python_packages());
        paths
            .filter(|path| path.file_name().and_then(Self::from_file_name) == Some(self))
            .filter_map(|path| path.canonicalize().ok())
            .collect()
    }
}

fn paths_in_linker_cache() -> Vec<PathBuf> {
    // `/sbin` is not in every user's PATH.
    let output = ["ldconfig", "/sbin/ldconfig"]
        .into_iter()
        .find_map(|program| Command::new(program).arg("-p").output().ok());
    let text = output.map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&text)
        .lines()
        .filter_map(|line| Some(PathBuf::from(line.split_once(" => ")?.1)))
        .collect()
}

fn paths_in_library_path() -> Vec<PathBuf> {
    let variable = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    env::split_paths(&variable)
        .flat_map(|folder| entries_of_folder(&folder))
        .collect()
}

/// Returns candidate files from the folders where pip and conda install NVIDIA's libraries: beside
/// every Python in the PATH, in the system's prefixes, and per user.
fn paths_in_python_packages() -> Vec<PathBuf> {
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

/// Returns the files of a library folder and of NVIDIA's packages in the Python versions below it.
fn with_python_packages(folder: &Path) -> Vec<PathBuf> {
    let files = entries_of_folder(folder);
    let pythons = files.iter().filter(|entry| {
        let name = entry.file_name().and_then(OsStr::to_str);
        name.is_some_and(|name| name.starts_with("python3"))
    });
    let libraries: Vec<_> = pythons
        .flat_map(|python| {
            ["site-packages", "dist-packages"].map(|kind| python.join(kind).join("nvidia"))
        })
        .flat_map(|packages| entries_of_folder(&packages))
        .flat_map(|package| entries_of_folder(&package.join("lib")))
        .collect();
    files.into_iter().chain(libraries).collect()
}

fn entries_of_folder(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect()
}
