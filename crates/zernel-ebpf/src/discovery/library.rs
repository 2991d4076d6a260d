//! Which files are of interest, told by their names.

/// A library whose calls tell what an ML process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LibraryKind {
    /// `libcuda.so`: the CUDA driver.
    Cuda,
    /// `libcudart.so`: the CUDA runtime.
    CudaRuntime,
    /// `libnccl.so`: collectives between GPUs.
    Nccl,
    /// `libtorch_cpu.so`: PyTorch's operators and autograd.
    TorchCpu,
    /// `libtorch_cuda.so`: PyTorch's operators on GPUs.
    TorchCuda,
    /// `libtorch_python.so`: PyTorch's Python bindings.
    TorchPython,
    /// `libc10_cuda.so`: PyTorch's GPU memory and streams.
    C10Cuda,
}

/// The names up to `.so` or a hash.
const STEMS: [(&[u8], LibraryKind); 7] = [
    (b"libcuda", LibraryKind::Cuda),
    (b"libcudart", LibraryKind::CudaRuntime),
    (b"libnccl", LibraryKind::Nccl),
    (b"libtorch_cpu", LibraryKind::TorchCpu),
    (b"libtorch_cuda", LibraryKind::TorchCuda),
    (b"libtorch_python", LibraryKind::TorchPython),
    (b"libc10_cuda", LibraryKind::C10Cuda),
];

/// What the dynamic loader's file name begins with: glibc's, the one of glibc up to 2.33, musl's.
const LOADER_PREFIXES: [&[u8]; 4] = [b"ld-linux", b"ld64.so", b"ld-2.", b"ld-musl-"];

/// The loader of Debian's musl, which other names are links to. Nothing may follow.
const LOADER_NAME: &[u8] = b"libc.so";

impl LibraryKind {
    /// What a file of that name is: `libcuda.so.1` and `libcuda.so.580.159.04` are the driver, and
    /// `libnccl-1a2b3c4d.so.2` is NCCL as a Python wheel bundles it. The name is taken without its
    /// directory.
    #[must_use]
    pub fn from_file_name(name: &[u8]) -> Option<Self> {
        let of_stem =
            |(stem, _): &&(&[u8], Self)| name.strip_prefix(*stem).is_some_and(is_shared_object);
        STEMS.iter().find(of_stem).map(|(_, kind)| *kind)
    }
}

/// Whether this is all that follows a library's stem: perhaps a hash, `.so`, perhaps a version.
fn is_shared_object(rest: &[u8]) -> bool {
    let rest = match rest.strip_prefix(b"-") {
        Some(hashed) => {
            let end = hashed.iter().position(|c| !c.is_ascii_hexdigit());
            &hashed[end.unwrap_or(hashed.len())..]
        }
        None => rest,
    };
    rest.strip_prefix(b".so").is_some_and(|version| {
        version.is_empty()
            || version.starts_with(b".") && version.iter().all(|c| c.is_ascii_digit() || *c == b'.')
    })
}

/// Why a file is of interest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Subject {
    Library(LibraryKind),
    /// The dynamic loader, which tells of every library it loads.
    Loader,
}

impl Subject {
    pub(super) fn from_file_name(name: &[u8]) -> Option<Self> {
        let is_loader = name == LOADER_NAME
            || LOADER_PREFIXES
                .iter()
                .any(|prefix| name.starts_with(prefix));
        match is_loader {
            true => Some(Self::Loader),
            false => LibraryKind::from_file_name(name).map(Self::Library),
        }
    }
}

/// The beginning of a name as a word, and which of its bytes count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, zerocopy::IntoBytes, zerocopy::Immutable)]
#[repr(C)]
pub(super) struct Prefix {
    bytes: u64,
    mask: u64,
}

impl Prefix {
    fn new(text: &[u8]) -> Self {
        let mut bytes = [0; 8];
        let mut mask = [0; 8];
        for (index, byte) in text.iter().take(8).enumerate() {
            bytes[index] = *byte;
            mask[index] = 0xff;
        }
        Self {
            bytes: u64::from_ne_bytes(bytes),
            mask: u64::from_ne_bytes(mask),
        }
    }
}

/// What the kernel lets through. Only the first word of a name is compared there, so
/// some names are let through that [`Subject::from_file_name`] then turns down.
pub(super) fn prefixes() -> Vec<Prefix> {
    let mut loader_name = LOADER_NAME.to_vec();
    loader_name.push(0);
    let stems = STEMS.iter().map(|(stem, _)| *stem);
    let mut prefixes: Vec<Prefix> = Vec::new();
    for text in stems.chain(LOADER_PREFIXES).chain([loader_name.as_slice()]) {
        let prefix = Prefix::new(text);
        if !prefixes.contains(&prefix) {
            prefixes.push(prefix);
        }
    }
    prefixes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_known_by_the_names_they_really_have() {
        for (name, kind) in [
            ("libcuda.so", LibraryKind::Cuda),
            ("libcuda.so.1", LibraryKind::Cuda),
            ("libcuda.so.580.159.04", LibraryKind::Cuda),
            ("libcudart.so.12", LibraryKind::CudaRuntime),
            ("libcudart-d0da41ae.so.11.0", LibraryKind::CudaRuntime),
            ("libnccl.so.2", LibraryKind::Nccl),
            ("libnccl.so.2.28.9", LibraryKind::Nccl),
            ("libnccl-1a2b3c4d.so.2", LibraryKind::Nccl),
            ("libtorch_cpu.so", LibraryKind::TorchCpu),
            ("libtorch_cuda.so", LibraryKind::TorchCuda),
            ("libtorch_python.so", LibraryKind::TorchPython),
            ("libc10_cuda.so", LibraryKind::C10Cuda),
        ] {
            assert_eq!(
                LibraryKind::from_file_name(name.as_bytes()),
                Some(kind),
                "{name}"
            );
        }
    }

    #[test]
    fn names_that_only_look_alike_are_not_taken() {
        for name in [
            "",
            "lib",
            "libcuda",
            "libcuda.so.1.debug",
            "libcuda.so1",
            "libcuda.sox",
            "libcuda-tests.so",
            "libcudadebugger.so.1",
            "libcudnn.so.9",
            "libtorch_cuda_linalg.so",
            "libtorch.so",
            "libc10.so",
            "/lib/libcuda.so.1",
        ] {
            assert_eq!(LibraryKind::from_file_name(name.as_bytes()), None, "{name}");
        }
    }

    #[test]
    fn loaders_are_known_too() {
        for name in [
            "ld-linux-x86-64.so.2",
            "ld-linux-aarch64.so.1",
            "ld-2.31.so",
            "ld-musl-x86_64.so.1",
            "libc.so",
        ] {
            let subject = Subject::from_file_name(name.as_bytes());
            assert_eq!(subject, Some(Subject::Loader), "{name}");
        }
        assert_eq!(Subject::from_file_name(b"libc.so.6"), None);
    }

    #[test]
    fn the_kernel_lets_every_name_of_interest_through() {
        let passes = |name: &str| {
            let mut word = [0; 8];
            let length = name.len().min(8);
            word[..length].copy_from_slice(&name.as_bytes()[..length]);
            let word = u64::from_ne_bytes(word);
            prefixes()
                .iter()
                .any(|prefix| word & prefix.mask == prefix.bytes)
        };
        for (stem, _) in STEMS {
            assert!(passes(std::str::from_utf8(stem).unwrap()));
        }
        assert!(passes("ld-linux-x86-64.so.2") && passes("libc.so"));
        assert!(!passes("libc.so.6") && !passes("libm.so.6") && !passes("ld"));
    }
}
