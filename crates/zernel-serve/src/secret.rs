//! The token that TCP clients must send.

use std::fmt;
use std::fs::File;
use std::hint::black_box;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Shorter tokens can be guessed.
const MIN_BYTES: usize = 16;
/// Longer files are not token files.
const MAX_BYTES: usize = 4096;

/// A token. Its `Debug` output hides the text.
#[derive(Clone)]
pub struct Secret(String);

/// The reason why a token or token file is refused.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The file cannot be read or is not text.
    #[error("cannot read the token file {}: {source}", path.display())]
    Unreadable {
        /// The token file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Every user can read or replace the token.
    #[error("the token file {} is readable or writable by every user: run chmod o= on it", path.display())]
    Exposed {
        /// The token file.
        path: PathBuf,
    },
    /// The token is empty.
    #[error(
        "the token is empty: write one of at least {MIN_BYTES} bytes, e.g. from `openssl rand -hex 32`"
    )]
    Empty,
    /// The token is short enough to be guessed.
    #[error(
        "the token has {length} bytes, fewer than {MIN_BYTES}: use a longer one, e.g. from `openssl rand -hex 32`"
    )]
    Short {
        /// Length of the token in bytes.
        length: usize,
    },
    /// The text is too long for a token.
    #[error("the token has more than {MAX_BYTES} bytes; check that this is the token file")]
    Long,
    /// The token cannot be sent in an HTTP header.
    #[error(
        "the token contains a space or a non-ASCII character, which an HTTP header cannot carry"
    )]
    Unprintable,
}

impl Secret {
    /// Creates a token from `text`, without surrounding white space.
    pub fn new(text: &str) -> Result<Self, SecretError> {
        let token = text.trim();
        match token.len() {
            0 => Err(SecretError::Empty),
            length @ 1..MIN_BYTES => Err(SecretError::Short { length }),
            length if length > MAX_BYTES => Err(SecretError::Long),
            _ if !token.bytes().all(|byte| byte.is_ascii_graphic()) => {
                Err(SecretError::Unprintable)
            }
            _ => Ok(Self(token.to_owned())),
        }
    }

    /// Reads a token from a file. Refuses a file that every user can read or write.
    pub fn from_file(path: &Path) -> Result<Self, SecretError> {
        let unreadable = |source| SecretError::Unreadable {
            path: path.to_owned(),
            source,
        };
        // Opening a pipe or a device may block forever.
        if !path.metadata().map_err(unreadable)?.is_file() {
            return Err(unreadable(io::Error::other("it is not a regular file")));
        }
        let file = File::open(path).map_err(unreadable)?;
        let mode = file.metadata().map_err(unreadable)?.permissions().mode();
        if mode & 0o006 != 0 {
            return Err(SecretError::Exposed {
                path: path.to_owned(),
            });
        }
        let mut text = String::new();
        file.take(2 * MAX_BYTES as u64)
            .read_to_string(&mut text)
            .map_err(unreadable)?;
        Self::new(&text)
    }

    /// Whether `offered` is the token. The duration of the comparison depends only on the lengths.
    pub(crate) fn matches(&self, offered: &[u8]) -> bool {
        let token = self.0.as_bytes();
        let different = token
            .iter()
            .zip(offered)
            .fold(0, |different, (a, b)| black_box(different | (a ^ b)));
        token.len() == offered.len() && different == 0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "0123456789abcdef";

    #[test]
    fn only_the_token_matches() {
        let secret = Secret::new(TOKEN).unwrap();
        assert!(secret.matches(TOKEN.as_bytes()));
        for other in [
            "",
            "0123456789abcde",
            "0123456789abcdeF",
            "0123456789abcdef0",
        ] {
            assert!(!secret.matches(other.as_bytes()), "{other}");
        }
    }

    #[test]
    fn empty_short_long_and_unprintable_tokens_are_refused() {
        assert!(matches!(Secret::new(" \n"), Err(SecretError::Empty)));
        assert!(matches!(
            Secret::new("0123456789abcde\n"),
            Err(SecretError::Short { length: 15 })
        ));
        assert!(matches!(
            Secret::new("0123456789 abcdef"),
            Err(SecretError::Unprintable)
        ));
        assert!(matches!(
            Secret::new(&"x".repeat(MAX_BYTES + 1)),
            Err(SecretError::Long)
        ));
    }

    #[test]
    fn a_token_file_open_to_every_user_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), format!("  {TOKEN}\n")).unwrap();
        let chmod = |mode| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(file.path(), mode).unwrap();
        };
        for mode in [0o644, 0o602] {
            chmod(mode);
            let error = Secret::from_file(file.path()).unwrap_err();
            assert!(error.to_string().contains("chmod"), "{error}");
        }
        chmod(0o640);
        assert!(
            Secret::from_file(file.path())
                .unwrap()
                .matches(TOKEN.as_bytes())
        );
        let error = Secret::from_file(Path::new("/")).unwrap_err();
        assert!(error.to_string().contains("not a regular file"), "{error}");
        let error = Secret::from_file(Path::new("/nowhere/token")).unwrap_err();
        assert!(error.to_string().contains("/nowhere/token"), "{error}");
    }

    #[test]
    fn debug_output_hides_the_token() {
        assert_eq!(format!("{:?}", Secret::new(TOKEN).unwrap()), "Secret");
    }
}
