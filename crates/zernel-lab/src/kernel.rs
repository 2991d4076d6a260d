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
pub use version::{BadKernelVersion, KernelVersion};

/// The kernel option that must be set for BPF schedulers.
const SCHED_EXT_OPTION: &str = "CONFIG_SCHED_CLASS_EXT";
/// Name of a file beside a kernel's image in the cache. It lists the functions that [`malformed_scheduler_functions`]
/// found in the image.
const MALFORMED_FUNCTIONS_FILE: &str = "malformed-scheduler-functions";
/// The first kernel series whose Debian build has sched_ext.
const FIRST_SERIES_WITH_SCHED_EXT: [u32; 2] = [6, 16];

/// Why no kernel could be found or downloaded.
#[derive(Debug, Error)]
pub enum KernelError {
    /// There is no folder in which downloaded kernels could be kept.
    #[error("there is no folder for fetched kernels: set ZERNEL_CACHE, XDG_CACHE_HOME or HOME")]
    NoCacheFolder,
    /// A file of the cache, or a kernel image, could not be read or written.
    #[error("cannot use {path}: {source}", path = path.display())]
    FileUnusable {
        /// The path of the file or folder.
        path: PathBuf,
        /// The error of the operation.
        source: io::Error,
    },
    /// A file is not an x86 kernel image.
    #[error("{path} is not a bootable x86 kernel image (a vmlinuz, also called bzImage)", path = path.display())]
    NotAKernelImage {
        /// The path of the file.
        path: PathBuf,
    },
    /// The packages of a kernel could not be downloaded.
    #[error("no kernel could be fetched: {0}")]
    Apt(#[from] AptError),
    /// Debian has no such kernel.
    #[error("Debian has no kernel {request}; it has {available}")]
    NoSuchKernel {
        /// The kernel that the caller asked for.
        request: String,
        /// The kernels that Debian offers, as text.
        available: String,
    },
    /// A package that should hold a file of the kernel lacks the file.
    #[error("Debian's package of kernel {release} holds no {name}; ask for another version")]
    IncompletePackage {
        /// The release of the kernel.
        release: String,
        /// The name of the missing file.
        name: &'static str,
    },
    /// None of the downloaded kernels, the newest of each series that Debian offers, loads BPF schedulers.
    #[error(
        "no kernel that Debian offers loads schedulers: {unusable_kernels}; give one with `zernel lab kernel use`"
    )]
    NoneLoadsSchedulers {
        /// The kernels that were downloaded, each with the reason why it does not load schedulers.
        unusable_kernels: String,
    },
    /// No kernel of this release is in the cache.
    #[error(
        "{release} is neither a file nor a kernel in the cache; `zernel lab kernel list` prints those"
    )]
    NotCached {
        /// The release that the caller gave.
        release: String,
    },
    /// The text that should name a kernel is not a version.
    #[error(transparent)]
    BadKernelVersion(#[from] BadKernelVersion),
}

impl KernelError {
    fn no_such_kernel(request: &KernelRequest, mut available_versions: Vec<KernelVersion>) -> Self {
        available_versions.sort();
        available_versions.dedup();
        let names: Vec<&str> = available_versions
            .iter()
            .map(KernelVersion::as_str)
            .collect();
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
    KernelError::FileUnusable {
        path: path.to_owned(),
        source,
    }
}

/// Which kernel a caller wants. As text: `sched_ext`, or a version such as `6.12` or `6.18.15`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KernelRequest {
    /// The newest kernel that can load BPF schedulers.
    NewestWithSchedExt,
    /// The newest kernel whose version starts with these numbers.
    NewestOfSeries(Vec<u32>),
}

impl KernelRequest {
    /// Whether a kernel in the cache is one that the request asks for.
    pub fn is_fulfilled_by(&self, kernel: &Kernel) -> bool {
        match self {
            Self::NewestWithSchedExt => {
                kernel.scheduler_support() == SchedulerSupport::LoadsSchedulers
            }
            Self::NewestOfSeries(numbers) => kernel.version.starts_with_numbers(numbers),
        }
    }

