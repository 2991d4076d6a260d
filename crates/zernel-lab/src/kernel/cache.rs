//! The cache of kernels on disk, so that each kernel is downloaded only once.
//!
//! One folder per kernel: `<cache>/kernels/<release>/{vmlinuz,config}`. A complete folder appears atomically, so any
//! number of processes may read and add kernels at once.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use crate::apt::{AptError, DebianSuite};
use crate::kernel_package::{PackagedKernel, kernels_in_packages};

use super::{Kernel, KernelError, KernelRequest, KernelVersion, file_error};

/// Debian's suites, in the order in which they are searched. Backports come first: their list is the shortest, and has
/// the newest kernels that do not change every day. Suites without support come last.
const DEBIAN_SUITES: [&str; 5] = ["trixie-backports", "trixie", "bookworm", "sid", "bullseye"];

/// Name of a file in the cache, which contains the release of the kernel that is booted by default.
const DEFAULT_KERNEL_FILE: &str = "chosen";

/// A kernel that a Debian suite offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AvailableKernel {
    /// The release of the kernel.
    pub version: KernelVersion,
    /// The name of the suite that offers the kernel.
    pub suite: &'static str,
}

/// The folder for everything that the lab downloads or builds only once.
pub(crate) fn cache_folder() -> Result<PathBuf, KernelError> {
    let nonempty_path_variable = |name| {
        env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    nonempty_path_variable("ZERNEL_CACHE")
        .or_else(|| nonempty_path_variable("XDG_CACHE_HOME").map(|folder| folder.join("zernel")))
        .or_else(|| nonempty_path_variable("HOME").map(|folder| folder.join(".cache/zernel")))
        .ok_or(KernelError::NoCacheFolder)
}

/// A folder that holds downloaded kernels.
#[derive(Debug, Clone)]
pub struct KernelCache {
    folder: PathBuf,
}

impl KernelCache {
    /// The cache of this user: `$ZERNEL_CACHE`, else `$XDG_CACHE_HOME/zernel`, else `~/.cache/zernel`.
    pub fn from_environment() -> Result<Self, KernelError> {
        cache_folder().map(Self::in_folder)
    }

    /// The cache in a given folder, which need not exist yet.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into().join("kernels"),
        }
    }

    /// Returns the newest kernel that fits the request: from the cache if it has one, else downloaded from Debian.
    pub fn obtain_kernel(&self, request: &KernelRequest) -> Result<Kernel, KernelError> {
        match self.newest_cached(request)? {
            Some(kernel) => Ok(kernel),
            None => self.fetch_newest(request),
        }
    }

    /// The newest kernel in the cache that fits the request. Never uses the network.
    pub fn newest_cached(&self, request: &KernelRequest) -> Result<Option<Kernel>, KernelError> {
        let mut fulfilling_kernels: Vec<Kernel> = self
            .cached_kernels()?
            .into_iter()
            .filter(|kernel| request.is_fulfilled_by(kernel))
            .collect();
        fulfilling_kernels.sort_by(|left, right| left.version.cmp(&right.version));
        Ok(fulfilling_kernels.pop())
    }

    /// Downloads the newest kernel that fits the request from Debian, whatever the cache holds. Kernels that turn out
    /// not to load schedulers stay in the cache, so that they are not downloaded again.
    pub fn fetch_newest(&self, request: &KernelRequest) -> Result<Kernel, KernelError> {
        let mut offered_versions = Vec::new();
        let mut unusable_kernels = Vec::new();
        let mut first_failure: Option<AptError> = None;
        for suite in DEBIAN_SUITES {
            let (suite, kernels) = match fetch_suite_with_kernels(suite) {
                Ok(suite_and_kernels) => suite_and_kernels,
                // A mirror may lack one suite and have the others, so a failure is reported only if no suite can be
                // read.
                Err(error) => {
                    first_failure = first_failure.or(Some(error));
                    continue;
                }
            };
            let candidates = kernels.iter().rev();
            let mut failed_series = Vec::new();
            for packaged_kernel in
                candidates.filter(|kernel| request.may_be_fulfilled_by(&kernel.version))
            {
                // All releases of a series were built with the same tools, so if one of them loads no scheduler, the
                // others are not tried.
                let series = packaged_kernel.version.numbers().get(..2);
                if failed_series.contains(&series) {
                    continue;
                }
                let kernel = self.download_kernel(&suite, packaged_kernel)?;
                if request.is_fulfilled_by(&kernel) {
                    return Ok(kernel);
                }
                failed_series.push(series);
                unusable_kernels.push(format!("{} {}", kernel.version, kernel.scheduler_support()));
            }
            offered_versions.extend(kernels.into_iter().map(|kernel| kernel.version));
        }
        match first_failure {
            _ if !unusable_kernels.is_empty() => Err(KernelError::NoneLoadsSchedulers {
                unusable_kernels: unusable_kernels.join("; "),
            }),
            Some(error) => Err(error.into()),
            None => Err(KernelError::no_such_kernel(request, offered_versions)),
        }
    }

    /// Lists every kernel that Debian offers, oldest first. Suites that cannot be read are left out, unless none can be
    /// read.
    pub fn kernels_offered_by_debian(&self) -> Result<Vec<AvailableKernel>, KernelError> {
        let mut available: Vec<AvailableKernel> = Vec::new();
        let mut first_failure = None;
        for suite in DEBIAN_SUITES {
            match fetch_suite_with_kernels(suite) {
                Ok((_, kernels)) => {
                    let offered = kernels.into_iter().map(|kernel| AvailableKernel {
                        version: kernel.version,
                        suite,
                    });
                    available.extend(offered);
                }
                Err(error) => first_failure = first_failure.or(Some(error)),
            }
        }
        match first_failure {
            Some(error) if available.is_empty() => Err(error.into()),
            _ => {
                // If two suites offer the same kernel, the suite that is searched first counts.
                available.sort_by(|left, right| left.version.cmp(&right.version));
                available.dedup_by(|later, earlier| later.version == earlier.version);
                Ok(available)
            }
        }
    }

    /// The kernel that is booted by default: the one chosen by [`KernelCache::set_default_kernel`].
    pub fn default_kernel(&self) -> Result<Option<Kernel>, KernelError> {
        let path = self.folder.join(DEFAULT_KERNEL_FILE);
        match fs::read_to_string(&path) {
            Ok(release) => Kernel::from_folder(&self.folder.join(release.trim())).map(Some),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(file_error(&path, error)),
        }
    }

    /// Makes a kernel the one that is booted by default. The kernel is copied into the cache, where it replaces a
    /// kernel of the same release. With `None`, the newest kernel that loads schedulers becomes the default again.
    pub fn set_default_kernel(&self, kernel: Option<&Kernel>) -> Result<(), KernelError> {
        let path = self.folder.join(DEFAULT_KERNEL_FILE);
        let Some(kernel) = kernel else {
            return match fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    Err(file_error(&path, error))
                }
                _ => Ok(()),
            };
        };
        let release = kernel.version.as_str();
        if !kernel.image_path.starts_with(self.folder.join(release)) {
            self.copy_into_cache(kernel)?;
        }
        fs::write(&path, release).map_err(|error| file_error(&path, error))
    }

    /// The kernel in the cache that has exactly this release.
    pub fn kernel_of_release(&self, release: &str) -> Result<Kernel, KernelError> {
        let mut kernels = self.cached_kernels()?.into_iter();
        let kernel = kernels.find(|candidate| candidate.version.as_str() == release);
        kernel.ok_or_else(|| KernelError::NotCached {
            release: release.to_owned(),
        })
    }

    fn copy_into_cache(&self, kernel: &Kernel) -> Result<(), KernelError> {
        let cached_folder = self.folder.join(kernel.version.as_str());
        let workspace = self.create_workspace()?;
        let complete_folder = workspace.path().join("complete");
        fs::create_dir(&complete_folder).map_err(|error| file_error(&complete_folder, error))?;
        let copy = |from: &Path, name: &str| {
            fs::copy(from, complete_folder.join(name)).map_err(|error| file_error(from, error))
        };
        copy(&kernel.image_path, "vmlinuz")?;
        match &kernel.config_path {
            Some(config) => copy(config, "config").map(drop)?,
            None => fs::write(complete_folder.join("config"), "")
                .map_err(|error| file_error(&complete_folder, error))?,
        }
        if cached_folder.exists() {
            fs::remove_dir_all(&cached_folder)
                .map_err(|error| file_error(&cached_folder, error))?;
        }
        self.move_into_cache(&complete_folder).map(drop)
    }

    /// Creates a temporary folder in which a kernel is put together. It is removed when dropped.
    fn create_workspace(&self) -> Result<tempfile::TempDir, KernelError> {
        fs::create_dir_all(&self.folder).map_err(|error| file_error(&self.folder, error))?;
        tempfile::Builder::new()
            .prefix(".fetch-")
            .tempdir_in(&self.folder)
            .map_err(|error| file_error(&self.folder, error))
    }

    /// All kernels in the cache. Folders without a complete kernel are skipped.
    pub fn cached_kernels(&self) -> Result<Vec<Kernel>, KernelError> {
        let folders = match fs::read_dir(&self.folder) {
            Ok(folders) => folders,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(file_error(&self.folder, error)),
        };
        Ok(folders
            .flatten()
            .filter_map(|folder| open_cached_kernel(&folder.path()))
            .collect())
    }

    fn download_kernel(
        &self,
        suite: &DebianSuite,
        packaged_kernel: &PackagedKernel,
    ) -> Result<Kernel, KernelError> {
        if let Ok(kernel) = self.kernel_of_release(packaged_kernel.version.as_str()) {
            return Ok(kernel);
        }
        let workspace = self.create_workspace()?;
        let unpacked_folder = workspace.path().join("unpacked");
        for package in &packaged_kernel.packages {
            suite.download_and_unpack(package, &unpacked_folder)?;
        }
        let complete_folder = workspace.path().join("complete");
        gather_image_and_config(
            &unpacked_folder,
            packaged_kernel.version.as_str(),
            &complete_folder,
        )?;
        self.move_into_cache(&complete_folder)
    }

    /// Moves the folder of a complete kernel to its place in the cache. If another process was faster, its kernel is
    /// used.
    fn move_into_cache(&self, complete_folder: &Path) -> Result<Kernel, KernelError> {
        let version = Kernel::from_folder(complete_folder)?.version;
        let cached_folder = self.folder.join(version.as_str());
        match fs::rename(complete_folder, &cached_folder) {
            Ok(()) => Kernel::from_folder(&cached_folder),
            Err(error) => {
                Kernel::from_folder(&cached_folder).map_err(|_| file_error(&cached_folder, error))
            }
        }
    }
}

