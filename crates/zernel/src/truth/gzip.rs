//! Compressed files, by the program `gzip`.

use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread;

/// Most bytes of a file that are read.
const MAX_READ_BYTES: u64 = 1 << 30;

/// Whether the file is compressed, by its name.
pub(super) fn has_gzip_extension(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "gz")
}

/// Reads a file, which may be compressed.
pub(super) fn read_and_decompress(path: &Path) -> io::Result<Vec<u8>> {
    let file = std::fs::File::open(path)?;
    if !has_gzip_extension(path) {
        return read_to_limit(file);
    }
    let mut child = spawn_gzip("-dc", file.into())?;
    let bytes = child.stdout.take().map_or(Ok(Vec::new()), read_to_limit);
    wait_for_gzip(child)?;
    bytes
}

/// Compresses bytes.
pub(super) fn compress_bytes(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut child = spawn_gzip("-9nc", Stdio::piped())?;
    let (input, output) = (child.stdin.take(), child.stdout.take());
    let compressed = thread::scope(|scope| {
        let write = |mut input: ChildStdin| input.write_all(bytes);
        let written = scope.spawn(move || input.map_or(Ok(()), write));
        let compressed = output.map_or(Ok(Vec::new()), read_to_limit)?;
        match written.join() {
            Ok(written) => written.map(|()| compressed),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    });
    wait_for_gzip(child)?;
    compressed
}

fn spawn_gzip(option: &str, input: Stdio) -> io::Result<Child> {
    let mut command = Command::new("gzip");
    command.arg(option).stdin(input).stdout(Stdio::piped());
    let spawned = command.stderr(Stdio::null()).spawn();
    spawned.map_err(|error| io::Error::new(error.kind(), format!("cannot run gzip: {error}")))
}

fn wait_for_gzip(mut child: Child) -> io::Result<()> {
    match child.wait()?.success() {
        true => Ok(()),
        false => Err(io::Error::other(
            "gzip failed: the file is damaged or too large",
        )),
    }
}

fn read_to_limit(source: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(MAX_READ_BYTES + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > MAX_READ_BYTES {
        true => Err(io::Error::other("it is larger than 1 GiB")),
        false => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compressed_files_are_read_as_they_were() {
        let folder = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..200_000_u32).flat_map(u32::to_le_bytes).collect();
        for (name, content) in [
            ("a", bytes.clone()),
            ("a.gz", compress_bytes(&bytes).unwrap()),
        ] {
            let path = folder.path().join(name);
            std::fs::write(&path, content).unwrap();
            assert_eq!(read_and_decompress(&path).unwrap(), bytes, "{name}");
        }
        let damaged = folder.path().join("damaged.gz");
        std::fs::write(&damaged, b"no gzip").unwrap();
        assert!(read_and_decompress(&damaged).is_err());
    }
}
