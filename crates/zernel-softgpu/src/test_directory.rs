//! A directory for one test, removed when the test ends.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

pub(crate) struct TestDirectory(PathBuf);

impl TestDirectory {
    pub(crate) fn new(name: &str) -> Self {
        let name = format!("zernel-softgpu-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        // The mode is set in spite of the umask: a node's state may not be open to others.
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700).create(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TestDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
