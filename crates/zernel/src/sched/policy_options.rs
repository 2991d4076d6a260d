//! The numbers of the policy: flags of `zernel sched`, and keys of its configuration file.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, value_parser};
use serde::{Deserialize, Deserializer};
use zernel_scheduler::scheduler::{Privilege, SchedSettings};

/// Slices in microseconds.
const ALLOWED_SLICES_US: std::ops::RangeInclusive<u64> = 100..=100_000;
/// How the text of `privilege` begins in published statistics if one command is privileged.
pub(super) const COMMAND_PRIVILEGE_PREFIX: &str = "run=";
/// The id of the root cgroup, in which all tasks are.
const ROOT_CGROUP_ID: u64 = 1;
/// `CGROUP2_SUPER_MAGIC` of the kernel.
const CGROUP2_MAGIC: rustix::fs::FsWord = 0x6367_7270;

#[derive(Debug, Clone, PartialEq, Eq, Args, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct PolicyOptions {
    /// Time that a task runs before others get their turn, in microseconds
    #[arg(long, value_name = "N", default_value_t = SchedSettings::DEFAULT_SLICE.as_micros() as u64)]
    #[arg(value_parser = value_parser!(u64).range(ALLOWED_SLICES_US))]
    #[serde(deserialize_with = "deserialize_slice")]
    pub(super) slice_us: u64,
    /// Tasks with critical threads that go first: nobody, all, cgroup=PATH or user=NAME. Needs a running `zernel observe`
    #[arg(long, value_name = "TASKS", default_value = "nobody")]
    pub(super) privilege: PrivilegeOption,
    /// Part of their fair share that others keep beside critical threads, from 0 to 1
    #[arg(long, value_name = "SHARE", default_value = "0.5")]
    pub(super) guarantee: GuaranteeOption,
    /// Let critical threads that spin until the GPU is done lend their CPU to loaders and ordinary tasks
    #[arg(long)]
    pub(super) lend: bool,
}

impl Default for PolicyOptions {
    fn default() -> Self {
        Self {
            slice_us: SchedSettings::DEFAULT_SLICE.as_micros() as u64,
            privilege: PrivilegeOption::for_no_process(),
            guarantee: GuaranteeOption(SchedSettings::DEFAULT_GUARANTEE_PERCENT),
            lend: false,
        }
    }
}

impl PolicyOptions {
    /// Whether it lends the CPUs of privileged threads, and nobody is privileged.
    pub(super) fn lends_without_privilege(&self) -> bool {
        self.lend && self.privilege.privilege == Privilege::Nobody
    }

    /// The settings of the scheduler.
    pub(super) fn scheduler_settings(&self) -> SchedSettings {
        SchedSettings {
            slice: Duration::from_micros(self.slice_us),
            privilege: self.privilege.privilege,
            guarantee_percent: self.guarantee.0,
            lends: self.lend,
            ..SchedSettings::default()
        }
    }
}

impl fmt::Display for PolicyOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (slice, privilege) = (self.slice_us, &self.privilege.text);
        let guarantee = self.guarantee.as_share();
        write!(
            f,
            "slice {slice} µs, privilege {privilege}, guarantee {guarantee}, lend {}",
            self.lend
        )
    }
}

/// Reads a slice from a configuration file.
fn deserialize_slice<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let slice_us = u64::deserialize(deserializer)?;
    match ALLOWED_SLICES_US.contains(&slice_us) {
        true => Ok(slice_us),
        false => Err(serde::de::Error::custom(format!(
            "a slice is between {} and {} µs",
            ALLOWED_SLICES_US.start(),
            ALLOWED_SLICES_US.end()
        ))),
    }
}

/// The tasks with critical threads that go first.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct PrivilegeOption {
    /// As it was written.
    pub(super) text: String,
    pub(super) privilege: Privilege,
}

impl PrivilegeOption {
    fn for_no_process() -> Self {
        Self {
            text: "nobody".to_owned(),
            privilege: Privilege::Nobody,
        }
    }

    /// The privilege of this process and its descendants.
    pub(super) fn for_own_process_tree() -> Self {
        Self {
            text: format!("{COMMAND_PRIVILEGE_PREFIX}{}", std::process::id()),
            privilege: Privilege::OwnTree,
        }
    }
}

