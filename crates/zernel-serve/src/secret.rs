//! The token that clients from other machines must show.

use std::fmt;
use std::fs::File;
use std::hint::black_box;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// A token shorter than this can be guessed.
const MIN_BYTES: usize = 16;
/// No token is longer than this; a file that is was named by mistake.
const MAX_BYTES: usize = 4096;

/// A token; its text is never printed.
#[derive(Clone)]
pub struct Secret(String);

/// Why a token is refused.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The file does not open, or is not text.
    #[error("cannot read the token file {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Every user of the machine could read the token, or put another in its place.
    #[error("the token file {} is readable or writable by every user: run chmod o= on it", path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
    },
    /// There is no token.
    #[error(
        "the token is empty: write one of at least {MIN_BYTES} bytes, e.g. from `openssl rand -hex 32`"
    )]
    Empty,
    /// It could be guessed.
    #[error(
        "the token has {length} bytes, fewer than {MIN_BYTES}: take a longer one, e.g. from `openssl rand -hex 32`"
    )]
    Short {
        /// How many bytes it has.
        length: usize,
    },
    /// It is no token at all.
    #[error("the token has more than {MAX_BYTES} bytes: is this the right file?")]
    Long,
    /// It does not fit into a header.
    #[error(
        "the token has a space or a character that is not ASCII, which no HTTP header can carry"
    )]
    Unprintable,
}

impl Secret {
    /// Takes a token, without the white space around it.
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

    /// Reads a token from a file that not every user can read.
    pub fn from_file(path: &Path) -> Result<Self, SecretError> {
        let unreadable = |source| SecretError::Unreadable {
            path: path.to_owned(),
            source,
        };
        // Opening anything else may take for ever.
        if !path.metadata().map_err(unreadable)?.is_file() {
            return Err(unreadable(io::Error::other("it is not a file")));
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

    /// Whether `offered` is the token. How long it takes tells nothing but its length.
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
        assert!(error.to_string().contains("not a file"), "{error}");
        let error = Secret::from_file(Path::new("/nowhere/token")).unwrap_err();
        assert!(error.to_string().contains("/nowhere/token"), "{error}");
    }

    #[test]
    fn debug_output_hides_the_token() {
        assert_eq!(format!("{:?}", Secret::new(TOKEN).unwrap()), "Secret");
    }
}
