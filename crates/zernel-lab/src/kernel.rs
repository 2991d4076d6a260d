//! Kernels to boot: what is wanted, where it is, what it can do.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use thiserror::Error;

pub use crate::apt::AptError;

mod cache;
mod version;

pub use cache::KernelCache;
pub use version::{BadVersion, KernelVersion};

/// The kernel option for BPF schedulers.
const SCHED_EXT: &str = "CONFIG_SCHED_CLASS_EXT";
/// The first series whose Debian build has it.
const FIRST_WITH_SCHED_EXT: [u32; 2] = [6, 16];

/// Why there is no kernel to boot.
#[derive(Debug, Error)]
pub enum KernelError {
    /// No place to keep kernels.
    #[error("there is no folder for fetched kernels: set ZERNEL_CACHE, XDG_CACHE_HOME or HOME")]
    NoCacheFolder,
    /// A file could not be read or written.
    #[error("cannot use {path}: {source}", path = path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file is not an x86 kernel image.
    #[error("{path} is not a bootable x86 kernel image (a vmlinuz, also called bzImage)", path = path.display())]
    NotAnImage {
        /// The file.
        path: PathBuf,
    },
    /// The packages could not be fetched.
    #[error("no kernel could be fetched: {0}")]
    Apt(#[from] AptError),
    /// Debian has no such kernel.
    #[error("Debian has no kernel {request}; it has {available}")]
    NoSuchKernel {
        /// What was asked for.
        request: String,
        /// What there is.
        available: String,
    },
    /// A package does not hold what it should.
    #[error("Debian's package of kernel {release} holds no {name}; ask for another version")]
    IncompletePackage {
        /// The kernel.
        release: String,
        /// The missing file.
        name: &'static str,
    },
    /// The kernel Debian offers was built without BPF schedulers.
    #[error("kernel {version} was built without {SCHED_EXT}; ask for another version")]
    LacksSchedExt {
        /// The kernel.
        version: KernelVersion,
    },
    /// What was asked for is not a version.
    #[error(transparent)]
    BadVersion(#[from] BadVersion),
}

impl KernelError {
    fn no_such_kernel(request: &KernelRequest, mut seen: Vec<KernelVersion>) -> Self {
        seen.sort();
        seen.dedup();
        let names: Vec<&str> = seen.iter().map(KernelVersion::as_str).collect();
        let available = if names.is_empty() {
            "none at all".to_owned()
        } else {
            names.join(", ")
        };
        Self::NoSuchKernel {
            request: request.to_string(),
            available,
        }
    }
}

fn file_error(path: &Path, source: io::Error) -> KernelError {
    KernelError::File {
        path: path.to_owned(),
        source,
    }
}

/// Which kernel is wanted. As text: `sched_ext`, or a version such as `6.12` or `6.18.15`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KernelRequest {
    /// The newest one that can run BPF schedulers.
    SchedExt,
    /// The newest one whose version starts with these numbers.
    Series(Vec<u32>),
}

impl KernelRequest {
    /// Whether a kernel on disk is what is wanted.
    pub fn fits(&self, kernel: &Kernel) -> bool {
        match self {
            Self::SchedExt => kernel.has_option(SCHED_EXT),
            Self::Series(numbers) => kernel.version.starts_with(numbers),
        }
    }

    /// Whether a kernel of this version, of which nothing else is known yet, should be what is wanted.
    fn may_fit(&self, version: &KernelVersion) -> bool {
        match self {
            Self::SchedExt => version.numbers() >= FIRST_WITH_SCHED_EXT.as_slice(),
            Self::Series(numbers) => version.starts_with(numbers),
        }
    }
}

impl FromStr for KernelRequest {
    type Err = BadVersion;

    fn from_str(text: &str) -> Result<Self, BadVersion> {
        match text {
            "sched_ext" => Ok(Self::SchedExt),
            _ => version::parse_numbers(text)
                .map(Self::Series)
                .ok_or_else(|| BadVersion(text.to_owned())),
        }
    }
}

impl fmt::Display for KernelRequest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SchedExt => formatter.write_str("with sched_ext"),
            Self::Series(numbers) => {
                let numbers: Vec<String> = numbers.iter().map(ToString::to_string).collect();
                formatter.write_str(&numbers.join("."))
            }
        }
    }
}

/// A kernel on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Its release, read from the image.
    pub version: KernelVersion,
    /// The bootable image.
    pub image: PathBuf,
    /// What it was built with, if known. The guest's BPF loader reads it.
    pub config: Option<PathBuf>,
}

