//! The token that TCP clients must send.

use std::fmt;
use std::hint::black_box;
use std::io;
use std::path::{Path, PathBuf};

use crate::token_file;

/// The shortest token in bytes: a shorter one can be guessed.
const MIN_TOKEN_BYTES: usize = 16;
/// The largest token file in bytes: a longer file is no token file.
pub(crate) const MAX_TOKEN_FILE_BYTES: usize = 4096;

/// A token. The `Debug` output of a secret hides the text.
#[derive(Clone)]
pub struct Secret {
    text: String,
    file: Option<PathBuf>,
}

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
    /// The file does not exist and cannot be created.
    #[error(
        "cannot create the token file {}: {source}; name another with --token-file, or start with --expose all if \
         this machine has a single user", path.display()
    )]
    CannotCreate {
        /// The token file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Every user can read the token, or others can replace it.
    #[error(
        "the token file {} is readable by every user or writable by others: run `chmod g-w,o= {}`, and write a new \
         token if others may have read it", path.display(), path.display()
    )]
    AccessibleToOthers {
        /// The token file.
        path: PathBuf,
    },
    /// The file, or a directory above it, belongs to a user who could replace the token.
    #[error(
        "the token file {} can be replaced by user {owner}, the owner of {}: give it to root, or name another file",
         file.display(), path.display()
    )]
    ForeignOwner {
        /// The token file.
        file: PathBuf,
        /// What belongs to the user: the file or a directory above it.
        path: PathBuf,
        /// The user.
        owner: u32,
    },
    /// Other users can write to a directory above the file.
    #[error(
        "the token file {} can be replaced by other users, who can write to {}: run `chmod go-w {}`",
         file.display(), path.display(), path.display()
    )]
    WritableDirectory {
        /// The token file.
        file: PathBuf,
        /// The directory.
        path: PathBuf,
    },
    /// The token is empty.
    #[error(
        "the token is empty: write one of at least {MIN_TOKEN_BYTES} bytes, e.g. from `openssl rand -hex 32`"
    )]
    EmptyToken,
    /// The token is short enough to be guessed.
    #[error(
        "the token has {length} bytes, fewer than {MIN_TOKEN_BYTES}: use a longer one, e.g. from `openssl rand -hex 32`"
    )]
    TooShort {
        /// Length of the token in bytes.
        length: usize,
    },
    /// The text is too long for a token.
    #[error(
        "the token has more than {MAX_TOKEN_FILE_BYTES} bytes; check that this is the token file"
    )]
    TooLong,
    /// The token cannot be sent in an HTTP header.
    #[error(
        "the token contains a space or a non-ASCII character, which an HTTP header cannot carry"
    )]
    InvalidCharacter,
}

impl Secret {
    /// Creates a token from `text`, without surrounding white space.
    pub fn new(text: &str) -> Result<Self, SecretError> {
        let token = text.trim();
        match token.len() {
            0 => Err(SecretError::EmptyToken),
            length @ 1..MIN_TOKEN_BYTES => Err(SecretError::TooShort { length }),
            length if length > MAX_TOKEN_FILE_BYTES => Err(SecretError::TooLong),
            _ if !token.bytes().all(|byte| byte.is_ascii_graphic()) => {
                Err(SecretError::InvalidCharacter)
            }
            _ => Ok(Self {
                text: token.to_owned(),
                file: None,
            }),
        }
    }

    /// Reads a token from a file. Refuses a file that every user can read, or that another user can
    /// replace.
    pub fn from_file(path: &Path) -> Result<Self, SecretError> {
        let mut secret = Self::new(&token_file::read_token_file(path)?)?;
        secret.file = Some(path.to_owned());
        Ok(secret)
    }

    /// Reads a token from a file like [`Secret::from_file`]. Without the file, creates it with a new
    /// random token that root and the group `zernel` can read.
    pub fn from_file_or_new(path: &Path) -> Result<Self, SecretError> {
        token_file::create_token_file_if_missing(path)?;
        Self::from_file(path)
    }

    /// The file that the token was read from.
    pub(crate) fn token_file_path(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Whether `offered` is the token. The duration of the comparison depends only on the lengths.
    pub(crate) fn matches_token(&self, offered: &[u8]) -> bool {
        let token = self.text.as_bytes();
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

    const TEST_TOKEN: &str = "0123456789abcdef";

    #[test]
    fn only_the_token_matches() {
        let secret = Secret::new(TEST_TOKEN).unwrap();
        assert!(secret.matches_token(TEST_TOKEN.as_bytes()));
        for other in [
            "",
            "0123456789abcde",
            "0123456789abcdeF",
            "0123456789abcdef0",
        ] {
            assert!(!secret.matches_token(other.as_bytes()), "{other}");
        }
    }

    #[test]
    fn empty_short_long_and_unprintable_tokens_are_refused() {
        assert!(matches!(Secret::new(" \n"), Err(SecretError::EmptyToken)));
        assert!(matches!(
            Secret::new("0123456789abcde\n"),
            Err(SecretError::TooShort { length: 15 })
        ));
        assert!(matches!(
            Secret::new("0123456789 abcdef"),
            Err(SecretError::InvalidCharacter)
        ));
        assert!(matches!(
            Secret::new(&"x".repeat(MAX_TOKEN_FILE_BYTES + 1)),
            Err(SecretError::TooLong)
        ));
    }

    #[test]
    fn debug_output_hides_the_token() {
        assert_eq!(format!("{:?}", Secret::new(TEST_TOKEN).unwrap()), "Secret");
    }
}
