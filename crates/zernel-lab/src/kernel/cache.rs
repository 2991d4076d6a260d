//! Kernels kept on disk, so that each is fetched once.
//!
//! One folder a kernel, `<cache>/kernels/<release>/{vmlinuz,config}`. A folder appears complete or not at
//! all, so any number of processes may look and fetch at once.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use crate::apt::{AptError, Suite};
use crate::package::{PackagedKernel, kernels_among};

use super::{Kernel, KernelError, KernelRequest, file_error};

/// Searched in this order. Backports come first: the smallest list, and the newest kernels that are not
/// being changed every day. What is no longer looked after comes last.
const SUITES: [&str; 5] = ["trixie-backports", "trixie", "bookworm", "sid", "bullseye"];

/// The folder that holds fetched kernels.
#[derive(Debug, Clone)]
pub struct KernelCache {
    folder: PathBuf,
}

impl KernelCache {
    /// The cache of this user: `$ZERNEL_CACHE`, else `$XDG_CACHE_HOME/zernel`, else `~/.cache/zernel`.
    pub fn from_environment() -> Result<Self, KernelError> {
        let set = |name| {
            env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        set("ZERNEL_CACHE")
            .or_else(|| set("XDG_CACHE_HOME").map(|folder| folder.join("zernel")))
            .or_else(|| set("HOME").map(|folder| folder.join(".cache/zernel")))
            .map(Self::at)
            .ok_or(KernelError::NoCacheFolder)
    }

    /// A cache in a given folder, which need not exist yet.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into().join("kernels"),
        }
    }

    /// The newest kernel that fits, from the cache if it has one, else fetched from Debian.
    pub fn obtain(&self, request: &KernelRequest) -> Result<Kernel, KernelError> {
        match self.cached(request)? {
            Some(kernel) => Ok(kernel),
            None => self.fetch(request),
        }
    }

    /// The newest kernel in the cache that fits. Never touches the network.
    pub fn cached(&self, request: &KernelRequest) -> Result<Option<Kernel>, KernelError> {
        let mut fitting: Vec<Kernel> = self
            .kernels()?
            .into_iter()
            .filter(|kernel| request.fits(kernel))
            .collect();
        fitting.sort_by(|left, right| left.version.cmp(&right.version));
        Ok(fitting.pop())
    }

    /// Fetches the newest kernel that fits from Debian, whatever the cache holds.
    pub fn fetch(&self, request: &KernelRequest) -> Result<Kernel, KernelError> {
        let mut seen = Vec::new();
        let mut first_failure: Option<AptError> = None;
        for suite in SUITES {
            match kernels_in(suite) {
                Ok((suite, kernels)) => {
                    let newest = kernels
                        .iter()
                        .rev()
                        .find(|kernel| request.may_fit(&kernel.version));
                    if let Some(kernel) = newest {
                        return self.install(&suite, kernel, request);
                    }
                    seen.extend(kernels.into_iter().map(|kernel| kernel.version));
                }
                // One suite may be missing from a mirror; that is no reason to give up on the others.
                Err(error) => first_failure = first_failure.or(Some(error)),
            }
        }
        match first_failure {
            Some(error) => Err(error.into()),
            None => Err(KernelError::no_such_kernel(request, seen)),
        }
    }

    /// Every kernel in the cache. What is not a complete kernel is not ours to judge and passed over.
    fn kernels(&self) -> Result<Vec<Kernel>, KernelError> {
        let folders = match fs::read_dir(&self.folder) {
            Ok(folders) => folders,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(file_error(&self.folder, error)),
        };
        Ok(folders
            .flatten()
            .filter_map(|folder| open(&folder.path()))
            .collect())
    }

    fn install(
        &self,
        suite: &Suite,
        packaged: &PackagedKernel,
        request: &KernelRequest,
    ) -> Result<Kernel, KernelError> {
        fs::create_dir_all(&self.folder).map_err(|error| file_error(&self.folder, error))?;
        let workspace = tempfile::Builder::new()
            .prefix(".fetch-")
            .tempdir_in(&self.folder)
            .map_err(|error| file_error(&self.folder, error))?;
        let unpacked = workspace.path().join("unpacked");
        for package in &packaged.packages {
            suite.unpack(package, &unpacked)?;
        }
        let complete = workspace.path().join("complete");
        gather(&unpacked, packaged.version.as_str(), &complete)?;
        let kernel = self.publish(&complete)?;
        if request.fits(&kernel) {
            Ok(kernel)
        } else {
            Err(KernelError::LacksSchedExt {
                version: kernel.version,
            })
        }
    }

    /// Moves a complete kernel to its place. Losing the race to another process is as good as winning it.
    fn publish(&self, complete: &Path) -> Result<Kernel, KernelError> {
        let version = Kernel::from_folder(complete)?.version;
        let place = self.folder.join(version.as_str());
        match fs::rename(complete, &place) {
            Ok(()) => Kernel::from_folder(&place),
            Err(error) => Kernel::from_folder(&place).map_err(|_| file_error(&place, error)),
        }
    }
}

