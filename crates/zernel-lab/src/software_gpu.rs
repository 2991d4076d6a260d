//! Finds the software GPU's libraries on this machine.

use std::env;
use std::path::{Path, PathBuf};

/// The libraries of the software GPU that a scenario needs: the file name that cargo gives each, and the name that
/// programs load.
const CARGO_AND_REAL_LIBRARY_NAMES: [(&str, &str); 2] = [
    ("libzernel_softgpu_cuda.so", "libcuda.so.1"),
    ("libzernel_softgpu_nccl.so", "libnccl.so.2"),
];

/// The paths of the libraries and their names in the guest, from the first folder that contains both libraries.
pub(crate) fn find_libraries() -> Result<Vec<(PathBuf, &'static str)>, String> {
    let folders = candidate_folders();
    let libraries = folders
        .iter()
        .find_map(|folder| libraries_in_folder(folder));
    libraries.ok_or_else(|| {
        let folder_names: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
        format!(
            "the software GPU is not built; run `make softgpu`, or set ZERNEL_SOFTGPU_LIBRARIES to its folder (looked in {})",
            folder_names.join(", ")
        )
    })
}

/// Folders that may contain the libraries: `ZERNEL_SOFTGPU_LIBRARIES`, then the folders beside the running program.
fn candidate_folders() -> Vec<PathBuf> {
    let program = env::current_exe().unwrap_or_default();
    let program_folder = program.parent().unwrap_or(Path::new("/"));
    let configured_folder = env::var_os("ZERNEL_SOFTGPU_LIBRARIES").map(PathBuf::from);
    let folders_beside_program =
        ["../softgpu", "deps", ".", "../lib/zernel"].map(|path| program_folder.join(path));
    configured_folder
        .into_iter()
        .chain(folders_beside_program)
        .collect()
}

fn libraries_in_folder(folder: &Path) -> Option<Vec<(PathBuf, &'static str)>> {
    let library = |(cargo_name, real_name): (&str, &'static str)| {
        let candidates = [real_name, cargo_name].map(|file| folder.join(file));
        let file = candidates.into_iter().find(|path| path.is_file())?;
        Some((file, real_name))
    };
    CARGO_AND_REAL_LIBRARY_NAMES
        .into_iter()
        .map(library)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn gpu_libraries_are_found_by_cargo_or_real_name() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(libraries_in_folder(folder.path()), None);
        fs::write(folder.path().join("libcuda.so.1"), "").unwrap();
        assert_eq!(
            libraries_in_folder(folder.path()),
            None,
            "one is not enough"
        );
        fs::write(folder.path().join("libzernel_softgpu_nccl.so"), "").unwrap();
        let libraries = libraries_in_folder(folder.path()).unwrap();
        assert_eq!(libraries[1].1, "libnccl.so.2");
        assert!(libraries.iter().all(|(path, _)| path.is_file()));
    }
}
