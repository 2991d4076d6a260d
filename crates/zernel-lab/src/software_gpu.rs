//! Where the software GPU's libraries are on this machine.

use std::env;
use std::path::{Path, PathBuf};

/// The libraries that a scenario needs: cargo's name, and the name that programs load.
const LIBRARIES: [(&str, &str); 2] = [
    ("libzernel_softgpu_cuda.so", "libcuda.so.1"),
    ("libzernel_softgpu_nccl.so", "libnccl.so.2"),
];

/// The files and their names in the guest, from the first folder that holds both.
pub(crate) fn find() -> Result<Vec<(PathBuf, &'static str)>, String> {
    let folders = folders();
    let found = folders.iter().find_map(|folder| in_folder(folder));
    found.ok_or_else(|| {
        let list: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
        format!(
            "the software GPU is not built; run `make softgpu`, or set ZERNEL_SOFTGPU_LIBRARIES to its folder (looked in {})",
            list.join(", ")
        )
    })
}

/// `ZERNEL_SOFTGPU_LIBRARIES`, then what lies beside the running program.
fn folders() -> Vec<PathBuf> {
    let program = env::current_exe().unwrap_or_default();
    let beside = program.parent().unwrap_or(Path::new("/"));
    let named = env::var_os("ZERNEL_SOFTGPU_LIBRARIES").map(PathBuf::from);
    let relative = ["../softgpu", "deps", ".", "../lib/zernel"].map(|name| beside.join(name));
    named.into_iter().chain(relative).collect()
}

fn in_folder(folder: &Path) -> Option<Vec<(PathBuf, &'static str)>> {
    let library = |(built, name): (&str, &'static str)| {
        let candidates = [name, built].map(|file| folder.join(file));
        let file = candidates.into_iter().find(|path| path.is_file())?;
        Some((file, name))
    };
    LIBRARIES.into_iter().map(library).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn both_libraries_are_found_by_either_name() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(in_folder(folder.path()), None);
        fs::write(folder.path().join("libcuda.so.1"), "").unwrap();
        assert_eq!(in_folder(folder.path()), None, "one is not enough");
        fs::write(folder.path().join("libzernel_softgpu_nccl.so"), "").unwrap();
        let found = in_folder(folder.path()).unwrap();
        assert_eq!(found[1].1, "libnccl.so.2");
        assert!(found.iter().all(|(path, _)| path.is_file()));
    }
}