    /// Whether a kernel of this version may be one that the request asks for, as far as is known before its image is
    /// downloaded.
    fn may_be_fulfilled_by(&self, version: &KernelVersion) -> bool {
        match self {
            Self::NewestWithSchedExt => version.numbers() >= FIRST_SERIES_WITH_SCHED_EXT.as_slice(),
            Self::NewestOfSeries(numbers) => version.starts_with_numbers(numbers),
        }
    }
}

impl FromStr for KernelRequest {
    type Err = BadKernelVersion;

    fn from_str(text: &str) -> Result<Self, BadKernelVersion> {
        match text {
            "sched_ext" => Ok(Self::NewestWithSchedExt),
            _ => version::parse_version_numbers(text)
                .map(Self::NewestOfSeries)
                .ok_or_else(|| BadKernelVersion(text.to_owned())),
        }
    }
}

impl fmt::Display for KernelRequest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NewestWithSchedExt => formatter.write_str("with sched_ext"),
            Self::NewestOfSeries(numbers) => {
                let numbers: Vec<String> = numbers.iter().map(ToString::to_string).collect();
                formatter.write_str(&numbers.join("."))
            }
        }
    }
}

/// Whether a kernel can load BPF schedulers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SchedulerSupport {
    /// BPF schedulers load, as far as the image shows.
    LoadsSchedulers,
    /// The kernel was built without sched_ext.
    BuiltWithoutSchedExt,
    /// The kernel was built with tools that leave these functions in a form that the verifier refuses.
    MalformedBtf(Vec<String>),
}

impl fmt::Display for SchedulerSupport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LoadsSchedulers => formatter.write_str("loads schedulers"),
            Self::BuiltWithoutSchedExt => formatter.write_str("no sched_ext"),
            Self::MalformedBtf(functions) => write!(
                formatter,
                "loads no scheduler: its BTF has {} malformed functions, such as {}",
                functions.len(),
                functions.first().map_or("", String::as_str)
            ),
        }
    }
}

/// A kernel on disk: its image and what is known about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// The release of the kernel, read from the image.
    pub version: KernelVersion,
    /// The path of the bootable image.
    pub image_path: PathBuf,
    /// The configuration that the kernel was built with, if it is known. The BPF loader in the guest reads it.
    pub config_path: Option<PathBuf>,
    /// The folder of the kernel in the cache; `None` if it is not in the cache.
    cache_folder: Option<PathBuf>,
}

impl Kernel {
    /// A kernel at any path on this machine, for example `/boot/vmlinuz-…` with `/boot/config-…`.
    pub fn from_image(
        image_path: impl AsRef<Path>,
        config_path: Option<&Path>,
    ) -> Result<Self, KernelError> {
        let image_path = absolute_path(image_path.as_ref())?;
        let version = image::read_release(&image_path)?.parse()?;
        let config_path = config_path.map(absolute_path).transpose()?;
        if let Some(config_path) = &config_path {
            File::open(config_path).map_err(|error| file_error(config_path, error))?;
        }
        Ok(Self {
            version,
            image_path,
            config_path,
            cache_folder: None,
        })
    }

    /// Whether an option is built into the kernel (`=y`). False if the configuration is unknown.
    pub fn has_option(&self, option: &str) -> bool {
        let wanted = format!("{option}=y");
        let config = self
            .config_path
            .as_ref()
            .and_then(|config| fs::read_to_string(config).ok());
        config.is_some_and(|config| config.lines().any(|line| line == wanted))
    }

