//! Kernels to boot: requests, kernels on disk, and their support for BPF schedulers.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use thiserror::Error;

pub use crate::apt::AptError;

mod btf;
mod cache;
mod image;
mod version;

pub use btf::{BadBtf, malformed_scheduler_functions};
pub(crate) use cache::cache_folder;
pub use cache::{AvailableKernel, KernelCache};
pub use version::{BadVersion, KernelVersion};

/// The kernel option for BPF schedulers.
const SCHED_EXT: &str = "CONFIG_SCHED_CLASS_EXT";
/// A file beside an image in the cache: the functions that [`malformed_scheduler_functions`] found in it.
const MALFORMED: &str = "malformed-scheduler-functions";
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
    /// No kernel that Debian offers loads BPF schedulers.
    #[error(
        "no kernel that Debian offers loads schedulers: {tried}; give one with `zernel lab kernel use`"
    )]
    NoneLoadsSchedulers {
        /// The kernels that were fetched, each with what is wrong with it.
        tried: String,
    },
    /// No kernel of this release is in the cache.
    #[error(
        "{release} is neither a file nor a kernel in the cache; `zernel lab kernel list` prints those"
    )]
    NotCached {
        /// What was given.
        release: String,
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
    /// Whether a kernel on disk fulfils the request.
    pub fn fits(&self, kernel: &Kernel) -> bool {
        match self {
            Self::SchedExt => kernel.scheduler_support() == SchedulerSupport::Loads,
            Self::Series(numbers) => kernel.version.starts_with(numbers),
        }
    }

    /// Whether a kernel of this version may fulfil the request, before its image is fetched.
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

/// Whether a kernel can load BPF schedulers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SchedulerSupport {
    /// Schedulers load, as far as the image shows.
    Loads,
    /// It was built without sched_ext.
    NotBuilt,
    /// It was built with tools that leave these functions in a form that the verifier refuses.
    MalformedBtf(Vec<String>),
}

impl fmt::Display for SchedulerSupport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loads => formatter.write_str("loads schedulers"),
            Self::NotBuilt => formatter.write_str("no sched_ext"),
            Self::MalformedBtf(functions) => write!(
                formatter,
                "loads no scheduler: its BTF has {} malformed functions, such as {}",
                functions.len(),
                functions.first().map_or("", String::as_str)
            ),
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
    /// Its folder in the cache, if it is there.
    cache_folder: Option<PathBuf>,
}

impl Kernel {
    /// A kernel already on this machine, for example `/boot/vmlinuz-…` and `/boot/config-…`.
    pub fn from_image(image: impl AsRef<Path>, config: Option<&Path>) -> Result<Self, KernelError> {
        let image = absolute(image.as_ref())?;
        let version = image::read_release(&image)?.parse()?;
        let config = config.map(absolute).transpose()?;
        if let Some(config) = &config {
            File::open(config).map_err(|error| file_error(config, error))?;
        }
        Ok(Self {
            version,
            image,
            config,
            cache_folder: None,
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

    /// Whether BPF schedulers load. Reading this from an image takes seconds, so the cache keeps it.
    pub fn scheduler_support(&self) -> SchedulerSupport {
        if !self.has_option(SCHED_EXT) {
            return SchedulerSupport::NotBuilt;
        }
        let kept = self
            .cache_folder
            .as_ref()
            .map(|folder| folder.join(MALFORMED));
        let known = kept.as_ref().and_then(|kept| fs::read_to_string(kept).ok());
        let malformed: Vec<String> = match known {
            Some(text) => text.lines().map(str::to_owned).collect(),
            None => {
                let btf = image::read_btf(&self.image).unwrap_or_default();
                malformed_scheduler_functions(&btf).unwrap_or_default()
            }
        };
        if let Some(kept) = kept.filter(|kept| !kept.exists()) {
            // If this fails, the image is read again next time.
            let _ = fs::write(kept, malformed.join("\n"));
        }
        match malformed.is_empty() {
            true => SchedulerSupport::Loads,
            false => SchedulerSupport::MalformedBtf(malformed),
        }
    }

    fn from_folder(folder: &Path) -> Result<Self, KernelError> {
        let kernel = Self::from_image(folder.join("vmlinuz"), Some(&folder.join("config")))?;
        Ok(Self {
            cache_folder: Some(folder.to_owned()),
            ..kernel
        })
    }
}

fn absolute(path: &Path) -> Result<PathBuf, KernelError> {
    std::path::absolute(path).map_err(|error| file_error(path, error))
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
