//! What trials need from the machine: each need has a name for `ZERNEL_REQUIRE`, and a check that returns why the need
//! is unmet. A check runs once per process, however many trials share the need.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Something that a trial needs from the machine, such as root or BPF.
#[derive(Debug, Clone, Copy)]
pub struct Need {
    /// The name of the need in `ZERNEL_REQUIRE`.
    pub name: &'static str,
    /// Checks the machine. Returns why the need is unmet.
    pub check: fn() -> Result<(), String>,
}

impl Need {
    /// The result of the check, which runs at most once per process.
    pub(crate) fn check_once(&self) -> Result<(), String> {
        static CACHED_CHECK_RESULTS: Mutex<BTreeMap<usize, Result<(), String>>> =
            Mutex::new(BTreeMap::new());
        let mut results = CACHED_CHECK_RESULTS
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // Results are kept by the address of the check. Equal addresses mean equal code. Equal code at two addresses is
        // only checked twice.
        let result = results.entry(self.check as usize);
        result.or_insert_with(self.check).clone()
    }
}

/// The need to be root.
#[must_use]
pub fn root() -> Need {
    Need {
        name: "root",
        check: || match rustix::process::geteuid().is_root() {
            true => Ok(()),
            false => Err("not root".into()),
        },
    }
}

/// The need for a kernel that loads BPF programs for this process. The caller passes the attempt to load one, because
/// this crate has no BPF program: `bpf(|| Capability::BtfTracepoint.try_out())`. Only the first attempt of a process is
/// made.
pub fn bpf<E: Display>(attempt: impl FnOnce() -> Result<(), E>) -> Need {
    static BPF_RESULT: OnceLock<Result<(), String>> = OnceLock::new();
    BPF_RESULT.get_or_init(|| attempt().map_err(|error| error.to_string()));
    Need {
        name: "bpf",
        check: || BPF_RESULT.get().cloned().expect("set above"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn check_of_need_runs_once() {
        static RUNS: AtomicU32 = AtomicU32::new(0);
        let need = Need {
            name: "bpf",
            check: || Err(format!("run {}", RUNS.fetch_add(1, Ordering::Relaxed))),
        };
        assert_eq!(need.check_once(), Err("run 0".into()));
        assert_eq!(need.check_once(), Err("run 0".into()));
    }

    #[test]
    fn bpf_need_keeps_result_of_first_attempt() {
        let first = bpf(|| Err("refused"));
        let second = bpf(|| -> Result<(), &str> { unreachable!("the first attempt counts") });
        assert_eq!(first.check_once(), Err("refused".into()));
        assert_eq!(second.check_once(), Err("refused".into()));
    }
}
