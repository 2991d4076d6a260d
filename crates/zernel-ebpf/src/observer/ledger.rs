//! The attach ledger: what is watched in which process, on which rung, or why not, and how often it
//! was called.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::files::Watch;
use super::metrics::Whose;
use super::off::Off;
use super::{ObservedProcess, Observer};
use crate::discovery::ProcessKey;
use crate::probes::SYMBOLS;

impl Observer {
    /// For each process the libraries it maps, for each library its functions. Other users' files are
    /// not told to a user.
    #[must_use]
    pub fn ledger(&self, whose: Whose) -> Value {
        let processes: Vec<Value> = self
            .maps
            .iter()
            .filter_map(|(key, files)| {
                let process = self.find(*key);
                if let Whose::User(uid) = whose
                    && owner(*key, process) != Some(uid)
                {
                    return None;
                }
                Some(self.entry(*key, process, files))
            })
            .collect();
        let mut ledger = json!({ "rung": self.rung().name(), "processes": processes });
        if whose == Whose::All {
            let files = self.files.iter();
            ledger["files"] = files.map(|file| self.file(file.number, None)).collect();
            ledger["refused"] = self
                .refused
                .iter()
                .map(|refused| json!({ "path": refused.path, "reason": refused.reason }))
                .collect();
        }
        ledger
    }

    fn find(&self, key: ProcessKey) -> Option<&ObservedProcess> {
        self.processes.values().find(|process| process.key() == key)
    }

    fn entry(
        &self,
        key: ProcessKey,
        process: Option<&ObservedProcess>,
        files: &BTreeSet<u64>,
    ) -> Value {
        let calls: BTreeMap<&str, u64> = process
            .into_iter()
            .flat_map(ObservedProcess::calls)
            .map(|(name, count)| (name, count.calls))
            .collect();
        let libraries: Vec<Value> = files
            .iter()
            .map(|number| self.file(*number, Some(&calls)))
            .collect();
        json!({ "pid": key.pid, "libraries": libraries })
    }

    fn file(&self, number: u64, calls: Option<&BTreeMap<&str, u64>>) -> Value {
        let Some(file) = self.files.iter().find(|file| file.number == number) else {
            return Value::Null;
        };
        let off = self.off.map(Off::why);
        let functions: Vec<Value> = file
            .functions
            .iter()
            .map(|function| {
                let (state, why) = match (&function.watch, &off) {
                    (Watch::Not(why), _) | (_, Some(why)) => ("not attached", Some(why)),
                    (Watch::Always, None) => ("attached", None),
                    (Watch::Sampled, None) => ("sampled", None),
                };
                let mut entry = json!({ "symbol": function.name, "state": state });
                if let Some(why) = why {
                    entry["reason"] = json!(why);
                }
                if let Some(site) = function.site.filter(|site| site.displacement > 0) {
                    entry["displacement"] = json!(site.displacement);
                }
                if let Some(calls) = calls {
                    let row = SYMBOLS[function.symbol].name();
                    entry["calls"] = json!(calls.get(row).copied().unwrap_or(0));
                }
                entry
            })
            .collect();
        json!({ "path": file.path, "kind": file.kind.stem(), "functions": functions })
    }
}

/// The user that a process belongs to.
fn owner(key: ProcessKey, process: Option<&ObservedProcess>) -> Option<u32> {
    let known = process.and_then(|process| process.identity.as_ref());
    known.map(|identity| identity.uid).or_else(|| {
        let pid = i32::try_from(key.pid).ok()?;
        procfs::process::Process::new(pid).ok()?.uid().ok()
    })
}
