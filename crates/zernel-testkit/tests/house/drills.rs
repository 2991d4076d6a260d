//! The example changes (drills) of CONTRIBUTING.md still apply to the sources.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::workspace;

fn drill_files(workspace: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(workspace.join("docs/drills")).expect("a folder");
    entries
        .map(|entry| entry.expect("readable").path())
        .collect()
}

#[test]
fn every_drill_diff_applies() {
    let workspace = workspace();
    let drills = drill_files(&workspace);
    assert_eq!(drills.len(), 4, "{drills:?}");
    for drill in drills {
        let mut git = Command::new("git");
        git.args(["apply", "--check"]).arg(&drill);
        let output = git.current_dir(&workspace).output().expect("git runs");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {errors}", drill.display());
    }
}

#[test]
fn every_drill_diff_is_linked_in_contributing() {
    let workspace = workspace();
    let page = fs::read_to_string(workspace.join("CONTRIBUTING.md")).expect("a page");
    for drill in drill_files(&workspace) {
        let name = drill.strip_prefix(&workspace).expect("inside").display();
        assert!(page.contains(&format!("({name})")), "{name}");
    }
}