    /// Whether the kernel can load BPF schedulers. Reading this from an image takes seconds, so the cache keeps the
    /// answer.
    pub fn scheduler_support(&self) -> SchedulerSupport {
        if !self.has_option(SCHED_EXT_OPTION) {
            return SchedulerSupport::BuiltWithoutSchedExt;
        }
        let cached_list_path = self
            .cache_folder
            .as_ref()
            .map(|folder| folder.join(MALFORMED_FUNCTIONS_FILE));
        let cached_list = cached_list_path
            .as_ref()
            .and_then(|cached_list_path| fs::read_to_string(cached_list_path).ok());
        let malformed: Vec<String> = match cached_list {
            Some(text) => text.lines().map(str::to_owned).collect(),
            None => {
                let btf = image::read_btf(&self.image_path).unwrap_or_default();
                malformed_scheduler_functions(&btf).unwrap_or_default()
            }
        };
        if let Some(cached_list_path) =
            cached_list_path.filter(|cached_list_path| !cached_list_path.exists())
        {
            // If the answer cannot be stored, the image is read again next time.
            let _ = fs::write(cached_list_path, malformed.join("\n"));
        }
        match malformed.is_empty() {
            true => SchedulerSupport::LoadsSchedulers,
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

fn absolute_path(path: &Path) -> Result<PathBuf, KernelError> {
    std::path::absolute(path).map_err(|error| file_error(path, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The smallest file that starts like a kernel image.
    pub(super) fn fake_image(release: &str) -> Vec<u8> {
        let mut image = vec![0; 0x300];
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x20e..0x210].copy_from_slice(&0x100_u16.to_le_bytes());
        image.extend_from_slice(release.as_bytes());
        image.extend_from_slice(b" (builder@example.org) #1 SMP\0");
        image
    }

    #[test]
    fn kernel_release_is_read_from_image() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("vmlinuz");
        fs::write(&image, fake_image("6.18.15+deb13-cloud-amd64")).unwrap();
        let kernel = Kernel::from_image(&image, None).unwrap();
        assert_eq!(kernel.version.as_str(), "6.18.15+deb13-cloud-amd64");
        assert!(!kernel.has_option("CONFIG_BPF"));
    }

    #[test]
    fn files_without_kernel_header_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        for content in [Vec::new(), vec![0x7f; 0x1000]] {
            let path = folder.path().join("file");
            fs::write(&path, content).unwrap();
            assert!(matches!(
                Kernel::from_image(&path, None),
                Err(KernelError::NotAKernelImage { .. })
            ));
        }
        let missing = folder.path().join("missing");
        assert!(matches!(
            Kernel::from_image(missing, None),
            Err(KernelError::FileUnusable { .. })
        ));
    }

    #[test]
    fn sched_ext_request_needs_6_16_or_newer() {
        let may_be_fulfilled_by = |release: &str| {
            KernelRequest::NewestWithSchedExt.may_be_fulfilled_by(&release.parse().unwrap())
        };
        assert!(!may_be_fulfilled_by("6.12.107+deb13-cloud-amd64"));
        assert!(may_be_fulfilled_by("6.16.3+deb13-cloud-amd64"));
        assert!(may_be_fulfilled_by("7.3-cloud-amd64"));
    }

    #[test]
    fn kernel_requests_are_parsed() {
        assert_eq!("sched_ext".parse(), Ok(KernelRequest::NewestWithSchedExt));
        assert_eq!(
            "6.18.15".parse(),
            Ok(KernelRequest::NewestOfSeries(vec![6, 18, 15]))
        );
        assert!("newest".parse::<KernelRequest>().is_err());
        assert!("6.x".parse::<KernelRequest>().is_err());
    }

    #[test]
    fn missing_kernel_error_lists_available_versions() {
        let available_versions =
            ["6.12.107", "6.1.0-50", "6.12.107"].map(|release| release.parse().unwrap());
        let error = KernelError::no_such_kernel(
            &KernelRequest::NewestOfSeries(vec![5, 4]),
            available_versions.to_vec(),
        );
        assert_eq!(
            error.to_string(),
            "Debian has no kernel 5.4; it has 6.1.0-50, 6.12.107"
        );
    }
}
