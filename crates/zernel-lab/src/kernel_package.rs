//! Finds out which of Debian's packages hold a kernel.

use std::collections::BTreeSet;

use crate::kernel::KernelVersion;

/// A kernel that can be downloaded, and the packages that together hold its image and its configuration.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PackagedKernel {
    pub(crate) version: KernelVersion,
    pub(crate) packages: Vec<String>,
}

/// The flavour of Debian's kernels that has no drivers for real hardware: it is small, and what a virtual machine needs
/// is built in.
const FLAVOUR_SUFFIX: &str = "-cloud-amd64";

/// The kernels that are complete among these package names, oldest first.
///
/// Up to 6.18 one package holds everything. Packages of later kernels only pull in `linux-binary-…` (the image) and
/// `linux-base-…` (the configuration). Backports keeps the signed part of old kernels after it has removed the rest;
/// such kernels are skipped.
pub(crate) fn kernels_in_packages(names: &[String]) -> Vec<PackagedKernel> {
    let names: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    let mut kernels: Vec<PackagedKernel> = names
        .iter()
        .filter_map(|name| packaged_kernel(name, &names))
        .collect();
    kernels.sort_by(|left, right| left.version.cmp(&right.version));
    kernels
}

fn packaged_kernel(name: &str, names: &BTreeSet<&str>) -> Option<PackagedKernel> {
    // Packages with debug symbols and with unsigned images have further suffixes; the metapackage has no version.
    let release = name
        .strip_prefix("linux-image-")
        .filter(|release| release.ends_with(FLAVOUR_SUFFIX))?;
    let version: KernelVersion = release.parse().ok()?;
    let (binary_package, base_package) = (
        format!("linux-binary-{release}"),
        format!("linux-base-{release}"),
    );
    let packages = match (
        names.contains(binary_package.as_str()),
        names.contains(base_package.as_str()),
    ) {
        (false, _) => vec![name.to_owned()],
        (true, true) => vec![binary_package, base_package],
        (true, false) => return None,
    };
    Some(PackagedKernel { version, packages })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn versions_and_packages(names: &[&str]) -> Vec<(String, Vec<String>)> {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        kernels_in_packages(&names)
            .into_iter()
            .map(|kernel| (kernel.version.to_string(), kernel.packages))
            .collect()
    }

    #[test]
    fn signed_cloud_images_are_listed_by_version() {
        let names = [
            "linux-image-cloud-amd64",
            "linux-image-6.16.3+deb13-cloud-amd64",
            "linux-image-6.12.94+deb13-cloud-amd64",
            "linux-image-6.12.94+deb13-cloud-amd64-dbg",
            "linux-image-6.12.107+deb13-cloud-amd64",
            "linux-image-6.12.107+deb13-cloud-amd64-unsigned",
            "linux-image-6.1.0-50-cloud-amd64",
            "linux-image-6.16.3+deb13-amd64",
            "linux-headers-6.16.3+deb13-cloud-amd64",
        ];
        let versions: Vec<String> = versions_and_packages(&names)
            .into_iter()
            .map(|(version, _)| version)
            .collect();
        assert_eq!(
            versions,
            [
                "6.1.0-50-cloud-amd64",
                "6.12.94+deb13-cloud-amd64",
                "6.12.107+deb13-cloud-amd64",
                "6.16.3+deb13-cloud-amd64"
            ]
        );
    }

    #[test]
    fn split_kernel_needs_binary_and_base_packages() {
        let names = [
            "linux-image-7.2.12+deb13-cloud-amd64",
            "linux-binary-7.2.12+deb13-cloud-amd64",
            "linux-binary-unsigned-7.2.12+deb13-cloud-amd64",
            "linux-base-7.2.12+deb13-cloud-amd64",
        ];
        let expected = [
            "linux-binary-7.2.12+deb13-cloud-amd64",
            "linux-base-7.2.12+deb13-cloud-amd64",
        ]
        .map(str::to_owned);
        assert_eq!(
            versions_and_packages(&names),
            [("7.2.12+deb13-cloud-amd64".to_owned(), expected.to_vec())]
        );
    }

    #[test]
    fn split_kernel_without_base_package_is_ignored() {
        let names = [
            "linux-image-6.19.14+deb13-cloud-amd64",
            "linux-binary-6.19.14+deb13-cloud-amd64",
        ];
        assert_eq!(versions_and_packages(&names), []);
    }
}
