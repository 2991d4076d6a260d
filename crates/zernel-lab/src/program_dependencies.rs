//! Finds the files that an executable needs: its dynamic loader and its shared libraries.

use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use object::Endianness;
use object::elf::FileHeader64;
use object::read::ReadCache;
use object::read::elf::{FileHeader, ProgramHeader};
use thiserror::Error;

/// Why the files that an executable needs could not be determined.
#[derive(Debug, Error)]
pub enum ProgramError {
    /// The executable could not be read.
    #[error("cannot read the program {path}: {source}", path = path.display())]
    ProgramUnreadable {
        /// The path of the executable.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The file is not an executable that the guest could run by itself.
    #[error(
        "{path} is not a 64-bit ELF executable ({reason}); run a script through its interpreter instead",
        path = path.display()
    )]
    NotAnExecutable {
        /// The file that is no such executable.
        path: PathBuf,
        /// Why the file cannot be run.
        reason: String,
    },
    /// The dynamic loader of the executable refused to list its libraries.
    #[error(
        "{loader} cannot list the libraries of {path}: {reason}",
        loader = loader.display(),
        path = path.display()
    )]
    LoaderFailed {
        /// The path of the executable.
        path: PathBuf,
        /// The dynamic loader of the executable.
        loader: PathBuf,
        /// The error output of the dynamic loader.
        reason: String,
    },
    /// A library that the executable needs is not on this machine.
    #[error("{path} needs the library {library}, which is not on this machine; install it", path = path.display())]
    LibraryMissing {
        /// The path of the executable.
        path: PathBuf,
        /// The name of the library.
        library: String,
    },
}

/// The files that an executable needs at run time; none if it is linked statically.
pub(crate) fn needed_files(path: &Path) -> Result<Vec<PathBuf>, ProgramError> {
    let Some(loader) = dynamic_loader(path)? else {
        return Ok(Vec::new());
    };
    let mut files = list_libraries(path, &loader)?;
    files.push(loader);
    Ok(files)
}

/// The dynamic loader that an executable asks for; `None` if it is linked statically.
pub(crate) fn dynamic_loader(path: &Path) -> Result<Option<PathBuf>, ProgramError> {
    let unreadable = |source| ProgramError::ProgramUnreadable {
        path: path.to_owned(),
        source,
    };
    let malformed = |error: object::Error| ProgramError::NotAnExecutable {
        path: path.to_owned(),
        reason: error.to_string(),
    };
    let file_content = ReadCache::new(File::open(path).map_err(unreadable)?);
    let header = FileHeader64::<Endianness>::parse(&file_content).map_err(malformed)?;
    let endian = header.endian().map_err(malformed)?;
    for segment in header
        .program_headers(endian, &file_content)
        .map_err(malformed)?
    {
        if let Some(name) = segment
            .interpreter(endian, &file_content)
            .map_err(malformed)?
        {
            return Ok(Some(PathBuf::from(std::ffi::OsStr::from_bytes(name))));
        }
    }
    Ok(None)
}

/// Runs the dynamic loader to list the libraries of an executable, so that the list is what the loader would load.
/// Library settings of the environment are removed, because the guest does not have them.
fn list_libraries(path: &Path, loader: &Path) -> Result<Vec<PathBuf>, ProgramError> {
    let failed = |reason| ProgramError::LoaderFailed {
        path: path.to_owned(),
        loader: loader.to_owned(),
        reason,
    };
    let listing = Command::new(loader)
        .arg("--list")
        .arg(path)
        .env_remove("LD_LIBRARY_PATH")
        .env_remove("LD_PRELOAD")
        .output()
        .map_err(|error| failed(error.to_string()))?;
    let text = String::from_utf8_lossy(&listing.stdout);
    if let Some(library) = text
        .lines()
        .find_map(|line| line.trim().strip_suffix(" => not found"))
    {
        return Err(ProgramError::LibraryMissing {
            path: path.to_owned(),
            library: library.to_owned(),
        });
    }
    if !listing.status.success() {
        return Err(failed(
            String::from_utf8_lossy(&listing.stderr).trim().to_owned(),
        ));
    }
    Ok(text.lines().filter_map(parse_listed_library).collect())
}

/// The path of a library in a line of the loader's output such as
/// `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f…)`. The lines of the kernel's own library and of the loader
/// have no arrow.
fn parse_listed_library(line: &str) -> Option<PathBuf> {
    let (_, path_and_address) = line.split_once(" => ")?;
    let path = path_and_address
        .rsplit_once(" (")
        .map_or(path_and_address, |(path, _)| path);
    Some(PathBuf::from(path.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dynamic_program_needs_its_loader_and_libraries() {
        let needed = needed_files(Path::new("/bin/cat")).unwrap();
        let has_file_named = |part: &str| {
            needed
                .iter()
                .any(|path| path.to_string_lossy().contains(part))
        };
        assert!(
            has_file_named("ld-linux") || has_file_named("ld-musl"),
            "{needed:?}"
        );
        assert!(
            has_file_named("libc.so") || has_file_named("libc.musl"),
            "{needed:?}"
        );
        assert!(
            needed
                .iter()
                .all(|path| path.is_absolute() && path.exists()),
            "{needed:?}"
        );
    }

    #[test]
    fn script_without_interpreter_is_refused_with_hint() {
        let mut script = tempfile::NamedTempFile::new().unwrap();
        io::Write::write_all(&mut script, b"#!/bin/sh\necho hello\n").unwrap();
        let error = needed_files(script.path()).unwrap_err();
        assert!(
            matches!(error, ProgramError::NotAnExecutable { .. }),
            "{error}"
        );
        assert!(
            error.to_string().contains("through its interpreter"),
            "{error}"
        );
    }

    #[test]
    fn loader_list_lines_are_parsed() {
        let library =
            parse_listed_library("\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f0d)");
        assert_eq!(
            library,
            Some(PathBuf::from("/lib/x86_64-linux-gnu/libc.so.6"))
        );
        assert_eq!(parse_listed_library("\tlinux-vdso.so.1 (0x00007ffc)"), None);
        assert_eq!(parse_listed_library("\tstatically linked"), None);
    }
}
