//! Kinds of libraries, recognised by file name.

use std::ffi::OsStr;

/// A kind of library whose calls are evidence of ML work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LibraryKind {
    /// The CUDA driver, `libcuda`.
    Cuda,
    /// The CUDA runtime, `libcudart`.
    CudaRuntime,
    /// NVIDIA's collective communication library, `libnccl`.
    Nccl,
    /// `PyTorch`'s CPU part, `libtorch_cpu`.
    TorchCpu,
    /// `PyTorch`'s GPU part, `libtorch_cuda`.
    TorchCuda,
    /// `PyTorch`'s binding to Python, `libtorch_python`.
    TorchPython,
    /// `PyTorch`'s core, `libc10`.
    C10,
}

impl LibraryKind {
    /// All kinds.
    pub const ALL: [Self; 7] = [
        Self::Cuda,
        Self::CudaRuntime,
        Self::Nccl,
        Self::TorchCpu,
        Self::TorchCuda,
        Self::TorchPython,
        Self::C10,
    ];

    /// Returns the file name without its version: `libcuda`.
    #[must_use]
    pub fn file_stem(self) -> &'static str {
        match self {
            Self::Cuda => "libcuda",
            Self::CudaRuntime => "libcudart",
            Self::Nccl => "libnccl",
            Self::TorchCpu => "libtorch_cpu",
            Self::TorchCuda => "libtorch_cuda",
            Self::TorchPython => "libtorch_python",
            Self::C10 => "libc10",
        }
    }

    /// Returns the kind of a file with this name, as in `/proc/PID/maps`: with any version, with
    /// the hash that Python wheels add to the names of bundled libraries, or marked as deleted.
    ///
    /// The check is cheap enough for every mapping of every process. The check does not look at the content of the
    /// file.
    #[must_use]
    pub fn from_file_name(name: &OsStr) -> Option<Self> {
        let name = name.to_str()?;
        let name = name.strip_suffix(" (deleted)").unwrap_or(name);
        let (stem, version) = name.split_once(".so")?;
        if !is_version(version) {
            return None;
        }
        let stem = match stem.split_once('-') {
            Some((stem, hash)) if is_hash(hash) => stem,
            Some(_) => return None,
            None => stem,
        };
        Self::ALL.into_iter().find(|kind| kind.file_stem() == stem)
    }
}

/// Whether the text is empty or a sequence of numbers, each after a dot.
fn is_version(text: &str) -> bool {
    text.is_empty()
        || text.strip_prefix('.').is_some_and(|numbers| {
            numbers.split('.').all(|number| {
                !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
            })
        })
}

/// Whether the text is a hash. The minimum length excludes words such as `net` in the names of NCCL
/// plugins.
fn is_hash(text: &str) -> bool {
    text.len() >= 8 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind_of_file_name(name: &str) -> Option<LibraryKind> {
        LibraryKind::from_file_name(OsStr::new(name))
    }

    #[test]
    fn file_names_with_versions_and_hashes_are_recognised() {
        for (name, expected) in [
            ("libcuda.so", LibraryKind::Cuda),
            ("libcuda.so.1", LibraryKind::Cuda),
            ("libcuda.so.580.65.06", LibraryKind::Cuda),
            ("libcuda.so.580.1 (deleted)", LibraryKind::Cuda),
            ("libcudart.so.12", LibraryKind::CudaRuntime),
            ("libcudart-9335f6a2.so.12.1.105", LibraryKind::CudaRuntime),
            ("libnccl.so.2", LibraryKind::Nccl),
            ("libnccl.so.2.28.9", LibraryKind::Nccl),
            ("libnccl-1a2b3c4d.so.2", LibraryKind::Nccl),
            ("libtorch_cpu.so", LibraryKind::TorchCpu),
            ("libtorch_cuda.so", LibraryKind::TorchCuda),
            ("libtorch_python.so", LibraryKind::TorchPython),
            ("libc10.so", LibraryKind::C10),
        ] {
            assert_eq!(kind_of_file_name(name), Some(expected), "{name}");
        }
    }

    #[test]
    fn similar_file_names_are_not_recognised() {
        for name in [
            "",
            "libcuda",
            "libcuda.socket",
            "libcuda.so.",
            "libcuda.so.1.",
            "libcuda.so.1.debug",
            "libcudadebugger.so.1",
            "libnccl-net.so",
            "libnccl-tuner.so.2",
            "libnccl-.so.2",
            "libtorch.so",
            "libc10_cuda.so",
            "[heap]",
            ".so",
        ] {
            assert_eq!(kind_of_file_name(name), None, "{name}");
        }
    }
}
