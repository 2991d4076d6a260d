//! The cache of results of earlier runs, by a hash of all inputs of a run.

use std::env;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use crate::kernel::cache_folder;
use crate::scenario_run::RunResult;

/// A hash (two FNV-1a hashes of 64 bits) of all inputs of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RunInputHash([u64; 2]);

impl Default for RunInputHash {
    fn default() -> Self {
        Self([0xcbf2_9ce4_8422_2325, 0x6c62_272e_07bb_0142])
    }
}

impl RunInputHash {
    /// Adds one part of the inputs with its length, so that two different lists of parts never feed the same bytes to
    /// the hash.
    pub(crate) fn add_part(&mut self, part: &[u8]) {
        const PRIMES: [u64; 2] = [0x0100_0000_01b3, 0x9e37_79b9_7f4a_7c15];
        let length = (part.len() as u64).to_le_bytes();
        for chunk in length.chunks(8).chain(part.chunks(8)) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            for (lane, prime) in self.0.iter_mut().zip(PRIMES) {
                *lane = (*lane ^ u64::from_le_bytes(word)).wrapping_mul(prime);
                *lane ^= *lane >> 29;
            }
        }
    }

    /// Adds the content of a file to the hash.
    pub(crate) fn add_file_content(&mut self, path: &Path) -> Result<(), String> {
        let content =
            fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        self.add_part(&content);
        Ok(())
    }
}

impl fmt::Display for RunInputHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:016x}{:016x}", self.0[0], self.0[1])
    }
}

/// The folder in which results are kept.
#[derive(Debug, Clone)]
pub(crate) struct RunCache {
    folder: PathBuf,
}

impl RunCache {
    /// The folder `lab` beside the cache of kernels; a temporary folder if no environment variable names a cache.
    pub(crate) fn from_environment() -> Self {
        let cache = cache_folder().unwrap_or_else(|_| env::temp_dir().join("zernel"));
        Self {
            folder: cache.join("lab"),
        }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    fn result_file(&self, input_hash: &RunInputHash) -> PathBuf {
        self.folder
            .join("results")
            .join(format!("{input_hash}.json"))
    }

    /// The result of an earlier run with these inputs; a damaged file counts as none.
    pub(crate) fn read_result(&self, input_hash: &RunInputHash) -> Option<RunResult> {
        let text = fs::read(self.result_file(input_hash)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Stores the result of a run. If that fails, the run is repeated next time.
    pub(crate) fn write_result(&self, input_hash: &RunInputHash, result: &RunResult) {
        let file = self.result_file(input_hash);
        let partial_path = file.with_extension(format!("partial-{}", std::process::id()));
        let Ok(text) = serde_json::to_vec(result) else {
            return;
        };
        let _ = fs::create_dir_all(self.folder.join("results"));
        if fs::write(&partial_path, text).is_ok() {
            let _ = fs::rename(partial_path, file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash_of_parts(parts: &[&str]) -> String {
        let mut input_hash = RunInputHash::default();
        parts
            .iter()
            .for_each(|part| input_hash.add_part(part.as_bytes()));
        input_hash.to_string()
    }

    #[test]
    fn input_hash_covers_parts_and_their_lengths() {
        let hashes = [
            hash_of_parts(&[]),
            hash_of_parts(&[""]),
            hash_of_parts(&["ab", "c"]),
            hash_of_parts(&["a", "bc"]),
            hash_of_parts(&["abc"]),
            hash_of_parts(&["abc\0"]),
        ];
        for (index, hash) in hashes.iter().enumerate() {
            assert!(!hashes[index + 1..].contains(hash), "{hashes:?}");
        }
        assert_eq!(hash_of_parts(&["abc"]), hash_of_parts(&["abc"]));
    }

    #[test]
    fn cached_result_round_trips_unless_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let cache = RunCache {
            folder: folder.path().to_owned(),
        };
        let result = RunResult {
            scenario: "s".to_owned(),
            scheduler: "eevdf".to_owned(),
            seed: 3,
            figures: None,
            findings: Vec::new(),
            kernel_warning: None,
            console: String::new(),
            host_seconds: 1.5,
        };
        let key = RunInputHash::default();
        assert_eq!(cache.read_result(&key), None);
        cache.write_result(&key, &result);
        assert_eq!(cache.read_result(&key), Some(result));
        fs::write(cache.result_file(&key), "{").unwrap();
        assert_eq!(cache.read_result(&key), None);
    }
}