impl Kernel {
    /// A kernel already on this machine, for example `/boot/vmlinuz-…` and `/boot/config-…`.
    pub fn from_image(image: impl AsRef<Path>, config: Option<&Path>) -> Result<Self, KernelError> {
        let image = absolute(image.as_ref())?;
        let version = read_release(&image)?.parse()?;
        let config = config.map(absolute).transpose()?;
        if let Some(config) = &config {
            File::open(config).map_err(|error| file_error(config, error))?;
        }
        Ok(Self {
            version,
            image,
            config,
        })
    }

    /// Whether an option is built in (`=y`). Unknown configurations have none.
    pub fn has_option(&self, option: &str) -> bool {
        let wanted = format!("{option}=y");
        let config = self
            .config
            .as_ref()
            .and_then(|config| fs::read_to_string(config).ok());
        config.is_some_and(|config| config.lines().any(|line| line == wanted))
    }

    fn from_folder(folder: &Path) -> Result<Self, KernelError> {
        Self::from_image(folder.join("vmlinuz"), Some(&folder.join("config")))
    }
}

fn absolute(path: &Path) -> Result<PathBuf, KernelError> {
    std::path::absolute(path).map_err(|error| file_error(path, error))
}

/// The release inside an image, by the x86 boot protocol: a magic word at 0x202, and at 0x20e where the
/// text is, counted from 0x200. The text goes on with who built it.
fn read_release(image: &Path) -> Result<String, KernelError> {
    const LONGEST: usize = 128;
    let file = File::open(image).map_err(|error| file_error(image, error))?;
    let not_an_image = || KernelError::NotAnImage {
        path: image.to_owned(),
    };
    let mut header = [0; 14];
    file.read_exact_at(&mut header, 0x202)
        .map_err(|_| not_an_image())?;
    if !header.starts_with(b"HdrS") {
        return Err(not_an_image());
    }
    let offset = u64::from(u16::from_le_bytes([header[12], header[13]])) + 0x200;
    let mut text = [0; LONGEST];
    let length = file
        .read_at(&mut text, offset)
        .map_err(|error| file_error(image, error))?;
    let release = text[..length]
        .split(|byte| matches!(byte, 0 | b' '))
        .next()
        .unwrap_or_default();
    String::from_utf8(release.to_vec()).map_err(|_| not_an_image())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The smallest file that has a kernel's header.
    pub(super) fn fake_image(release: &str) -> Vec<u8> {
        let mut image = vec![0; 0x300];
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x20e..0x210].copy_from_slice(&0x100_u16.to_le_bytes());
        image.extend_from_slice(release.as_bytes());
        image.extend_from_slice(b" (builder@example.org) #1 SMP\0");
        image
    }

    #[test]
    fn the_release_is_read_from_the_image() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("vmlinuz");
        fs::write(&image, fake_image("6.18.15+deb13-cloud-amd64")).unwrap();
        let kernel = Kernel::from_image(&image, None).unwrap();
        assert_eq!(kernel.version.as_str(), "6.18.15+deb13-cloud-amd64");
        assert!(!kernel.has_option("CONFIG_BPF"));
    }

    #[test]
    fn other_files_are_not_kernels() {
        let folder = tempfile::tempdir().unwrap();
        for content in [Vec::new(), vec![0x7f; 0x1000]] {
            let path = folder.path().join("file");
            fs::write(&path, content).unwrap();
            assert!(matches!(
                Kernel::from_image(&path, None),
                Err(KernelError::NotAnImage { .. })
            ));
        }
        let missing = folder.path().join("missing");
        assert!(matches!(
            Kernel::from_image(missing, None),
            Err(KernelError::File { .. })
        ));
    }

    #[test]
    fn sched_ext_is_wanted_from_6_16_on() {
        let may_fit = |release: &str| KernelRequest::SchedExt.may_fit(&release.parse().unwrap());
        assert!(!may_fit("6.12.107+deb13-cloud-amd64"));
        assert!(may_fit("6.16.3+deb13-cloud-amd64"));
        assert!(may_fit("7.3-cloud-amd64"));
    }

    #[test]
    fn requests_are_read_from_text() {
        assert_eq!("sched_ext".parse(), Ok(KernelRequest::SchedExt));
        assert_eq!(
            "6.18.15".parse(),
            Ok(KernelRequest::Series(vec![6, 18, 15]))
        );
        assert!("newest".parse::<KernelRequest>().is_err());
        assert!("6.x".parse::<KernelRequest>().is_err());
    }

    #[test]
    fn a_kernel_that_does_not_exist_is_answered_with_those_that_do() {
        let seen = ["6.12.107", "6.1.0-50", "6.12.107"].map(|release| release.parse().unwrap());
        let error = KernelError::no_such_kernel(&KernelRequest::Series(vec![5, 4]), seen.to_vec());
        assert_eq!(
            error.to_string(),
            "Debian has no kernel 5.4; it has 6.1.0-50, 6.12.107"
        );
    }
}
