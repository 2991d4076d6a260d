//! Kernel versions as Debian writes them, and their order.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A kernel's release, which is the text that `uname -r` prints, for example `6.18.15+deb13-cloud-amd64`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelVersion {
    release: String,
    numbers: Vec<u32>,
    /// Number of a release candidate. A release candidate comes before the release that it leads to.
    release_candidate: Option<u32>,
    /// Debian's own number, in releases such as `6.1.0-50-cloud-amd64`.
    debian_build: u32,
}

/// The text does not start with a kernel version.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{0}` is not a kernel version; one looks like 6.18 or 6.18.15")]
pub struct BadKernelVersion(pub(crate) String);

impl KernelVersion {
    /// Whether the first numbers of the version are these: 6.12.107 starts with 6.12, but not with 6.1.
    pub fn starts_with_numbers(&self, numbers: &[u32]) -> bool {
        self.numbers.starts_with(numbers)
    }

    /// The numbers of the version, for example 6, 18 and 15.
    pub fn numbers(&self) -> &[u32] {
        &self.numbers
    }

    /// The release as text, as `uname -r` prints it.
    pub fn as_str(&self) -> &str {
        &self.release
    }
}

impl FromStr for KernelVersion {
    type Err = BadKernelVersion;

    fn from_str(release: &str) -> Result<Self, BadKernelVersion> {
        let end = release
            .find(|letter: char| !letter.is_ascii_digit() && letter != '.')
            .unwrap_or(release.len());
        let (numbers, rest) = release.split_at(end);
        let numbers =
            parse_version_numbers(numbers).ok_or_else(|| BadKernelVersion(release.to_owned()))?;
        let rest = rest.strip_prefix(['-', '~']).unwrap_or_default();
        let release_candidate = rest.strip_prefix("rc").and_then(leading_number);
        let debian_build = leading_number(rest).unwrap_or(0);
        Ok(Self {
            release: release.to_owned(),
            numbers,
            release_candidate,
            debian_build,
        })
    }
}

/// Parses a version such as `6.18.15` into its numbers; `None` if the text contains anything but numbers and dots.
pub(super) fn parse_version_numbers(text: &str) -> Option<Vec<u32>> {
    text.split('.').map(|number| number.parse().ok()).collect()
}

fn leading_number(text: &str) -> Option<u32> {
    text.split(|letter: char| !letter.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

impl Ord for KernelVersion {
    fn cmp(&self, other: &Self) -> Ordering {
        let key = |version: &Self| {
            (
                version.release_candidate.unwrap_or(u32::MAX),
                version.debian_build,
            )
        };
        self.numbers
            .cmp(&other.numbers)
            .then_with(|| key(self).cmp(&key(other)))
            .then_with(|| self.release.cmp(&other.release))
    }
}

impl PartialOrd for KernelVersion {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for KernelVersion {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.release)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_version(release: &str) -> KernelVersion {
        release.parse().unwrap()
    }

    #[test]
    fn kernel_versions_are_ordered_numerically() {
        let ascending = [
            "6.1.0-9-cloud-amd64",
            "6.1.0-50-cloud-amd64",
            "6.12.94+deb13-cloud-amd64",
            "6.12.107+deb13-cloud-amd64",
            "6.16.3+deb13-cloud-amd64",
            "7.3-rc2-cloud-amd64",
            "7.3~rc10-cloud-amd64",
            "7.3-cloud-amd64",
            "7.3.1+deb14-cloud-amd64",
        ];
        for pair in ascending.windows(2) {
            assert!(
                parse_version(pair[0]) < parse_version(pair[1]),
                "{} < {}",
                pair[0],
                pair[1]
            );
        }
    }

    #[test]
    fn series_6_1_does_not_match_6_12() {
        assert!(parse_version("6.12.107+deb13").starts_with_numbers(&[6, 12]));
        assert!(!parse_version("6.12.107+deb13").starts_with_numbers(&[6, 1]));
        assert!(parse_version("6.1.0-50").starts_with_numbers(&[6, 1]));
    }

    #[test]
    fn text_without_leading_version_is_refused() {
        for text in [
            "",
            "cloud-amd64",
            "unsigned-7.2",
            ".6",
            "6..1",
            "99999999999",
        ] {
            assert!(text.parse::<KernelVersion>().is_err(), "{text}");
        }
    }
}
