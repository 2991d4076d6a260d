//! `cuGetProcAddress`: finds exported functions by their documented names, in the version that the caller was built
//! for.

use zernel_softgpu::export::Export;

use crate::calls;

const PER_THREAD_DEFAULT_STREAM: u64 = 2;

/// The result of a search for a function.
pub(crate) enum FoundProcedure {
    At(u64),
    /// The function exists, but only for callers that were built for a newer CUDA.
    TooNew,
    Unknown,
}

impl FoundProcedure {
    /// The `CUdriverProcAddressQueryResult` of the search.
    pub(crate) fn query_result_code(&self) -> i32 {
        match self {
            Self::At(_) => 0,
            Self::Unknown => 1,
            Self::TooNew => 2,
        }
    }
}

/// Functions whose exported name depends on the CUDA version that the caller was built for, newest first. Of all other
/// functions, a variant `_v2` is older than any caller, so every caller gets it.
const SYMBOLS_BY_CUDA_VERSION: &[(&str, &[(i32, &str)])] = &[
    (
        "cuCtxCreate",
        &[
            (12050, "cuCtxCreate_v4"),
            (11040, "cuCtxCreate_v3"),
            (3020, "cuCtxCreate_v2"),
        ],
    ),
    (
        "cuGetProcAddress",
        &[(12000, "cuGetProcAddress_v2"), (11030, "cuGetProcAddress")],
    ),
    (
        "cuGraphInstantiate",
        &[
            (12000, "cuGraphInstantiateWithFlags"),
            (11000, "cuGraphInstantiate_v2"),
        ],
    ),
    (
        "cuGraphAddKernelNode",
        &[(12000, "cuGraphAddKernelNode_v2")],
    ),
    (
        "cuEventElapsedTime",
        &[
            (12080, "cuEventElapsedTime_v2"),
            (2000, "cuEventElapsedTime"),
        ],
    ),
    (
        "cuStreamGetCaptureInfo",
        &[
            (12030, "cuStreamGetCaptureInfo_v3"),
            (11030, "cuStreamGetCaptureInfo_v2"),
        ],
    ),
];

/// Finds the exported function for the documented `name` and a caller that was built for CUDA `version`.
pub(crate) fn find_procedure(name: &str, version: i32, flags: u64) -> FoundProcedure {
    let suffixes: &[&str] = match flags & PER_THREAD_DEFAULT_STREAM != 0 {
        true => &["_ptsz", "_ptds", ""],
        false => &[""],
    };
    let address = |base: &str| {
        let mut names = suffixes.iter().map(|suffix| format!("{base}{suffix}"));
        names.find_map(|name| exported_address(&name))
    };
    if let Some((_, versions)) = SYMBOLS_BY_CUDA_VERSION
        .iter()
        .find(|(base, _)| *base == name)
    {
        let chosen = versions.iter().find(|(since, _)| version >= *since);
        return match chosen.and_then(|(_, exported)| address(exported)) {
            Some(found) => FoundProcedure::At(found),
            None => FoundProcedure::TooNew,
        };
    }
    let found = address(&format!("{name}_v2")).or_else(|| address(name));
    found.map_or(FoundProcedure::Unknown, FoundProcedure::At)
}

fn exported_address(name: &str) -> Option<u64> {
    let mut all = calls::ALL_EXPORTS.iter().copied().flatten();
    let found: &Export = all.find(|export| export.name == name)?;
    Some((found.address)() as u64)
}
