//! The "newc" cpio format, the one the kernel unpacks an initramfs from.
//!
//! The same calls give the same bytes: owners and times are zero, inode numbers count up.

use std::io::{self, Read, Write};

const REGULAR: u32 = 0o100_000;
const DIRECTORY: u32 = 0o040_000;
const SYMLINK: u32 = 0o120_000;
const TRAILER: &[u8] = b"TRAILER!!!";
/// Names and contents start at multiples of this.
const ALIGNMENT: u64 = 4;

/// Writes one archive. Names are paths without a leading slash; a folder must come before its contents.
pub(crate) struct CpioWriter<W> {
    sink: W,
    written: u64,
    last_inode: u32,
}

impl<W: Write> CpioWriter<W> {
    pub(crate) fn new(sink: W) -> Self {
        Self {
            sink,
            written: 0,
            last_inode: 0,
        }
    }

    pub(crate) fn directory(&mut self, name: &[u8], mode: u32) -> io::Result<()> {
        self.entry(name, DIRECTORY | mode, 0, &mut io::empty())
    }

    pub(crate) fn symlink(&mut self, name: &[u8], target: &[u8]) -> io::Result<()> {
        self.entry(name, SYMLINK | 0o777, target.len() as u64, &mut { target })
    }

    /// A regular file of exactly `size` bytes, copied from `content` without holding it in memory.
    pub(crate) fn file(
        &mut self,
        name: &[u8],
        mode: u32,
        size: u64,
        content: &mut impl Read,
    ) -> io::Result<()> {
        self.entry(name, REGULAR | mode, size, content)
    }

    /// Ends the archive and gives the sink back.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.header(TRAILER, 0, 0, 0)?;
        self.sink.flush()?;
        Ok(self.sink)
    }

    fn entry(
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
        self.header(name, self.last_inode, mode, size_field)?;
        let copied = io::copy(&mut content.take(size), &mut self.sink)?;
        if copied != size {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the file shrank while it was being copied",
            ));
        }
        self.written += copied;
        self.pad()
    }

    fn header(&mut self, name: &[u8], inode: u32, mode: u32, size: u32) -> io::Result<()> {
        let name_size = u32::try_from(name.len() + 1).map_err(|_| {
            io::Error::new(io::ErrorKind::InvalidInput, "a file name longer than 4 GiB")
        })?;
        const OWNER: u32 = 0;
        const LINKS: u32 = 1;
        const TIME: u32 = 0;
        const DEVICE: u32 = 0;
        const CHECKSUM: u32 = 0;
        let fields = [
            inode, mode, OWNER, OWNER, LINKS, TIME, size, DEVICE, DEVICE, DEVICE, DEVICE,
            name_size, CHECKSUM,
        ];
        self.put(b"070701")?;
        for field in fields {
            self.put(format!("{field:08X}").as_bytes())?;
        }
        self.put(name)?;
        self.put(b"\0")?;
        self.pad()
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len() as u64;
        self.sink.write_all(bytes)
    }

    fn pad(&mut self) -> io::Result<()> {
        let missing = self.written.next_multiple_of(ALIGNMENT) - self.written;
        self.put(&[0; ALIGNMENT as usize][..missing as usize])
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// One entry as an independent reader sees it.
    #[derive(Debug, PartialEq, Eq)]
    pub(crate) struct ReadEntry {
        pub(crate) name: String,
        pub(crate) inode: u32,
        pub(crate) mode: u32,
        pub(crate) content: Vec<u8>,
    }

    /// Reads an archive by the format's description (`Documentation/driver-api/early-userspace/buffer-format.rst`).
    pub(crate) fn read(archive: &[u8]) -> Vec<ReadEntry> {
        let mut entries = Vec::new();
        let mut at = 0;
        loop {
            assert_eq!(&archive[at..at + 6], b"070701", "magic at {at}");
            let field = |index: usize| {
                let start = at + 6 + 8 * index;
                u32::from_str_radix(std::str::from_utf8(&archive[start..start + 8]).unwrap(), 16)
                    .unwrap()
            };
            let (name_size, size) = (field(11) as usize, field(6) as usize);
            let name =
                String::from_utf8(archive[at + 110..at + 110 + name_size - 1].to_vec()).unwrap();
            let data = (at + 110 + name_size).next_multiple_of(4);
            if name == "TRAILER!!!" {
                assert_eq!(data, archive.len(), "nothing follows the trailer");
                return entries;
            }
            let content = archive[data..data + size].to_vec();
            entries.push(ReadEntry {
                name,
                inode: field(0),
                mode: field(1),
                content,
            });
            at = (data + size).next_multiple_of(4);
        }
    }

    #[test]
    fn every_name_and_content_length_survives() {
        let mut writer = CpioWriter::new(Vec::new());
        writer.directory(b"d", 0o755).unwrap();
        let contents: Vec<Vec<u8>> = (0..9).map(|length| vec![0xA5; length]).collect();
        for (index, content) in contents.iter().enumerate() {
            let name = format!("d/{}", "n".repeat(index + 1));
            writer
                .file(
                    name.as_bytes(),
                    0o640,
                    content.len() as u64,
                    &mut content.as_slice(),
                )
                .unwrap();
        }
        writer.symlink(b"d/link", b"../target").unwrap();
        let entries = read(&writer.finish().unwrap());

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
    fn a_file_that_shrinks_is_an_error_and_one_that_grows_is_cut() {
        let mut writer = CpioWriter::new(Vec::new());
        let error = writer
            .file(b"short", 0o644, 10, &mut b"123".as_slice())
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);

        let mut writer = CpioWriter::new(Vec::new());
        writer
            .file(b"long", 0o644, 2, &mut b"123".as_slice())
            .unwrap();
        assert_eq!(read(&writer.finish().unwrap())[0].content, b"12");
    }

    #[test]
    fn a_file_the_format_cannot_hold_is_refused() {
        let mut writer = CpioWriter::new(io::sink());
        let error = writer
            .file(b"huge", 0o644, 1 << 32, &mut io::repeat(0))
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
    }
}
