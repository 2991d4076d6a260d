//! Downloads Debian packages with apt and checks their signatures. The machine's own apt is not changed: nothing is
//! installed, and its package lists and settings stay as they are.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;
use thiserror::Error;

use crate::program_search::find_program;

/// Debian's archive keys, which check the signature of every index.
pub(crate) const KEYRING_PATH: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const MACHINE_SOURCES_FILE: &str = "/etc/apt/sources.list";
const MACHINE_SOURCES_FOLDER: &str = "/etc/apt/sources.list.d";

/// Why a package could not be downloaded.
#[derive(Debug, Error)]
pub enum AptError {
    /// This machine has no apt.
    #[error(
        "{program} is not on PATH, so no kernel can be fetched; give the path of a kernel on disk instead"
    )]
    ProgramMissing {
        /// The name of the missing program, such as `apt-get`.
        program: &'static str,
    },
    /// This machine has no keys to check the signatures of packages with.
    #[error(
        "{KEYRING_PATH} is missing, so no package can be trusted; install the package debian-archive-keyring"
    )]
    KeyringMissing,
    /// This machine's apt knows no Debian mirror.
    #[error(
        "no Debian mirror is named in {MACHINE_SOURCES_FILE} or {MACHINE_SOURCES_FOLDER}, so no kernel can be fetched; name one there, or give the path of a kernel on disk"
    )]
    NoMirror,
    /// A file or folder of an apt configuration could not be written or read.
    #[error("cannot use {path} for fetching packages: {source}", path = path.display())]
    FileUnusable {
        /// The path of the file or folder.
        path: PathBuf,
        /// The error of the operation.
        source: io::Error,
    },
    /// apt or dpkg failed.
    #[error("{action} failed: {reason}; check the network, the proxy and the mirror in /etc/apt")]
    CommandFailed {
        /// What apt or dpkg was doing, such as downloading a package.
        action: String,
        /// The error output of apt or dpkg.
        reason: String,
    },
}

/// A private apt configuration for one Debian suite, removed on drop.
pub(crate) struct DebianSuite {
    name: &'static str,
    folder: TempDir,
}

impl DebianSuite {
    /// Downloads the package list of a suite.
    pub(crate) fn fetch_package_list(name: &'static str) -> Result<Self, AptError> {
        check_can_fetch_packages()?;
        let folder = tempfile::Builder::new()
            .prefix("zernel-apt-")
            .tempdir()
            .map_err(|source| AptError::FileUnusable {
                path: std::env::temp_dir(),
                source,
            })?;
        let suite = Self { name, folder };
        suite.write_configuration()?;
        suite.run_command(
            &mut suite.apt_command("apt-get", &["update"]),
            format!("reading Debian's {name} package list"),
        )?;
        Ok(suite)
    }

    /// The names of all packages of the suite that start with `prefix`.
    pub(crate) fn package_names_with_prefix(&self, prefix: &str) -> Result<Vec<String>, AptError> {
        let mut command = self.apt_command("apt-cache", &["pkgnames", prefix]);
        let output = self.run_command(
            &mut command,
            format!("listing the packages of {}", self.name),
        )?;
        Ok(String::from_utf8_lossy(&output.stdout)
            .lines()
            .map(str::to_owned)
            .collect())
    }

    /// Downloads a package of the suite and unpacks its files into `target_folder`, without installing the package.
    pub(crate) fn download_and_unpack(
        &self,
        package: &str,
        target_folder: &Path,
    ) -> Result<(), AptError> {
        let downloads = self.file_path("downloads").join(package);
        create_folder(&downloads)?;
        let mut command = self.apt_command("apt-get", &["download", package]);
        self.run_command(
            command.current_dir(&downloads),
            format!("downloading {package}"),
        )?;
        for archive in files_in_folder(&downloads)? {
            let mut command = Command::new("dpkg-deb");
            command.arg("--extract").arg(&archive).arg(target_folder);
            self.run_command(&mut command, format!("unpacking {package}"))?;
        }
        Ok(())
    }

