//! The file of the token: created with a random token at the first start, checked at every start.
//!
//! A user who can replace the file, or a directory above it, could choose the token. So the token file and all
//! directories above it must belong to root, to the daemon's user or to the user `zernel`, and no other user may
//! write to them. A directory with the sticky bit, such as /tmp, is safe too: there only the owner of a file can
//! replace it.

use std::fs::{self, DirBuilder, File, Metadata, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, open};
use rustix::process::geteuid;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::SecretError;
use crate::secret::MAX_TOKEN_FILE_BYTES;

/// Name of the service's user, and of the group that may read the token.
const SERVICE_ACCOUNT_NAME: &str = "zernel";
const ROOT_UID: u32 = 0;
/// Bytes of a new token.
const NEW_TOKEN_BYTES: usize = 32;

/// Reads the text of a token file that no other user can read or replace.
pub(crate) fn read_token_file(path: &Path) -> Result<String, SecretError> {
    let unreadable = |source| SecretError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let file_path = path.canonicalize().map_err(unreadable)?;
    // A symbolic link on the path can be replaced, too.
    let folder = parent_folder_of(path).canonicalize().map_err(unreadable)?;
    for folder in [Some(&*folder), file_path.parent()].into_iter().flatten() {
        check_folders_are_protected(path, folder)?;
    }
    // Opening a pipe or a device must not block.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = open(&file_path, flags, Mode::empty()).map_err(|error| unreadable(error.into()))?;
    let file = File::from(file);
    let metadata = file.metadata().map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(unreadable(io::Error::other("it is not a regular file")));
    }
    check_owner_is_trusted(path, path, &metadata)?;
    if metadata.mode() & 0o026 != 0 {
        return Err(SecretError::AccessibleToOthers {
            path: path.to_owned(),
        });
    }
    let mut text = String::new();
    file.take(2 * MAX_TOKEN_FILE_BYTES as u64)
        .read_to_string(&mut text)
        .map_err(unreadable)?;
    Ok(text)
}

/// Creates a token file with a new token, unless the file exists.
pub(crate) fn create_token_file_if_missing(path: &Path) -> Result<(), SecretError> {
    let uncreatable = |source| SecretError::CannotCreate {
        path: path.to_owned(),
        source,
    };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(uncreatable(error)),
        Ok(_) => return Ok(()),
    }
    let folder = parent_folder_of(path);
    if !folder.exists() {
        let mut builder = DirBuilder::new();
        let created = builder.recursive(true).mode(0o755).create(folder);
        created.map_err(uncreatable)?;
    }
    let folder = folder.canonicalize().map_err(uncreatable)?;
    check_folders_are_protected(path, &folder)?;
    let name = path.file_name();
    let name = name.ok_or_else(|| uncreatable(ErrorKind::InvalidInput.into()))?;
    create_token_file(&folder.join(name)).map_err(uncreatable)
}

/// Writes a new token to a temporary file and gives it its name when it is complete. Of two daemons
/// that start at once, one creates the file and both use it.
fn create_token_file(path: &Path) -> io::Result<()> {
    let random = random_hex()?;
    let temporary = path.with_extension(format!("new-{}", &random[..16]));
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(open(&temporary, flags, Mode::RUSR | Mode::WUSR)?);
    let groups = fs::read_to_string("/etc/group").unwrap_or_default();
    let created = share_with_group(&file, &groups)
        .and_then(|()| writeln!(file, "{}", random_hex()?))
        .and_then(|()| file.sync_all())
        .and_then(|()| {
            let linked = linkat(CWD, &temporary, CWD, path, AtFlags::empty());
            linked.map_err(io::Error::from)
        });
    let removed = fs::remove_file(&temporary);
    match created {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => removed,
        created => created.and(removed),
    }
}

