//! Public sched_ext schedulers that the lab compares with, built from crates.io into the cache.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use thiserror::Error;

use crate::kernel::{KernelError, cache_folder};
use crate::program_search::find_program;

/// A public sched_ext scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerScheduler {
    /// The name of the scheduler, of its crate and of its program.
    pub name: &'static str,
    /// The options that the scheduler's authors recommend besides the defaults.
    pub arguments: &'static [&'static str],
    /// The design of the scheduler in a few words.
    pub design_summary: &'static str,
}

/// All public schedulers of the lab, in the order in which they are built: small ones first.
pub const PEER_SCHEDULERS: [PeerScheduler; 9] = [
    PeerScheduler {
        name: "scx_bpfland",
        arguments: &[],
        design_summary: "virtual deadlines, favours tasks that block often",
    },
    PeerScheduler {
        name: "scx_cosmos",
        arguments: &[],
        design_summary: "per-CPU queues until the machine is saturated, then deadlines",
    },
    PeerScheduler {
        name: "scx_flash",
        arguments: &[],
        design_summary: "earliest deadline first, for predictable latency",
    },
    PeerScheduler {
        name: "scx_beerland",
        arguments: &[],
        design_summary: "locality first, for many CPUs",
    },
    PeerScheduler {
        name: "scx_tickless",
        arguments: &[],
        design_summary: "a few CPUs decide for all others, which then need no tick",
    },
    PeerScheduler {
        name: "scx_p2dq",
        arguments: &[],
        design_summary: "multi-level queues, two random choices between caches",
    },
    PeerScheduler {
        name: "scx_rusty",
        arguments: &[],
        design_summary: "one queue per last-level cache, balanced from user space",
    },
    PeerScheduler {
        name: "scx_lavd",
        arguments: &[],
        design_summary: "latency criticality from wake-up chains, for games",
    },
    PeerScheduler {
        name: "scx_layered",
        // This scheduler does not start without a configuration; its built-in one is used.
        arguments: &["--run-example"],
        design_summary: "classes of tasks by rules, with CPUs of their own",
    },
];

