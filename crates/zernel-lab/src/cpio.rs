//! Writes the "newc" cpio format, from which the kernel unpacks an initramfs.
//!
//! The same calls write the same bytes: owners and times are zero, inode numbers count up.

use std::io::{self, Read, Write};

const MODE_REGULAR_FILE: u32 = 0o100_000;
const MODE_DIRECTORY: u32 = 0o040_000;
const MODE_SYMLINK: u32 = 0o120_000;
const TRAILER_NAME: &[u8] = b"TRAILER!!!";
/// Names and contents of entries start at multiples of this number of bytes.
const ALIGNMENT_BYTES: u64 = 4;

/// Writes one cpio archive. Names are paths without a leading slash; a folder must come before its contents.
pub(crate) struct CpioWriter<W> {
    output: W,
    written_bytes: u64,
    last_inode: u32,
}

impl<W: Write> CpioWriter<W> {
    pub(crate) fn new(output: W) -> Self {
        Self {
            output,
            written_bytes: 0,
            last_inode: 0,
        }
    }

    pub(crate) fn write_directory(&mut self, name: &[u8], mode: u32) -> io::Result<()> {
        self.write_entry(name, MODE_DIRECTORY | mode, 0, &mut io::empty())
    }

    pub(crate) fn write_symlink(&mut self, name: &[u8], target: &[u8]) -> io::Result<()> {
        self.write_entry(name, MODE_SYMLINK | 0o777, target.len() as u64, &mut {
            target
        })
    }

    /// Adds a regular file of exactly `size` bytes, copied from `content` without holding it in memory.
    pub(crate) fn write_file(
        &mut self,
        name: &[u8],
        mode: u32,
        size: u64,
        content: &mut impl Read,
    ) -> io::Result<()> {
        self.write_entry(name, MODE_REGULAR_FILE | mode, size, content)
    }

    /// Ends the archive and returns the sink that it was written to.
    pub(crate) fn finish_archive(mut self) -> io::Result<W> {
        self.write_header(TRAILER_NAME, 0, 0, 0)?;
        self.output.flush()?;
        Ok(self.output)
    }

