//! Identities of real processes.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use super::*;

/// A shell that runs `script` with only these variables, and has printed a line. The shell ends with the test.
struct TestShell {
    child: Child,
    first_line: String,
}

impl TestShell {
    fn run(script: &str, variables: &[(&str, &str)]) -> Self {
        let mut child = Command::new("/bin/sh")
            .args(["-c", script])
            .env_clear()
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut first_line = String::new();
        let output = child.stdout.as_mut().unwrap();
        BufReader::new(output).read_line(&mut first_line).unwrap();
        Self { child, first_line }
    }

    /// Starts a shell that waits for the end of its input.
    fn start_waiting(variables: &[(&str, &str)]) -> Self {
        Self::run("echo; read line", variables)
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the number that the script printed.
    fn printed_number(&self) -> u32 {
        self.first_line.trim().parse().unwrap()
    }
}

impl Drop for TestShell {
    fn drop(&mut self) {
        // The script's children read the same pipe and end with it.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

#[test]
fn rank_and_job_come_from_the_environment() {
    let shell = TestShell::start_waiting(&[
        ("RANK", "3"),
        ("LOCAL_RANK", "1"),
        ("WORLD_SIZE", "8"),
        ("TORCHELASTIC_RUN_ID", "llama"),
        ("CUDA_VISIBLE_DEVICES", ""),
        ("SECRET", "hush"),
    ]);
    let identity = identify(shell.pid()).unwrap();
    assert_eq!(identity.pid, shell.pid());
    assert_eq!(identity.comm, "sh");
    assert_eq!(identity.parent, std::process::id());
    assert_eq!(identity.uid, rustix::process::geteuid().as_raw());
    assert_eq!(
        (identity.rank, identity.local_rank, identity.world_size),
        (Some(3), Some(1), Some(8))
    );
    assert_eq!(identity.rank_source, Some(RankSource::Torchrun));
    assert_eq!(identity.rank_of, None);
    assert_eq!(identity.job.as_deref(), Some("llama"));
    assert_eq!(identity.cuda_visible_devices.as_deref(), Some(""));
    assert_eq!(identity.nvidia_visible_devices, None);
    assert!(identity.environment_read);
    assert!(is_alive(&identity));
    let json = serde_json::to_string(&identity).unwrap();
    assert!(json.contains(r#""rank_source":"torchrun""#), "{json}");
    assert!(!json.contains("hush"), "{json}");
}

#[test]
fn a_child_with_an_empty_environment_inherits_the_rank() {
    let script = "env -i sh -c 'env -i sh -c \"echo \\$\\$; read line; true\"; true'; true";
    let shell = TestShell::run(
        script,
        &[
            ("PATH", "/usr/bin:/bin"),
            ("RANK", "2"),
            ("WORLD_SIZE", "4"),
            ("SLURM_JOB_ID", "42"),
        ],
    );
    let loader = identify(shell.printed_number()).unwrap();
    assert_ne!(
        loader.parent,
        shell.pid(),
        "there is a process between them"
    );
    assert_eq!((loader.rank, loader.world_size), (Some(2), Some(4)));
    assert_eq!(loader.rank_of, Some(shell.pid()));
    assert_eq!(loader.job.as_deref(), Some("42"));
}

#[test]
fn the_nearest_ancestor_with_a_rank_wins() {
    let script = "env -i RANK=7 WORLD_SIZE=8 sh -c 'env -i sh -c \"echo \\$\\$; read line; true\"; true'; true";
    let shell = TestShell::run(
        script,
        &[
            ("PATH", "/usr/bin:/bin"),
            ("RANK", "2"),
            ("WORLD_SIZE", "4"),
        ],
    );
    let loader = identify(shell.printed_number()).unwrap();
    assert_eq!((loader.rank, loader.world_size), (Some(7), Some(8)));
    assert_eq!(loader.rank_of, Some(loader.parent));
}

#[test]
fn a_process_with_an_empty_environment_has_the_rank_of_its_parent() {
    // The tests may themselves run in a job.
    let shell = TestShell::run("echo; read line", &[]);
    let identity = identify(shell.pid()).unwrap();
    let own = identify(std::process::id()).unwrap();
    assert_eq!(identity.rank, own.rank);
}

#[test]
fn an_exited_process_is_not_found() {
    let mut child = Command::new("/bin/true").spawn().unwrap();
    let pid = child.id();
    let identity = identify(pid);
    child.wait().unwrap();
    // The process may be running, a zombie or reaped at the first call.
    if let Ok(identity) = identity {
        assert!(!is_alive(&identity));
    }
    let error = identify(pid).unwrap_err();
    assert!(matches!(error, IdentityError::NotFound { pid: missing } if missing == pid));
    assert_eq!(error.error_kind(), io::ErrorKind::NotFound);
    assert_eq!(
        identify(u32::MAX).unwrap_err().error_kind(),
        io::ErrorKind::NotFound
    );
}

#[test]
fn a_process_that_exits_during_identification_is_not_found() {
    let mut child = Command::new("/bin/cat")
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let (process, _) = open_process(child.id()).unwrap();
    drop(child.stdin.take());
    child.wait().unwrap();
    assert!(is_not_found(&read_cgroup(&process).unwrap_err()));
    assert!(read_environment(&process).is_none());
    assert!(is_not_found(&process.stat().unwrap_err()));
    assert!(parent_of(&process).is_none());
}

#[test]
fn a_different_start_time_means_another_process() {
    let shell = TestShell::start_waiting(&[]);
    let mut earlier = identify(shell.pid()).unwrap();
    earlier.start_time -= 1;
    assert!(!is_alive(&earlier));
}

#[test]
fn a_zombie_still_has_a_name() {
    let mut child = Command::new("/bin/true").spawn().unwrap();
    let is_zombie = || open_process(child.id()).is_ok_and(|(_, stat)| stat.state == 'Z');
    while !is_zombie() {
        std::thread::yield_now();
    }
    let identity = identify(child.id()).unwrap();
    assert_eq!(identity.comm, "true");
    assert!(!identity.environment_read);
    child.wait().unwrap();
}

#[test]
fn an_exited_process_has_what_the_kernel_knew_of_it() {
    let identity = identify_exited(7, 100, b"a\x1bb\0stale", 1000, 3);
    assert_eq!(identity.comm, "a\u{fffd}b");
    assert_eq!((identity.pid, identity.start_time), (7, 100));
    assert_eq!((identity.uid, identity.parent), (1000, 3));
    assert!(!identity.environment_read);
    assert_eq!(
        identify_exited(7, 100, &[b'x'; 16], 0, 0).comm,
        "x".repeat(16)
    );
}

#[test]
fn a_process_name_with_invalid_bytes_is_made_printable() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("x");
    std::fs::copy("/bin/sh", &program).unwrap();
    let odd = folder
        .path()
        .join(<std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(b"a)\n\xff ("));
    std::fs::rename(program, &odd).unwrap();
    let mut child = Command::new(&odd)
        .args(["-c", "echo; read line"])
        .arg0("x")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap())
        .read_line(&mut line)
        .unwrap();
    let identity = identify(child.id()).unwrap();
    assert_eq!(identity.comm, "a)\u{fffd}\u{fffd} (");
    drop(child.stdin.take());
    child.wait().unwrap();
}

#[test]
fn the_larger_world_size_wins() {
    let shell =
        TestShell::start_waiting(&[("RANK", "3"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "8")]);
    let from_environment = identify(shell.pid()).unwrap();
    let unknown = Identity {
        rank: None,
        local_rank: None,
        world_size: None,
        rank_source: None,
        ..from_environment.clone()
    };
    let without_size = Identity {
        world_size: None,
        ..from_environment.clone()
    };
    // Identity; rank and size of a communicator; expected rank, local rank and world size.
    let cases = [
        // A tensor-parallel group within the job, and a group of the job's size.
        (&from_environment, (0, 2), (Some(3), Some(1), Some(8))),
        (&from_environment, (5, 8), (Some(3), Some(1), Some(8))),
        // The variables were those of the launcher, which starts one task per node.
        (&from_environment, (9, 16), (Some(9), None, Some(16))),
        (&from_environment, (3, 16), (Some(3), Some(1), Some(16))),
        (&unknown, (1, 2), (Some(1), None, Some(2))),
        (&without_size, (3, 4), (Some(3), Some(1), Some(4))),
        // Invalid: the rank exceeds the size.
        (&unknown, (2, 2), (None, None, None)),
    ];
    for (identity, (rank, size), expected) in cases {
        let known = identity.clone().with_rank(rank, size);
        let found = (known.rank, known.local_rank, known.world_size);
        assert_eq!(found, expected, "{rank} of {size}");
    }
    assert_eq!(
        from_environment.with_rank(9, 16).rank_source,
        Some(RankSource::Nccl)
    );
    assert_eq!(
        unknown.with_rank(0, 2).with_rank(5, 8).with_rank(1, 4).rank,
        Some(5)
    );
}
