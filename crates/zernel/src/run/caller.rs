//! The user who called sudo. The command runs as that user, because only observing needs root.
//!
//! Otherwise `sudo zernel run -- python train.py` would leave files that belong to root, and would not find those of the
//! caller. User, groups and home directory come from `id` and `getent`, because accounts need not be in local files.

use std::env;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use rustix::process::{Gid, Uid};

/// The user who called sudo.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Caller {
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
    /// Name, home and shell, if known.
    account: Option<[String; 3]>,
}

/// sudo's variables do not name a user.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot run the command as the caller of sudo: {variable}={value} is not a valid id; use --as-root to run it as root"
)]
pub(super) struct CallerError {
    variable: &'static str,
    value: String,
}

impl Caller {
    /// The caller of sudo. `None` if this process does not run as root through sudo.
    pub(super) fn from_environment() -> Result<Option<Self>, CallerError> {
        if !rustix::process::geteuid().is_root() {
            return Ok(None);
        }
        let (Some(uid), Some(gid)) = (
            id_from_environment("SUDO_UID")?,
            id_from_environment("SUDO_GID")?,
        ) else {
            return Ok(None);
        };
        if uid == 0 {
            return Ok(None);
        }
        let account = output_of("getent", &["passwd", &uid.to_string()]);
        let account = account.as_deref().and_then(parse_account);
        let name = account.as_ref().map(|[name, ..]| name.as_str());
        let groups = name.and_then(|name| output_of("id", &["-G", name]));
        let groups = groups.as_deref().and_then(parse_groups);
        Ok(Some(Self {
            uid,
            gid,
            groups: groups.unwrap_or_else(|| vec![gid]),
            account,
        }))
    }

    /// Makes `command` run as the caller.
    pub(super) fn apply(&self, command: &mut Command) {
        if let Some([name, home, shell]) = &self.account {
            command.env("USER", name).env("LOGNAME", name);
            command.env("HOME", home).env("SHELL", shell);
        }
        let uid = Uid::from_raw(self.uid);
        let gid = Gid::from_raw(self.gid);
        let groups: Vec<Gid> = self.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
        let become_caller = move || {
            rustix::thread::set_thread_groups(&groups)?;
            rustix::thread::set_thread_res_gid(gid, gid, gid)?;
            rustix::thread::set_thread_res_uid(uid, uid, uid)?;
            Ok(())
        };
        // SAFETY: between fork and exec the closure makes three system calls and allocates nothing. The child has one
        // thread, so changing the thread's ids changes those of the process.
        unsafe { command.pre_exec(become_caller) };
    }
}

fn id_from_environment(variable: &'static str) -> Result<Option<u32>, CallerError> {
    let Some(value) = env::var_os(variable) else {
        return Ok(None);
    };
    let value = value.to_string_lossy().into_owned();
    // The kernel takes the largest id as "leave unchanged".
    match value.parse() {
        Ok(number) if number != u32::MAX => Ok(Some(number)),
        _ => Err(CallerError { variable, value }),
    }
}

fn output_of(program: &str, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new(program);
    let output = command.args(arguments).stdin(Stdio::null()).output().ok()?;
    let succeeded = output.status.success();
    String::from_utf8(output.stdout).ok().filter(|_| succeeded)
}

/// Name, home and shell from a line of passwd.
fn parse_account(line: &str) -> Option<[String; 3]> {
    let fields: Vec<&str> = line.trim_end().split(':').collect();
    match fields[..] {
        [name, _, _, _, _, home, shell] => Some([name, home, shell].map(str::to_owned)),
        _ => None,
    }
}

fn parse_groups(text: &str) -> Option<Vec<u32>> {
    let groups: Result<Vec<u32>, _> = text.split_whitespace().map(str::parse).collect();
    groups.ok().filter(|groups| !groups.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_passwd_line_has_an_account() {
        let account = parse_account("jo:x:1000:1000:Jo,,,:/home/jo:/bin/zsh\n");
        assert_eq!(
            account,
            Some(["jo", "/home/jo", "/bin/zsh"].map(str::to_owned))
        );
        assert_eq!(parse_account(""), None);
    }

    #[test]
    fn groups_are_all_or_nothing() {
        assert_eq!(parse_groups("1000 27 44\n"), Some(vec![1000, 27, 44]));
        assert_eq!(parse_groups("1000 video"), None);
        assert_eq!(parse_groups("\n"), None);
    }
}
