//! Identities of processes of other users.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::{env, fs};

use zernel_identity::{Tenant, identify, is_alive};
use zernel_testkit::{copy_program, root, trial};

/// Pid of the process to identify as another user.
const OTHER_USERS_PROCESS_VARIABLE: &str = "ZERNEL_TEST_STRANGER";
const NOBODY_UID: u32 = 65534;

fn main() -> ExitCode {
    if let Ok(pid) = env::var(OTHER_USERS_PROCESS_VARIABLE) {
        identify_other_users_process(pid.parse().unwrap());
        return ExitCode::SUCCESS;
    }
    zernel_testkit::main([
        trial(
            "the_environment_of_another_user_stays_unread",
            &[root()],
            the_environment_of_another_user_stays_unread,
        ),
        trial(
            "ranks_are_not_inherited_across_users",
            &[root()],
            ranks_are_not_inherited_across_users,
        ),
        trial(
            "a_user_in_a_user_namespace_is_the_same_tenant",
            &[root()],
            a_user_in_a_user_namespace_is_the_same_tenant,
        ),
    ])
}

/// A process that waits for the end of its input.
struct WaitingProcess(Child);

impl WaitingProcess {
    fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let output = child.stdout.as_mut().unwrap();
        BufReader::new(output).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self(child)
    }
}

impl Drop for WaitingProcess {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Starts a shell with a rank.
fn start_shell_with_rank(script: &str) -> WaitingProcess {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script]).env_clear();
    command.envs([
        ("PATH", "/usr/bin:/bin"),
        ("RANK", "3"),
        ("WORLD_SIZE", "8"),
    ]);
    WaitingProcess::start(&mut command)
}

fn the_environment_of_another_user_stays_unread() {
    let process = start_shell_with_rank("echo ready; read line");
    // A folder that user nobody can reach, wherever the build is.
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("identity");
    copy_program(env::current_exe().unwrap(), &program);
    let status = Command::new(program)
        .env(OTHER_USERS_PROCESS_VARIABLE, process.0.id().to_string())
        .current_dir("/")
        .uid(NOBODY_UID)
        .gid(NOBODY_UID)
        .status()
        .unwrap();
    assert!(status.success());
}

fn identify_other_users_process(pid: u32) {
    let identity = identify(pid).unwrap();
    assert_eq!((identity.comm.as_str(), identity.uid), ("sh", 0));
    assert!(!identity.environment_read);
    assert_eq!((identity.rank, identity.world_size), (None, None));
    assert!(is_alive(&identity));
}

/// Root's shell has a rank. The child of root's shell runs as nobody with an empty environment, and has no rank.
fn ranks_are_not_inherited_across_users() {
    let script =
        "env -i setpriv --reuid 65534 --clear-groups sh -c 'echo ready; read line; true'; true";
    let trainer = start_shell_with_rank(script);
    let children = fs::read_to_string(format!(
        "/proc/{pid}/task/{pid}/children",
        pid = trainer.0.id()
    ));
    let child: u32 = children.unwrap().trim().parse().unwrap();
    let identity = identify(child).unwrap();
    assert_eq!(identity.uid, NOBODY_UID);
    assert!(identity.environment_read);
    assert_eq!(identity.rank, None);
    assert_eq!(identify(trainer.0.id()).unwrap().rank, Some(3));
}

/// The tenant is the user, in any namespace that the user creates and with any uid there.
fn a_user_in_a_user_namespace_is_the_same_tenant() {
    let wait = "sh -c 'echo ready; read line; true'";
    for enter in [
        "",
        "unshare --user",
        "unshare --user --map-root-user",
        "unshare --user --map-root-user unshare --user --map-root-user unshare --user",
    ] {
        for uid in [NOBODY_UID, 0] {
            let script = format!("exec setpriv --reuid {uid} --clear-groups {enter} {wait}");
            let process = start_shell_with_rank(&script);
            let tenant = Tenant::of_pid(process.0.id()).unwrap();
            assert_eq!(tenant, Tenant::User(uid), "{script}");
        }
    }
}
