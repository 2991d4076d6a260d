//! The user who called sudo. The command runs as that user and reports are written as that user, because only observing
//! needs root.
//!
//! If it ran as root, `sudo zernel run -- python train.py` would leave files that belong to root, and would not find
//! those of the caller. User, groups and home directory come from `id` and `getent`, because accounts need not be in
//! local files.

use std::env;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use rustix::process::{Gid, Uid};

/// The user who called sudo.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SudoCaller {
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
    account: Option<PasswdAccount>,
}

/// A line of passwd.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PasswdAccount {
    name: String,
    gid: u32,
    home: String,
    shell: String,
}

/// Why the caller of sudo is not known.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallerError {
    /// sudo's variables do not name a user.
    #[error(
        "cannot act as the caller of sudo: {variable}={value} is not a valid id; `zernel run --as-root` runs the \
         command as root"
    )]
    InvalidId {
        variable: &'static str,
        value: String,
    },
    /// The caller's group is in neither SUDO_GID nor passwd.
    #[error(
        "cannot act as the caller of sudo: SUDO_GID is not set and user {uid} has no account; `zernel run --as-root` \
         runs the command as root"
    )]
    UnknownGroup { uid: u32 },
}

impl SudoCaller {
    /// The caller of sudo. Returns `None` if this process does not run as root through sudo.
    pub(crate) fn from_environment() -> Result<Option<Self>, CallerError> {
        if !rustix::process::geteuid().is_root() {
            return Ok(None);
        }
        let uid = id_from_environment("SUDO_UID")?;
        let Some(uid) = uid.filter(|uid| *uid != 0) else {
            return Ok(None);
        };
        let account = output_of_program("getent", &["passwd", &uid.to_string()]);
        let account = account.as_deref().and_then(parse_passwd_line);
        let gid = id_from_environment("SUDO_GID")?;
        let gid = gid.or(account.as_ref().map(|account| account.gid));
        let gid = gid.ok_or(CallerError::UnknownGroup { uid })?;
        let name = account.as_ref().map(|account| account.name.as_str());
        let groups = name.and_then(|name| output_of_program("id", &["-G", name]));
        let groups = groups.as_deref().and_then(parse_group_ids);
        Ok(Some(Self {
            uid,
            gid,
            groups: groups.unwrap_or_else(|| vec![gid]),
            account,
        }))
    }

    #[cfg(test)]
    pub(crate) fn test_caller(id: u32) -> Self {
        Self {
            uid: id,
            gid: id,
            groups: vec![id],
            account: None,
        }
    }

    /// Makes `command` run as the caller.
    pub(crate) fn run_command_as_caller(&self, command: &mut Command) {
        if let Some(account) = &self.account {
            command.env("USER", &account.name);
            command.env("LOGNAME", &account.name);
            command.env("HOME", &account.home);
            command.env("SHELL", &account.shell);
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

/// Runs `work` with the rights of the caller of sudo, or with those of this process if there is none.
pub(crate) fn run_with_rights_of<T: Send>(
    caller: Option<&SudoCaller>,
    work: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    let Some(caller) = caller else {
        return work();
    };
    // The kernel keeps ids per thread. The real and the saved user stay root, so the caller cannot signal or trace the
    // thread.
    let thread = || {
        let groups: Vec<Gid> = caller
            .groups
            .iter()
            .map(|gid| Gid::from_raw(*gid))
            .collect();
        rustix::thread::set_thread_groups(&groups)?;
        let gid = Gid::from_raw(caller.gid);
        rustix::thread::set_thread_res_gid(Gid::ROOT, gid, Gid::ROOT)?;
        rustix::thread::set_thread_res_uid(Uid::ROOT, Uid::from_raw(caller.uid), Uid::ROOT)?;
        work()
    };
    std::thread::scope(|scope| {
        let joined = scope.spawn(thread).join();
        joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn id_from_environment(variable: &'static str) -> Result<Option<u32>, CallerError> {
    let Some(value) = env::var_os(variable) else {
        return Ok(None);
    };
    let value = value.to_string_lossy().into_owned();
    // The kernel takes the largest id as "leave unchanged".
    match value.parse() {
        Ok(number) if number != u32::MAX => Ok(Some(number)),
        _ => Err(CallerError::InvalidId { variable, value }),
    }
}

fn output_of_program(program: &str, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new(program);
    let output = command.args(arguments).stdin(Stdio::null()).output().ok()?;
    let succeeded = output.status.success();
    String::from_utf8(output.stdout).ok().filter(|_| succeeded)
}

fn parse_passwd_line(line: &str) -> Option<PasswdAccount> {
    let fields: Vec<&str> = line.trim_end().split(':').collect();
    match fields[..] {
        [name, _, _, gid, _, home, shell] => Some(PasswdAccount {
            name: name.to_owned(),
            gid: gid.parse().ok()?,
            home: home.to_owned(),
            shell: shell.to_owned(),
        }),
        _ => None,
    }
}

fn parse_group_ids(text: &str) -> Option<Vec<u32>> {
    let groups: Result<Vec<u32>, _> = text.split_whitespace().map(str::parse).collect();
    groups.ok().filter(|groups| !groups.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_passwd_line_has_an_account() {
        let account = parse_passwd_line("jo:x:1000:1007:Jo,,,:/home/jo:/bin/zsh\n");
        let expected = PasswdAccount {
            name: "jo".to_owned(),
            gid: 1007,
            home: "/home/jo".to_owned(),
            shell: "/bin/zsh".to_owned(),
        };
        assert_eq!(account, Some(expected));
        assert_eq!(parse_passwd_line(""), None);
    }

    #[test]
    fn one_bad_group_makes_all_groups_unknown() {
        assert_eq!(parse_group_ids("1000 27 44\n"), Some(vec![1000, 27, 44]));
        assert_eq!(parse_group_ids("1000 video"), None);
        assert_eq!(parse_group_ids("\n"), None);
    }
}