    fn file_path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes the private apt configuration. apt writes below the folder of this configuration only. The machine's own
    /// settings (proxies, timeouts) are read first and stay valid; its hooks and pinning are disabled.
    fn write_configuration(&self) -> Result<(), AptError> {
        for folder in ["lists/partial", "cache/archives/partial", "downloads"] {
            create_folder(&self.file_path(folder))?;
        }
        let root = self.folder.path().display();
        let settings = format!(
            r#"Dir::State "{root}";
Dir::State::lists "{root}/lists";
Dir::State::status "{root}/status";
Dir::Cache "{root}/cache";
Dir::Etc::sourcelist "{root}/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
APT::Sandbox::User "root";
Acquire::Retries "1";
APT::Update::Error-Mode "any";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
"#
        );
        let mirror = machine_mirror().ok_or(AptError::NoMirror)?;
        let source = format!(
            "deb [arch=amd64 target=Packages signed-by={KEYRING_PATH}] {mirror} {} main\n",
            self.name
        );
        write_file(&self.file_path("apt.conf"), &settings)?;
        write_file(&self.file_path("sources.list"), &source)?;
        write_file(&self.file_path("status"), "")
    }

    fn apt_command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command
            .arg("--config-file")
            .arg(self.file_path("apt.conf"))
            .args(arguments)
            .env("LC_ALL", "C.UTF-8");
        command
    }

    fn run_command(&self, command: &mut Command, action: String) -> Result<Output, AptError> {
        match command.output() {
            Ok(output) if output.status.success() => Ok(output),
            Ok(output) => Err(AptError::CommandFailed {
                action,
                reason: error_lines(&output),
            }),
            Err(error) => Err(AptError::CommandFailed {
                action,
                reason: error.to_string(),
            }),
        }
    }
}

/// Checks that packages can be downloaded on this machine, provided the network works.
pub(crate) fn check_can_fetch_packages() -> Result<(), AptError> {
    for program in ["apt-get", "apt-cache", "dpkg-deb"] {
        if find_program(program).is_none() {
            return Err(AptError::ProgramMissing { program });
        }
    }
    if !Path::new(KEYRING_PATH).is_file() {
        return Err(AptError::KeyringMissing);
    }
    machine_mirror().map(drop).ok_or(AptError::NoMirror)
}

/// The errors in apt's output, without progress and warnings.
fn error_lines(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let errors: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("E: "))
        .collect();
    if errors.is_empty() {
        text.trim().to_owned()
    } else {
        errors.join("; ")
    }
}

fn create_folder(path: &Path) -> Result<(), AptError> {
    fs::create_dir_all(path).map_err(|source| AptError::FileUnusable {
        path: path.to_owned(),
        source,
    })
}

fn write_file(path: &Path, content: &str) -> Result<(), AptError> {
    fs::write(path, content).map_err(|source| AptError::FileUnusable {
        path: path.to_owned(),
        source,
    })
}

fn files_in_folder(folder: &Path) -> Result<Vec<PathBuf>, AptError> {
    let list_paths = || -> io::Result<Vec<PathBuf>> {
        fs::read_dir(folder)?
            .map(|entry| Ok(entry?.path()))
            .collect()
    };
    list_paths().map_err(|source| AptError::FileUnusable {
        path: folder.to_owned(),
        source,
    })
}

/// The Debian mirror that this machine's own apt uses.
fn machine_mirror() -> Option<String> {
    let mut files = vec![PathBuf::from(MACHINE_SOURCES_FILE)];
    let mut parts = files_in_folder(Path::new(MACHINE_SOURCES_FOLDER)).unwrap_or_default();
    parts.sort();
    files.extend(parts);
    files.iter().find_map(|file| {
        let text = fs::read_to_string(file).ok()?;
        match file.extension()?.to_str()? {
            "list" => mirror_in_lines(&text),
            "sources" => mirror_in_stanzas(&text),
            _ => None,
        }
    })
}

/// The Debian mirror in a source list of the one-line format: `deb [options] URI suite component…`.
fn mirror_in_lines(text: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let line = line.split('#').next()?.trim().strip_prefix("deb")?;
        let line = line.strip_prefix(char::is_whitespace)?.trim_start();
        let line = match line.strip_prefix('[') {
            Some(options) => options.split_once(']')?.1,
            None => line,
        };
        let mut words = line.split_whitespace();
        let (mirror, suite) = (words.next()?, words.next()?);
        is_debian_archive(mirror, &[suite], &words.collect::<Vec<_>>()).then(|| mirror.to_owned())
    })
}

/// The Debian mirror in a source list of the deb822 format: stanzas of `Field: value` lines.
fn mirror_in_stanzas(text: &str) -> Option<String> {
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    lines
        .split(|line| line.trim().is_empty())
        .find_map(|stanza| {
            if field_words(stanza, "Enabled").first() == Some(&"no")
                || !field_words(stanza, "Types").contains(&"deb")
            {
                return None;
            }
            let mirror = *field_words(stanza, "URIs").first()?;
            is_debian_archive(
                mirror,
                &field_words(stanza, "Suites"),
                &field_words(stanza, "Components"),
            )
            .then(|| mirror.to_owned())
        })
}

