//! The probed functions of a library file.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use zernel_elf::{FunctionName, Library, LibraryError, LibraryKind, ProbeSite, TrapCost};

use super::kernel::ProbeTarget;
use crate::probes::SYMBOLS;

/// When probes are attached to a function of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum AttachMode {
    /// All the time.
    Permanent,
    /// In sampling windows.
    Sampled,
    /// Probes are never attached to the function, for the reason in the text.
    NotAttached(String),
}

/// A function of a file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct FoundFunction {
    /// Its row in [`SYMBOLS`].
    pub(crate) symbol: usize,
    /// Index of the function's name among the names of its row in [`SYMBOLS`].
    name: usize,
    pub(crate) site: Option<ProbeSite>,
    pub(crate) mode: AttachMode,
}

impl FoundFunction {
    /// Name in [`SYMBOLS`].
    pub(crate) fn name(&self) -> &'static str {
        SYMBOLS[self.symbol].names[self.name]
    }
}

/// Finds those functions of [`SYMBOLS`] that a library file exports, and where in the file to probe each. A prefix that
/// matches no export is reported as missing.
pub(super) fn find_functions(
    kind: LibraryKind,
    library: &Library,
) -> Result<Vec<FoundFunction>, LibraryError> {
    let rows = SYMBOLS.iter().enumerate();
    let rows = rows.filter(|(_, row)| row.library == kind);
    let wanted: Vec<(usize, usize)> = rows
        .flat_map(|(symbol, row)| (0..row.names.len()).map(move |name| (symbol, name)))
        .collect();
    let names: Vec<FunctionName<'_>> = wanted
        .iter()
        .map(|(symbol, name)| {
            let row = &SYMBOLS[*symbol];
            match row.is_found_by_prefix {
                true => FunctionName::Prefix(row.names[*name]),
                false => FunctionName::Exact(row.names[*name]),
            }
        })
        .collect();
    let mut functions = Vec::new();
    for ((symbol, name), sites) in wanted.into_iter().zip(library.find_functions(&names)?) {
        functions.extend(sites.into_iter().map(|site| FoundFunction {
            name,
            symbol,
            mode: match &site {
                Ok(_) => AttachMode::Permanent,
                Err(error) => AttachMode::NotAttached(error.to_string()),
            },
            site: site.ok(),
        }));
    }
    refuse_aliases(&mut functions);
    refuse_single_stepped(&mut functions);
    Ok(functions)
}

/// Refuses the second name of a function at the same offset: its calls would count twice.
fn refuse_aliases(functions: &mut [FoundFunction]) {
    let mut taken: BTreeMap<u64, &'static str> = BTreeMap::new();
    for function in functions {
        let Some(site) = function.site else { continue };
        match taken.get(&site.file_offset) {
            None => {
                taken.insert(site.file_offset, function.name());
            }
            Some(first) => {
                function.site = None;
                function.mode =
                    AttachMode::NotAttached(format!("is another name of {first}, which is probed"));
            }
        }
    }
}

/// Refuses frequent functions whose first instruction the kernel must single-step: their overhead is too high.
fn refuse_single_stepped(functions: &mut [FoundFunction]) {
    for function in functions {
        let stepped = function
            .site
            .is_some_and(|site| site.trap == TrapCost::SingleStepped);
        if stepped && SYMBOLS[function.symbol].is_frequent {
            function.site = None;
            function.mode = AttachMode::NotAttached(
                "is called often, and the kernel must single-step its first instruction".to_owned(),
            );
        }
    }
}

/// Indices in [`SYMBOLS`] of frequent functions, which may have to be sampled.
pub(super) fn frequent_symbols(functions: &[FoundFunction]) -> Vec<usize> {
    let mut symbols: Vec<_> = functions
        .iter()
        .filter(|function| function.site.is_some() && SYMBOLS[function.symbol].is_frequent)
        .map(|function| function.symbol)
        .collect();
    symbols.dedup();
    symbols
}

pub(super) fn probe_targets(
    functions: &[FoundFunction],
    wanted: impl Fn(&FoundFunction) -> bool,
) -> Vec<ProbeTarget> {
    let wanted = functions.iter().filter(|function| wanted(function));
    wanted
        .filter_map(|function| {
            Some(ProbeTarget {
                offset: function.site?.file_offset,
                symbol: function.symbol,
            })
        })
        .collect()
}

pub(super) fn infrequent_targets(functions: &[FoundFunction]) -> Vec<ProbeTarget> {
    probe_targets(functions, |function| {
        !SYMBOLS[function.symbol].is_frequent && function.mode == AttachMode::Permanent
    })
}

pub(super) fn set_attach_mode(functions: &mut [FoundFunction], symbol: usize, mode: &AttachMode) {
    for function in functions {
        if function.symbol == symbol && function.site.is_some() {
            function.mode = mode.clone();
        }
    }
}

pub(super) fn refuse_infrequent(functions: &mut [FoundFunction], problem: &str) {
    for function in functions {
        if function.site.is_some() && !SYMBOLS[function.symbol].is_frequent {
            function.mode = AttachMode::NotAttached(problem.to_owned());
        }
    }
}

#[cfg(test)]
mod tests;