/// Lets the group `zernel` read the file, if `groups` has one and the daemon may give it the file.
fn share_with_group(file: &File, groups: &str) -> io::Result<()> {
    let Some(group) = account_id(groups, SERVICE_ACCOUNT_NAME) else {
        return Ok(());
    };
    match fchown(file, None, Some(group)) {
        Ok(()) => file.set_permissions(Permissions::from_mode(0o640)),
        // Only root and members of a group may give a file to it. If the file cannot be given to the group, only its
        // owner can read the token.
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Ok(()),
        Err(error) => Err(error),
    }
}

fn random_hex() -> io::Result<String> {
    let mut bytes = [0; NEW_TOKEN_BYTES];
    // The system call returns up to 256 bytes at once.
    let count = getrandom(&mut bytes, GetRandomFlags::empty())?;
    match count == bytes.len() {
        true => Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect()),
        false => Err(io::Error::other("the system has no random bytes")),
    }
}

fn parent_folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Checks that no other user can replace files in `folder` or above it. The path must contain no symbolic link.
fn check_folders_are_protected(file: &Path, folder: &Path) -> Result<(), SecretError> {
    for folder in folder.ancestors() {
        let metadata = fs::symlink_metadata(folder).map_err(|source| SecretError::Unreadable {
            path: file.to_owned(),
            source,
        })?;
        check_owner_is_trusted(file, folder, &metadata)?;
        let is_sticky = metadata.mode() & 0o1000 != 0;
        if metadata.mode() & 0o022 != 0 && !is_sticky {
            return Err(SecretError::WritableDirectory {
                file: file.to_owned(),
                path: folder.to_owned(),
            });
        }
    }
    Ok(())
}

fn check_owner_is_trusted(
    file: &Path,
    path: &Path,
    metadata: &Metadata,
) -> Result<(), SecretError> {
    let owner = metadata.uid();
    let is_trusted = owner == ROOT_UID || owner == geteuid().as_raw() || {
        let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
        account_id(&users, SERVICE_ACCOUNT_NAME) == Some(owner)
    };
    match is_trusted {
        true => Ok(()),
        false => Err(SecretError::ForeignOwner {
            file: file.to_owned(),
            path: PathBuf::from(path),
            owner,
        }),
    }
}

