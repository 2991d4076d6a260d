//! Links between documents lead to files and headings that exist, and `docs/README.md` lists every page.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::workspace;

fn read_document(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The paths of README.md, CONTRIBUTING.md and the pages in `docs`.
fn document_paths() -> Vec<PathBuf> {
    let entries = fs::read_dir(workspace().join("docs")).expect("a folder of documents");
    let paths = entries.map(|entry| entry.expect("readable").path());
    let is_page = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "md");
    let mut documents: Vec<PathBuf> = paths.filter(is_page).collect();
    documents.extend(["README.md", "CONTRIBUTING.md"].map(|name| workspace().join(name)));
    documents
}

/// The targets of a document's links to other files: `target` in `[text](target)`.
fn link_targets(text: &str) -> Vec<&str> {
    let rests = text.split("](").skip(1);
    let targets = rests.filter_map(|rest| rest.split_once(')'));
    let targets = targets.map(|(target, _)| target);
    targets.filter(|target| !target.contains("://")).collect()
}

/// The anchors of a document's headings, as GitHub makes them.
fn heading_anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter_map(|line| line.strip_prefix('#'));
    let anchor = |heading: &str| {
        let heading = heading.trim_start_matches('#').trim().to_lowercase();
        let is_kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
        let kept = heading.chars().filter(is_kept);
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

/// Whether a link in a document leads to a file that exists and, after `#`, to one of its headings.
fn link_target_exists(document: &Path, link: &str) -> bool {
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = match file.is_empty() {
        true => document.to_owned(),
        false => document.parent().expect("in a folder").join(file),
    };
    target.exists()
        && (anchor.is_empty() || heading_anchors(&read_document(&target)).contains(anchor))
}

#[test]
fn every_link_in_documents_resolves() {
    let mut checked = 0;
    for document in document_paths() {
        let text = read_document(&document);
        for link in link_targets(&text) {
            checked += 1;
            let place = document.display();
            assert!(link_target_exists(&document, link), "{place}: {link}");
        }
    }
    assert!(checked > 40, "{checked} links");
}

#[test]
fn every_page_is_listed_in_docs_readme() {
    let list = workspace().join("docs/README.md");
    let text = read_document(&list);
    let listed: BTreeSet<&str> = link_targets(&text).into_iter().collect();
    for page in document_paths() {
        let name = page.file_name().expect("a file").to_string_lossy();
        let is_listed = listed.contains(&*name) || listed.contains(&*format!("../{name}"));
        assert!(is_listed || page == list, "{name}");
    }
}

#[test]
fn broken_links_are_found() {
    let document = workspace().join("docs/lab.md");
    assert!(link_target_exists(&document, "lab-machine.md#kernels"));
    assert!(link_target_exists(&document, "../README.md"));
    assert!(!link_target_exists(&document, "lab-machine.md#kernel"));
    assert!(!link_target_exists(&document, "nothing.md"));
    assert_eq!(link_targets("[a](b.md#c) and [d](https://e)."), ["b.md#c"]);
    let anchors = heading_anchors("## Does it help here?\ntext\n### /api/v1\n");
    let expected = ["apiv1", "does-it-help-here"].map(str::to_owned);
    assert_eq!(anchors, BTreeSet::from(expected));
}