fn open_cached_kernel(folder: &Path) -> Option<Kernel> {
    let is_hidden = folder.file_name()?.as_encoded_bytes().starts_with(b".");
    if is_hidden {
        None
    } else {
        Kernel::from_folder(folder).ok()
    }
}

fn fetch_suite_with_kernels(
    suite: &'static str,
) -> Result<(DebianSuite, Vec<PackagedKernel>), AptError> {
    let suite = DebianSuite::fetch_package_list(suite)?;
    let kernels = kernels_in_packages(&suite.package_names_with_prefix("linux-")?);
    Ok((suite, kernels))
}

/// Moves image and configuration out of an unpacked package; newer packages keep them with the modules.
fn gather_image_and_config(
    unpacked_folder: &Path,
    release: &str,
    complete_folder: &Path,
) -> Result<(), KernelError> {
    fs::create_dir(complete_folder).map_err(|error| file_error(complete_folder, error))?;
    for name in ["vmlinuz", "config"] {
        let candidates = [
            format!("boot/{name}-{release}"),
            format!("usr/lib/modules/{release}/{name}"),
        ];
        let file = candidates
            .iter()
            .map(|candidate| unpacked_folder.join(candidate))
            .find(|candidate| candidate.is_file());
        let file = file.ok_or_else(|| KernelError::IncompletePackage {
            release: release.to_owned(),
            name,
        })?;
        fs::rename(&file, complete_folder.join(name)).map_err(|error| file_error(&file, error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::fake_image;
    use super::*;

    fn write_cached_kernel(cache: &KernelCache, folder: &str, release: &str, config: &str) {
        let folder = cache.folder.join(folder);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("vmlinuz"), fake_image(release)).unwrap();
        fs::write(folder.join("config"), config).unwrap();
    }

    fn newest_cached_release(cache: &KernelCache, request: &str) -> Option<String> {
        let request: KernelRequest = request.parse().unwrap();
        cache
            .newest_cached(&request)
            .unwrap()
            .map(|kernel| kernel.version.to_string())
    }

    #[test]
    fn empty_or_missing_cache_has_no_kernel() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(
            newest_cached_release(&KernelCache::in_folder(folder.path()), "sched_ext"),
            None
        );
        assert_eq!(
            newest_cached_release(
                &KernelCache::in_folder(folder.path().join("missing")),
                "6.12"
            ),
            None
        );
    }

    #[test]
    fn newest_cached_kernel_matching_request_is_chosen() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::in_folder(folder.path());
        for (release, config) in [
            ("6.1.0-50-cloud-amd64", ""),
            (
                "6.12.94-cloud-amd64",
                "# CONFIG_SCHED_CLASS_EXT is not set\n",
            ),
            ("6.12.107-cloud-amd64", ""),
            ("6.18.9-cloud-amd64", "CONFIG_SCHED_CLASS_EXT=y\n"),
            ("6.18.15-cloud-amd64", "CONFIG_SCHED_CLASS_EXT=y\n"),
            ("6.19.1-without", ""),
        ] {
            write_cached_kernel(&cache, release, release, config);
        }
        assert_eq!(
            newest_cached_release(&cache, "6.1").as_deref(),
            Some("6.1.0-50-cloud-amd64")
        );
        assert_eq!(
            newest_cached_release(&cache, "6.12").as_deref(),
            Some("6.12.107-cloud-amd64")
        );
        assert_eq!(
            newest_cached_release(&cache, "6.18.9").as_deref(),
            Some("6.18.9-cloud-amd64")
        );
        assert_eq!(
            newest_cached_release(&cache, "sched_ext").as_deref(),
            Some("6.18.15-cloud-amd64")
        );
        assert_eq!(newest_cached_release(&cache, "7.2"), None);
    }

    #[test]
    fn default_kernel_is_cached_until_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::in_folder(folder.path());
        assert_eq!(cache.default_kernel().unwrap(), None);
        let image = folder.path().join("bzImage");
        for config in [None, Some(folder.path().join(".config"))] {
            fs::write(&image, fake_image("6.19.0-mine")).unwrap();
            config
                .iter()
                .for_each(|path| fs::write(path, "CONFIG_BPF=y\n").unwrap());
            let kernel = Kernel::from_image(&image, config.as_deref()).unwrap();
            cache.set_default_kernel(Some(&kernel)).unwrap();
            fs::remove_file(&image).unwrap();
            let chosen = cache.default_kernel().unwrap().unwrap();
            assert_eq!(chosen.version.as_str(), "6.19.0-mine");
            assert_eq!(chosen.has_option("CONFIG_BPF"), config.is_some());
            // A kernel that is already in the cache is not copied onto itself.
            cache
                .set_default_kernel(Some(&cache.kernel_of_release("6.19.0-mine").unwrap()))
                .unwrap();
        }
        assert!(cache.kernel_of_release("6.19").is_err());
        cache.set_default_kernel(None).unwrap();
        cache.set_default_kernel(None).unwrap();
        assert_eq!(cache.default_kernel().unwrap(), None);
    }

    #[test]
    fn incomplete_and_foreign_cache_folders_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::in_folder(folder.path());
        write_cached_kernel(&cache, ".fetch-x", "6.12.1-cloud-amd64", "");
        fs::create_dir_all(cache.folder.join("6.12.2-cloud-amd64")).unwrap();
        fs::write(cache.folder.join("a-file"), "").unwrap();
        assert_eq!(newest_cached_release(&cache, "6.12"), None);
    }

    #[test]
    fn concurrent_moves_of_one_kernel_all_succeed() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::in_folder(folder.path());
        let release = "6.12.1-cloud-amd64";
        for index in 0..8 {
            write_cached_kernel(
                &cache,
                &format!(".fetch-{index}"),
                release,
                "CONFIG_BPF=y\n",
            );
        }
        std::thread::scope(|scope| {
            for index in 0..8 {
                let cache = &cache;
                scope.spawn(move || {
                    let kernel = cache
                        .move_into_cache(&cache.folder.join(format!(".fetch-{index}")))
                        .unwrap();
                    assert_eq!(kernel.version.as_str(), release);
                    assert!(kernel.has_option("CONFIG_BPF"));
                });
            }
        });
        assert_eq!(
            newest_cached_release(&cache, "6.12").as_deref(),
            Some(release)
        );
    }

    #[test]
    fn image_and_config_are_found_in_both_package_layouts() {
        let release = "7.2.12+deb13-cloud-amd64";
        for layout in ["boot/NAME-RELEASE", "usr/lib/modules/RELEASE/NAME"] {
            let folder = tempfile::tempdir().unwrap();
            let unpacked_folder = folder.path().join("unpacked");
            for (name, content) in [("vmlinuz", fake_image(release)), ("config", Vec::new())] {
                let path =
                    unpacked_folder.join(layout.replace("NAME", name).replace("RELEASE", release));
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, content).unwrap();
            }
            gather_image_and_config(&unpacked_folder, release, &folder.path().join("complete"))
                .unwrap();
            let kernel = Kernel::from_folder(&folder.path().join("complete")).unwrap();
            assert_eq!(kernel.version.as_str(), release);
        }
    }

    #[test]
    fn package_without_image_is_error() {
        let folder = tempfile::tempdir().unwrap();
        let error =
            gather_image_and_config(folder.path(), "6.19.14", &folder.path().join("complete"))
                .unwrap_err();
        assert!(error.to_string().contains("vmlinuz"), "{error}");
    }
}