/// Why a public scheduler could not be built or used.
#[derive(Debug, Error)]
pub enum PeerError {
    /// There is no folder in which built programs could be kept.
    #[error(transparent)]
    NoCacheFolder(#[from] KernelError),
    /// A tool that the build needs is missing.
    #[error("{program} is not on PATH; {remedy}")]
    ToolMissing {
        /// The name of the missing tool.
        program: &'static str,
        /// How to install the tool.
        remedy: &'static str,
    },
    /// The build could not be started.
    #[error("cannot start {program}: {source}", program = program.display())]
    BuildNotStarted {
        /// The program that could not be started: cargo.
        program: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The build of a scheduler failed.
    #[error("building {name} failed ({status}); the end of its output:\n{output}")]
    BuildFailed {
        /// The name of the scheduler.
        name: &'static str,
        /// The exit status of cargo.
        status: ExitStatus,
        /// The last lines that cargo printed.
        output: String,
    },
    /// No public scheduler of the lab has this name.
    #[error("there is no peer `{name}`; there are {}", PEER_SCHEDULERS.map(|peer| peer.name).join(", "))]
    UnknownPeer {
        /// The name that the caller gave.
        name: String,
    },
}

/// The public scheduler with this name.
///
/// # Errors
/// No public scheduler of the lab has this name.
pub fn find_peer_scheduler(name: &str) -> Result<PeerScheduler, PeerError> {
    let peer = PEER_SCHEDULERS.into_iter().find(|peer| peer.name == name);
    peer.ok_or_else(|| PeerError::UnknownPeer {
        name: name.to_owned(),
    })
}

/// The folder that holds built schedulers: `<cache>/peers/bin`.
#[derive(Debug, Clone)]
pub struct PeerCache {
    folder: PathBuf,
}

impl PeerCache {
    /// The folder of this user, beside the cache of kernels.
    ///
    /// # Errors
    /// No environment variable names a folder for caches.
    pub fn from_environment() -> Result<Self, PeerError> {
        Ok(Self::in_folder(cache_folder()?))
    }

    /// A given folder, which need not exist yet.
    pub fn in_folder(folder: impl AsRef<Path>) -> Self {
        Self {
            folder: folder.as_ref().join("peers"),
        }
    }

    /// The path of a scheduler's program; `None` if it is not built.
    #[must_use]
    pub fn program_path(&self, peer: PeerScheduler) -> Option<PathBuf> {
        let path = self.folder.join("bin").join(peer.name);
        path.is_file().then_some(path)
    }

    /// The version of a built scheduler, as cargo lists it.
    #[must_use]
    pub fn built_version(&self, peer: PeerScheduler) -> Option<String> {
        let list = fs::read_to_string(self.folder.join(".crates.toml")).ok()?;
        version_in_crate_list(&list, peer.name)
    }

    /// Builds the newest published version of a scheduler with the dependencies that its authors locked. The first
    /// build takes some ten minutes on two cores; later builds share its dependencies.
    ///
    /// # Errors
    /// cargo or clang is missing, or the build fails.
    pub fn build_peer(&self, peer: PeerScheduler) -> Result<PathBuf, PeerError> {
        let cargo = find_program("cargo").ok_or(PeerError::ToolMissing {
            program: "cargo",
            remedy: "install Rust, for example with rustup",
        })?;
        let output = Command::new(&cargo)
            .args(["install", "--locked", "--force", "--root"])
            .arg(&self.folder)
            .arg(peer.name)
            .env("CARGO_TARGET_DIR", self.folder.join("target"))
            .env("BPF_CLANG", bpf_clang()?)
            // cargo runs in another folder, because cargo's configuration for the current folder is not meant for
            // foreign crates.
            .current_dir(env::temp_dir())
            .output()
            .map_err(|source| PeerError::BuildNotStarted {
                program: cargo,
                source,
            })?;
        match self.program_path(peer) {
            Some(program) if output.status.success() => Ok(program),
            _ => Err(PeerError::BuildFailed {
                name: peer.name,
                status: output.status,
                output: last_output_lines(&output.stderr),
            }),
        }
    }
}

/// The clang that compiles BPF programs: `$BPF_CLANG`, else the newest clang on `PATH`.
fn bpf_clang() -> Result<OsString, PeerError> {
    const CLANG_NAMES: [&str; 6] = [
        "clang-21", "clang-20", "clang-19", "clang-18", "clang-17", "clang",
    ];
    if let Some(configured) = env::var_os("BPF_CLANG").filter(|value| !value.is_empty()) {
        return Ok(configured);
    }
    let clang = CLANG_NAMES.iter().find_map(|name| find_program(name));
    clang.map(Into::into).ok_or(PeerError::ToolMissing {
        program: "clang",
        remedy: "install the package clang-19",
    })
}

/// The version in a line such as `"scx_bpfland 1.1.4 (registry+…)" = ["scx_bpfland"]`.
fn version_in_crate_list(list: &str, name: &str) -> Option<String> {
    let entry = list.lines().find_map(|line| {
        line.strip_prefix('"')?
            .strip_prefix(name)?
            .strip_prefix(' ')
    })?;
    entry.split(' ').next().map(str::to_owned)
}

fn last_output_lines(output: &[u8]) -> String {
    const KEPT_OUTPUT_LINES: usize = 20;
    let text = String::from_utf8_lossy(output);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(KEPT_OUTPUT_LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn installed_version_is_read_from_cargo_list() {
        let list = "[v1]\n\"scx_bpfland 1.1.4 (registry+https://x)\" = [\"scx_bpfland\"]\n\"scx_bpfland_extra 9.9 (x)\" = []\n";
        assert_eq!(
            version_in_crate_list(list, "scx_bpfland").as_deref(),
            Some("1.1.4")
        );
        assert_eq!(version_in_crate_list(list, "scx_bpf"), None);
        assert_eq!(version_in_crate_list("", "scx_bpfland"), None);
    }

    #[test]
    fn peer_is_found_by_name_and_its_program_in_cache() {
        assert_eq!(find_peer_scheduler("scx_lavd").unwrap().name, "scx_lavd");
        let error = find_peer_scheduler("scx_none").unwrap_err().to_string();
        assert!(error.contains("scx_layered"), "{error}");
        let folder = tempfile::tempdir().unwrap();
        let cache = PeerCache::in_folder(folder.path());
        assert_eq!(cache.program_path(PEER_SCHEDULERS[0]), None);
        let program = folder
            .path()
            .join("peers/bin")
            .join(PEER_SCHEDULERS[0].name);
        fs::create_dir_all(program.parent().unwrap()).unwrap();
        fs::write(&program, "").unwrap();
        assert_eq!(cache.program_path(PEER_SCHEDULERS[0]), Some(program));
        assert_eq!(cache.built_version(PEER_SCHEDULERS[0]), None);
    }
}