fn open(folder: &Path) -> Option<Kernel> {
    let hidden = folder.file_name()?.as_encoded_bytes().starts_with(b".");
    if hidden {
        None
    } else {
        Kernel::from_folder(folder).ok()
    }
}

fn kernels_in(suite: &'static str) -> Result<(Suite, Vec<PackagedKernel>), AptError> {
    let suite = Suite::open(suite)?;
    let kernels = kernels_among(&suite.package_names("linux-")?);
    Ok((suite, kernels))
}

/// Moves image and configuration out of an unpacked package; newer ones keep them with the modules.
fn gather(unpacked: &Path, release: &str, complete: &Path) -> Result<(), KernelError> {
    fs::create_dir(complete).map_err(|error| file_error(complete, error))?;
    for name in ["vmlinuz", "config"] {
        let places = [
            format!("boot/{name}-{release}"),
            format!("usr/lib/modules/{release}/{name}"),
        ];
        let found = places
            .iter()
            .map(|place| unpacked.join(place))
            .find(|place| place.is_file());
        let found = found.ok_or_else(|| KernelError::IncompletePackage {
            release: release.to_owned(),
            name,
        })?;
        fs::rename(&found, complete.join(name)).map_err(|error| file_error(&found, error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::fake_image;
    use super::*;

    fn put(cache: &KernelCache, folder: &str, release: &str, config: &str) {
        let folder = cache.folder.join(folder);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("vmlinuz"), fake_image(release)).unwrap();
        fs::write(folder.join("config"), config).unwrap();
    }

    fn cached(cache: &KernelCache, request: &str) -> Option<String> {
        let request: KernelRequest = request.parse().unwrap();
        cache
            .cached(&request)
            .unwrap()
            .map(|kernel| kernel.version.to_string())
    }

    #[test]
    fn an_empty_or_missing_cache_has_nothing() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(cached(&KernelCache::at(folder.path()), "sched_ext"), None);
        assert_eq!(
            cached(&KernelCache::at(folder.path().join("missing")), "6.12"),
            None
        );
    }

    #[test]
    fn the_newest_that_fits_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::at(folder.path());
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
            put(&cache, release, release, config);
        }
        assert_eq!(
            cached(&cache, "6.1").as_deref(),
            Some("6.1.0-50-cloud-amd64")
        );
        assert_eq!(
            cached(&cache, "6.12").as_deref(),
            Some("6.12.107-cloud-amd64")
        );
        assert_eq!(
            cached(&cache, "6.18.9").as_deref(),
            Some("6.18.9-cloud-amd64")
        );
        assert_eq!(
            cached(&cache, "sched_ext").as_deref(),
            Some("6.18.15-cloud-amd64")
        );
        assert_eq!(cached(&cache, "7.2"), None);
    }

    #[test]
    fn half_fetched_and_foreign_folders_are_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::at(folder.path());
        put(&cache, ".fetch-x", "6.12.1-cloud-amd64", "");
        fs::create_dir_all(cache.folder.join("6.12.2-cloud-amd64")).unwrap();
        fs::write(cache.folder.join("a-file"), "").unwrap();
        assert_eq!(cached(&cache, "6.12"), None);
    }

    #[test]
    fn many_publishers_at_once_all_get_the_kernel() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::at(folder.path());
        let release = "6.12.1-cloud-amd64";
        for index in 0..8 {
            put(
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
                        .publish(&cache.folder.join(format!(".fetch-{index}")))
                        .unwrap();
                    assert_eq!(kernel.version.as_str(), release);
                    assert!(kernel.has_option("CONFIG_BPF"));
                });
            }
        });
        assert_eq!(cached(&cache, "6.12").as_deref(), Some(release));
    }

    #[test]
    fn both_layouts_of_the_package_are_understood() {
        let release = "7.2.12+deb13-cloud-amd64";
        for layout in ["boot/NAME-RELEASE", "usr/lib/modules/RELEASE/NAME"] {
            let folder = tempfile::tempdir().unwrap();
            let unpacked = folder.path().join("unpacked");
            for (name, content) in [("vmlinuz", fake_image(release)), ("config", Vec::new())] {
                let path = unpacked.join(layout.replace("NAME", name).replace("RELEASE", release));
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, content).unwrap();
            }
            gather(&unpacked, release, &folder.path().join("complete")).unwrap();
            let kernel = Kernel::from_folder(&folder.path().join("complete")).unwrap();
            assert_eq!(kernel.version.as_str(), release);
        }
    }

    #[test]
    fn a_package_without_an_image_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let error = gather(folder.path(), "6.19.14", &folder.path().join("complete")).unwrap_err();
        assert!(error.to_string().contains("vmlinuz"), "{error}");
    }
}