    fn write_entry(
        &mut self,
        name: &[u8],
        mode: u32,
        size: u64,
        content: &mut impl Read,
    ) -> io::Result<()> {
        let size_field = u32::try_from(size).map_err(|_| {
            io::Error::new(
                io::ErrorKind::FileTooLarge,
                "the cpio format ends at 4 GiB a file",
            )
        })?;
        self.last_inode += 1;
        self.write_header(name, self.last_inode, mode, size_field)?;
        let copied_bytes = io::copy(&mut content.take(size), &mut self.output)?;
        if copied_bytes != size {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the file shrank while it was being copied",
            ));
        }
        self.written_bytes += copied_bytes;
        self.write_padding()
    }

    fn write_header(&mut self, name: &[u8], inode: u32, mode: u32, size: u32) -> io::Result<()> {
        let name_size = u32::try_from(name.len() + 1).map_err(|_| {
            io::Error::new(io::ErrorKind::InvalidInput, "a file name longer than 4 GiB")
        })?;
        const OWNER_ID: u32 = 0;
        const LINK_COUNT: u32 = 1;
        const MODIFICATION_TIME: u32 = 0;
        const DEVICE_NUMBER: u32 = 0;
        const CHECKSUM: u32 = 0;
        let fields = [
            inode,
            mode,
            OWNER_ID,
            OWNER_ID,
            LINK_COUNT,
            MODIFICATION_TIME,
            size,
            DEVICE_NUMBER,
            DEVICE_NUMBER,
            DEVICE_NUMBER,
            DEVICE_NUMBER,
            name_size,
            CHECKSUM,
        ];
        self.write_bytes(b"070701")?;
        for field in fields {
            self.write_bytes(format!("{field:08X}").as_bytes())?;
        }
        self.write_bytes(name)?;
        self.write_bytes(b"\0")?;
        self.write_padding()
    }

    fn write_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written_bytes += bytes.len() as u64;
        self.output.write_all(bytes)
    }

    fn write_padding(&mut self) -> io::Result<()> {
        let padding_bytes =
            self.written_bytes.next_multiple_of(ALIGNMENT_BYTES) - self.written_bytes;
        self.write_bytes(&[0; ALIGNMENT_BYTES as usize][..padding_bytes as usize])
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// One entry of a cpio archive, as a reader that is independent of the writer sees it.
    #[derive(Debug, PartialEq, Eq)]
    pub(crate) struct CpioEntry {
        pub(crate) name: String,
        pub(crate) inode: u32,
        pub(crate) mode: u32,
        pub(crate) content: Vec<u8>,
    }

    /// Reads a cpio archive by the format's description (`Documentation/driver-api/early-userspace/buffer-format.rst`).
    pub(crate) fn read_archive(archive: &[u8]) -> Vec<CpioEntry> {
        let mut entries = Vec::new();
        let mut entry_start = 0;
        loop {
            assert_eq!(
                &archive[entry_start..entry_start + 6],
                b"070701",
                "magic at {entry_start}"
            );
            let header_field = |index: usize| {
                let start = entry_start + 6 + 8 * index;
                u32::from_str_radix(std::str::from_utf8(&archive[start..start + 8]).unwrap(), 16)
                    .unwrap()
            };
            let (name_size, size) = (header_field(11) as usize, header_field(6) as usize);
            let name = String::from_utf8(
                archive[entry_start + 110..entry_start + 110 + name_size - 1].to_vec(),
            )
            .unwrap();
            let content_start = (entry_start + 110 + name_size).next_multiple_of(4);
            if name == "TRAILER!!!" {
                assert_eq!(content_start, archive.len(), "nothing follows the trailer");
                return entries;
            }
            let content = archive[content_start..content_start + size].to_vec();
            entries.push(CpioEntry {
                name,
                inode: header_field(0),
                mode: header_field(1),
                content,
            });
            entry_start = (content_start + size).next_multiple_of(4);
        }
    }

    #[test]
    fn names_and_contents_of_all_lengths_round_trip() {
        let mut writer = CpioWriter::new(Vec::new());
        writer.write_directory(b"d", 0o755).unwrap();
        let contents: Vec<Vec<u8>> = (0..9).map(|length| vec![0xA5; length]).collect();
        for (index, content) in contents.iter().enumerate() {
            let name = format!("d/{}", "n".repeat(index + 1));
            writer
                .write_file(
                    name.as_bytes(),
                    0o640,
                    content.len() as u64,
                    &mut content.as_slice(),
                )
                .unwrap();
        }
        writer.write_symlink(b"d/link", b"../target").unwrap();
        let entries = read_archive(&writer.finish_archive().unwrap());

        assert_eq!(entries.len(), 11);
        assert_eq!(entries[0].mode, 0o040_755);
        for (index, content) in contents.iter().enumerate() {
            assert_eq!(&entries[index + 1].content, content);
            assert_eq!(entries[index + 1].mode, 0o100_640);
        }
        assert_eq!(entries[10].content, b"../target");
        assert_eq!(entries[10].mode, 0o120_777);
        let inodes: Vec<u32> = entries.iter().map(|entry| entry.inode).collect();
        assert_eq!(inodes, (1..=11).collect::<Vec<u32>>());
    }

    #[test]
    fn too_short_file_is_error_and_too_long_file_is_cut() {
        let mut writer = CpioWriter::new(Vec::new());
        let error = writer
            .write_file(b"short", 0o644, 10, &mut b"123".as_slice())
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);

        let mut writer = CpioWriter::new(Vec::new());
        writer
            .write_file(b"long", 0o644, 2, &mut b"123".as_slice())
            .unwrap();
        assert_eq!(
            read_archive(&writer.finish_archive().unwrap())[0].content,
            b"12"
        );
    }

    #[test]
    fn file_of_4_gib_is_refused() {
        let mut writer = CpioWriter::new(io::sink());
        let error = writer
            .write_file(b"huge", 0o644, 1 << 32, &mut io::repeat(0))
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
    }
}
