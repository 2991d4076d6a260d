//! The files of `--json` and `--html`: their owner, and what becomes of an older report.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::path::Path;
use std::process::{Command, Output};

use crate::{NOBODY_UID, decode_output, zernel_command};

/// A user who is neither root nor the caller of sudo.
const OTHER_UID: u32 = 65533;

/// A folder of the caller of sudo.
fn create_folder_of_sudo_caller() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    chown(folder.path(), Some(NOBODY_UID), Some(NOBODY_UID)).unwrap();
    folder
}

fn run_under_sudo(folder: &Path, options: &[&str]) -> Output {
    let mut run = zernel_command();
    run.env("SUDO_UID", NOBODY_UID.to_string());
    run.env("SUDO_GID", NOBODY_UID.to_string());
    run.current_dir(folder).arg("run").args(options);
    run.args(["--", "echo", "it ran"]).output().unwrap()
}

pub(crate) fn reports_belong_to_the_caller_of_sudo() {
    for as_root in [&[][..], &["--as-root"]] {
        let folder = create_folder_of_sudo_caller();
        // An earlier run as root left a report.
        fs::write(folder.path().join("page"), "an old one").unwrap();
        let options = [&["--json", "report", "--html", "page"][..], as_root].concat();
        let output = run_under_sudo(folder.path(), &options);
        assert_eq!(decode_output(&output.stdout), "it ran\n");
        for name in ["report", "page"] {
            let file = fs::metadata(folder.path().join(name)).unwrap();
            assert_eq!((file.uid(), file.gid()), (NOBODY_UID, NOBODY_UID), "{name}");
            assert!(file.len() > 100, "{name}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}

/// Root could write to all these files, and the caller of sudo to none of them.
pub(crate) fn reports_are_written_with_the_rights_of_the_caller_of_sudo() {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), Permissions::from_mode(0o1777)).unwrap();
    let precious = folder.path().join("precious");
    fs::write(&precious, "of root").unwrap();
    let link = folder.path().join("link");
    symlink(&precious, &link).unwrap();
    lchown(&link, Some(OTHER_UID), None).unwrap();
    let closed = folder.path().join("closed");
    fs::create_dir(&closed).unwrap();
    for name in ["precious", "link", "closed/report", "/etc/zernel-report"] {
        let output = run_under_sudo(folder.path(), &["--json", name]);
        let printed = decode_output(&output.stderr);
        assert!(!output.status.success(), "{name}: {printed}");
        assert!(
            printed.contains(&format!("cannot write {name}")),
            "{printed}"
        );
        assert!(output.stdout.is_empty(), "{name}");
    }
    assert_eq!(fs::read_to_string(&precious).unwrap(), "of root");
    assert_eq!(fs::read_dir(&closed).unwrap().count(), 0);
    assert!(!Path::new("/etc/zernel-report").exists());
}

/// A limit on the size of files is as good as a full disk.
pub(crate) fn a_full_disk_keeps_the_older_report() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("report"), "an old one").unwrap();
    let binary = env!("CARGO_BIN_EXE_zernel");
    let script = format!("trap '' XFSZ; ulimit -f 0; exec {binary} run --json report -- true");
    let mut shell = Command::new("sh");
    let output = shell
        .current_dir(folder.path())
        .args(["-c", &script])
        .output();
    let output = output.unwrap();
    let printed = decode_output(&output.stderr);
    assert!(printed.contains("cannot write report"), "{printed}");
    assert_eq!(output.status.code(), Some(0), "{printed}");
    let kept = fs::read_to_string(folder.path().join("report"));
    assert_eq!(kept.unwrap(), "an old one");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

pub(crate) fn reports_never_get_the_group_of_root() {
    let run = |user: u32| {
        let mut run = zernel_command();
        run.env("SUDO_UID", user.to_string()).env_remove("SUDO_GID");
        run.args(["run", "--", "sh", "-c", "id -u; id -g"]);
        run.output().unwrap()
    };
    assert_eq!(decode_output(&run(NOBODY_UID).stdout), "65534\n65534\n");
    // No account has this user id, so the group of the user is unknown.
    let unknown = run(4_000_000_001);
    let printed = decode_output(&unknown.stderr);
    assert!(
        !unknown.status.success() && printed.contains("SUDO_GID"),
        "{printed}"
    );
    assert!(unknown.stdout.is_empty());
}