/// The words of a field in a deb822 stanza, including its continuation lines.
fn field_words<'a>(stanza: &[&'a str], name: &str) -> Vec<&'a str> {
    let value = |line: &&'a str| {
        let (key, value) = line.split_once(':')?;
        key.eq_ignore_ascii_case(name).then_some(value)
    };
    let Some(start) = stanza.iter().position(|line| value(line).is_some()) else {
        return Vec::new();
    };
    let continued = stanza[start + 1..]
        .iter()
        .take_while(|line| line.starts_with([' ', '\t']))
        .copied();
    value(&stanza[start])
        .into_iter()
        .chain(continued)
        .flat_map(str::split_whitespace)
        .collect()
}

/// Whether a source is Debian's main archive, not its security archive and not another vendor's packages for Debian. A
/// wrong guess is harmless: the packages of another archive would not have Debian's signature.
fn is_debian_archive(mirror: &str, suites: &[&str], components: &[&str]) -> bool {
    const DEBIAN_SUITES: [&str; 9] = [
        "bullseye",
        "bookworm",
        "trixie",
        "forky",
        "sid",
        "stable",
        "testing",
        "unstable",
        "oldstable",
    ];
    mirror
        .split('/')
        .any(|segment| segment == "debian" || segment == "debian.list")
        && suites.iter().any(|suite| DEBIAN_SUITES.contains(suite))
        && components.contains(&"main")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirror_is_read_from_deb822_stanzas() {
        let text = "\
# a comment
Types: deb
URIs: https://deb.example.com/node_20.x
Suites: nodistro
Components: main

Types: deb
URIs: http://old.example.org/debian
Suites: bookworm
Components: main
Enabled: no

Types: deb-src
URIs: http://source.example.org/debian
Suites: bookworm
Components: main

Types: deb deb-src
# a comment in the middle
URIs: http://security.example.org/debian-security
Suites: bookworm-security
Components: main

types: deb deb-src
URIs:
 http://mirror.example.org/debian
 http://second.example.org/debian
Suites: bookworm
 bookworm-updates
Components: main contrib
";
        assert_eq!(
            mirror_in_stanzas(text).as_deref(),
            Some("http://mirror.example.org/debian")
        );
    }

    #[test]
    fn mirror_is_read_from_one_line_sources() {
        let text = "\
# deb http://commented.example.org/debian bookworm main
deb-src http://source.example.org/debian bookworm main
deb https://download.example.com/linux/debian bookworm stable
deb [signed-by=/k.gpg] http://security.example.org/debian-security bookworm-security main
deb [arch=amd64 signed-by=/k.gpg] http://mirror.example.org/debian/ trixie main contrib # ours
";
        assert_eq!(
            mirror_in_lines(text).as_deref(),
            Some("http://mirror.example.org/debian/")
        );
    }

    #[test]
    fn mirror_list_file_is_accepted_as_mirror() {
        let text = "Types: deb\nURIs: mirror+file:///etc/apt/mirrors/debian.list\nSuites: trixie\nComponents: main\n";
        assert_eq!(
            mirror_in_stanzas(text).as_deref(),
            Some("mirror+file:///etc/apt/mirrors/debian.list")
        );
    }

    #[test]
    fn non_debian_sources_give_no_mirror() {
        let ubuntu = "Types: deb\nURIs: http://archive.example.com/ubuntu\nSuites: noble\nComponents: main\n";
        assert_eq!(mirror_in_stanzas(ubuntu), None);
        assert_eq!(
            mirror_in_lines("deb http://archive.example.com/ubuntu noble main"),
            None
        );
        for malformed in ["", "deb", "deb [", "deb [a", "\n\n:\n", "URIs:\nSuites\n"] {
            assert_eq!(mirror_in_lines(malformed), None);
            assert_eq!(mirror_in_stanzas(malformed), None);
        }
    }

    #[test]
    fn error_lines_keep_only_apt_errors() {
        let output = Output {
            status: std::process::ExitStatus::default(),
            stdout: Vec::new(),
            stderr: b"W: a warning\nE: Failed to fetch x\nE: Some index files failed\n".to_vec(),
        };
        assert_eq!(
            error_lines(&output),
            "Failed to fetch x; Some index files failed"
        );
    }
}