impl TryFrom<String> for PrivilegeOption {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for PrivilegeOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let privilege = match text {
            "nobody" => Privilege::Nobody,
            "all" => Privilege::All,
            _ => match text.split_once('=') {
                Some(("cgroup", path)) => cgroup_privilege(Path::new(path))?,
                Some(("user", user)) => Privilege::User(user_id(user)?),
                _ => return Err("use nobody, all, cgroup=PATH or user=NAME".to_owned()),
            },
        };
        Ok(Self {
            text: text.to_owned(),
            privilege,
        })
    }
}

/// The privilege of a cgroup. Without the `cpu` controller the kernel counts its tasks to the parent, so a scheduler could
/// not distinguish them from others.
fn cgroup_privilege(folder: &Path) -> Result<Privilege, String> {
    let path = folder.display();
    let status = fs::metadata(folder).map_err(|error| format!("{path}: {error}"))?;
    let file_system = rustix::fs::statfs(folder).map_err(|error| format!("{path}: {error}"))?;
    if !status.is_dir() || file_system.f_type != CGROUP2_MAGIC {
        return Err(format!("{path} is not a folder of cgroup v2"));
    }
    // The id of a cgroup is the inode number of its folder.
    match status.ino() {
        ROOT_CGROUP_ID => Ok(Privilege::All),
        id if folder.join("cpu.weight").exists() => Ok(Privilege::Cgroup(id)),
        _ => Err(format!(
            "{path} has no cpu controller, so its tasks cannot be privileged; \
             write +cpu to cgroup.subtree_control of each folder above it, beginning with the topmost"
        )),
    }
}

/// The uid of a user, who is given by name or by uid. Accounts need not be in local files, so `id` looks names up.
fn user_id(user: &str) -> Result<u32, String> {
    if let Ok(uid) = user.parse() {
        return Ok(uid);
    }
    let output = Command::new("id").args(["-u", "--", user]).output();
    let output = output.map_err(|error| format!("cannot run `id`: {error}"))?;
    let uid = String::from_utf8_lossy(&output.stdout).trim().parse();
    uid.map_err(|_| format!("there is no user {user}"))
}

/// A guaranteed share, as a percentage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "f64")]
pub(super) struct GuaranteeOption(pub(super) u32);

impl GuaranteeOption {
    pub(super) fn as_share(self) -> f64 {
        f64::from(self.0) / 100.0
    }
}

impl TryFrom<f64> for GuaranteeOption {
    type Error = String;

    fn try_from(share: f64) -> Result<Self, String> {
        match (0.0..=1.0).contains(&share) {
            true => Ok(Self((share * 100.0).round() as u32)),
            false => Err("a share is between 0 and 1".to_owned()),
        }
    }
}

impl FromStr for GuaranteeOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let share: f64 = text.parse().map_err(|_| "not a number")?;
        Self::try_from(share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_between_0_and_1() {
        assert_eq!("0.25".parse(), Ok(GuaranteeOption(25)));
        assert_eq!("1".parse(), Ok(GuaranteeOption(100)));
        for wrong in ["", "-0.1", "1.1", "NaN", "half"] {
            assert!(wrong.parse::<GuaranteeOption>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_user_is_known_by_name_or_uid() {
        for (text, uid) in [("user=1000", 1000), ("user=root", 0), ("user=0", 0)] {
            let option: PrivilegeOption = text.parse().unwrap();
            assert_eq!(option.privilege, Privilege::User(uid));
            assert_eq!(option.text, text);
        }
        for wrong in ["user=", "user=-1", "user=no-such-user", "user=4294967296"] {
            assert!(wrong.parse::<PrivilegeOption>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_folder_without_a_cgroup_is_refused() {
        for (wrong, problem) in [
            ("some", "use nobody, all"),
            ("cgroup=/nowhere", "No such file"),
            ("cgroup=/etc/passwd", "not a folder of cgroup v2"),
            ("cgroup=/tmp", "not a folder of cgroup v2"),
        ] {
            let error = wrong.parse::<PrivilegeOption>().unwrap_err();
            assert!(error.contains(problem), "{wrong}: {error}");
        }
    }
}