/// The id of an account in the text of /etc/passwd or /etc/group.
fn account_id(text: &str, name: &str) -> Option<u32> {
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{chown, symlink};

    use super::*;
    use crate::Secret;

    const TEST_TOKEN: &str = "0123456789abcdef";
    const NOBODY_UID: u32 = 65534;

    fn create_test_folder() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        (folder, path)
    }

    fn set_permissions(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    fn read_error_text(path: &Path) -> String {
        Secret::from_file_or_new(path).unwrap_err().to_string()
    }

    #[test]
    fn the_first_start_creates_a_random_token_that_others_cannot_read() {
        let (folder, path) = create_test_folder();
        let first = Secret::from_file_or_new(&path).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.trim().len(), 64, "{text}");
        assert!(first.matches_token(text.trim().as_bytes()));
        let mode = fs::metadata(&path).unwrap().mode() & 0o777;
        let groups = fs::read_to_string("/etc/group").unwrap();
        match account_id(&groups, SERVICE_ACCOUNT_NAME) {
            Some(_) => assert_eq!(mode & 0o037, 0, "{mode:o}"),
            None => assert_eq!(mode, 0o600, "{mode:o}"),
        }
        // The next start reads the same token, and nothing else stays in the folder.
        let second = Secret::from_file_or_new(&path).unwrap();
        assert!(second.matches_token(text.trim().as_bytes()));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let (_other_folder, other) = self::create_test_folder();
        Secret::from_file_or_new(&other).unwrap();
        assert_ne!(fs::read_to_string(&other).unwrap(), text);
    }

    #[test]
    fn only_the_group_of_the_service_may_read_a_new_token() {
        if !geteuid().is_root() {
            return; // cannot give a file away
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        let mode_and_group = || {
            let metadata = fs::metadata(file.path()).unwrap();
            (metadata.mode() & 0o777, metadata.gid())
        };
        share_with_group(file.as_file(), "root:x:0:\n").unwrap();
        assert_eq!(mode_and_group(), (0o600, 0));
        share_with_group(file.as_file(), "zernel:x:65534:\n").unwrap();
        assert_eq!(mode_and_group(), (0o640, 65534));
    }

    #[test]
    fn a_link_without_a_file_is_not_followed() {
        let (folder, path) = create_test_folder();
        let elsewhere = folder.path().join("elsewhere");
        symlink(&elsewhere, &path).unwrap();
        assert!(
            read_error_text(&path).contains("cannot read"),
            "{}",
            read_error_text(&path)
        );
        assert!(!elsewhere.exists());
    }

    #[test]
    fn a_token_file_open_to_others_is_refused() {
        let (_folder, path) = create_test_folder();
        fs::write(&path, format!("  {TEST_TOKEN}\n")).unwrap();
        for mode in [0o644, 0o602, 0o660] {
            set_permissions(&path, mode);
            assert!(
                read_error_text(&path).contains("chmod"),
                "{mode:o}: {}",
                read_error_text(&path)
            );
        }
        set_permissions(&path, 0o640);
        let secret = Secret::from_file(&path).unwrap();
        assert!(secret.matches_token(TEST_TOKEN.as_bytes()));
        assert_eq!(secret.token_file_path(), Some(&*path));
    }

    #[test]
    fn what_is_not_a_file_is_refused_without_waiting() {
        let refused = |path: &str| Secret::from_file(Path::new(path)).unwrap_err().to_string();
        assert!(refused("/").contains("not a regular file"));
        assert!(refused("/nowhere/token").contains("/nowhere/token"));
        let (_folder, path) = create_test_folder();
        rustix::fs::mknodat(
            CWD,
            &path,
            rustix::fs::FileType::Fifo,
            Mode::RUSR | Mode::WUSR,
            0,
        )
        .unwrap();
        assert!(read_error_text(&path).contains("not a regular file"));
    }

    #[test]
    fn a_folder_that_others_can_write_to_is_refused() {
        let (folder, path) = create_test_folder();
        let open = folder.path().join("open");
        fs::create_dir(&open).unwrap();
        set_permissions(&open, 0o777);
        let inside = open.join("token");
        assert!(
            read_error_text(&inside).contains("can write to"),
            "{}",
            read_error_text(&inside)
        );
        assert!(!inside.exists());
        // A symbolic link in a safe folder does not make a token file in an unsafe folder safe.
        fs::write(&inside, TEST_TOKEN).unwrap();
        set_permissions(&inside, 0o600);
        symlink(&inside, &path).unwrap();
        assert!(
            read_error_text(&path).contains("can write to"),
            "{}",
            read_error_text(&path)
        );
        set_permissions(&open, 0o1777);
        Secret::from_file(&path).unwrap();
    }

    #[test]
    fn a_token_file_of_another_user_is_refused() {
        if !geteuid().is_root() {
            return; // cannot give a file away
        }
        let (folder, path) = create_test_folder();
        fs::write(&path, TEST_TOKEN).unwrap();
        set_permissions(&path, 0o600);
        chown(&path, Some(NOBODY_UID), None).unwrap();
        assert!(
            read_error_text(&path).contains("user 65534"),
            "{}",
            read_error_text(&path)
        );
        chown(&path, Some(ROOT_UID), None).unwrap();
        Secret::from_file(&path).unwrap();
        chown(folder.path(), Some(NOBODY_UID), None).unwrap();
        assert!(
            read_error_text(&path).contains("user 65534"),
            "{}",
            read_error_text(&path)
        );
    }

    #[test]
    fn account_ids_come_from_the_third_field() {
        let text = "root:x:0:\nzernelx:x:5:\nzernel:x:997:prometheus\n";
        assert_eq!(account_id(text, "zernel"), Some(997));
        assert_eq!(account_id(text, "zern"), None);
        assert_eq!(account_id("zernel", "zernel"), None);
    }
}
