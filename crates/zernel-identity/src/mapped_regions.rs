//! Reads `/proc/PID/maps`, in which a process chooses the paths.
//!
//! `procfs` is not used: it panics at a short path that begins with `/SYSV`, which any user can make
//! in a mount namespace, and it keeps all mappings in memory.

use std::io::{self, BufRead, BufReader, Read};

use procfs::process::Process;
use procfs::{ProcError, ProcResult};

/// Bytes read: 65,530 mappings, the kernel's default limit, with paths of 4 KiB and 512 bytes for the rest of a line.
const MAX_MAPS_BYTES: u64 = 288 << 20;

/// A mapped region of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappedRegion<'a> {
    /// First address.
    pub start: u64,
    /// Address after the last.
    pub end: u64,
    /// Whether the region is mapped as code.
    pub is_executable: bool,
    /// Offset in the file.
    pub offset: u64,
    /// Major and minor number of the file's device.
    pub device: (u32, u32),
    /// Inode of the file.
    pub inode: u64,
    /// Path of the file, possibly followed by ` (deleted)`; `None` for memory without a file.
    pub path: Option<&'a [u8]>,
}

impl<'a> MappedRegion<'a> {
    /// Parses a line of `/proc/PID/maps`.
    fn parse(line: &'a [u8]) -> Option<Self> {
        let (addresses, rest) = split_field(line)?;
        let (permissions, rest) = split_field(rest)?;
        let (offset, rest) = split_field(rest)?;
        let (device, rest) = split_field(rest)?;
        // The inode number is the last field before the path; without a path it ends the line.
        let (inode, path) = split_field(rest).unwrap_or((rest, &[]));
        let (start, end) = str::from_utf8(addresses).ok()?.split_once('-')?;
        let (major, minor) = str::from_utf8(device).ok()?.split_once(':')?;
        let path = path.trim_ascii_start();
        Some(Self {
            start: parse_hexadecimal(start)?,
            end: parse_hexadecimal(end)?,
            is_executable: permissions.contains(&b'x'),
            offset: parse_hexadecimal(str::from_utf8(offset).ok()?)?,
            device: (
                parse_hexadecimal(major)?.try_into().ok()?,
                parse_hexadecimal(minor)?.try_into().ok()?,
            ),
            inode: str::from_utf8(inode).ok()?.parse().ok()?,
            path: path.starts_with(b"/").then_some(path),
        })
    }
}

/// Splits a line at its first space, and returns the field before it and the rest.
fn split_field(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let space = line.iter().position(|byte| *byte == b' ')?;
    Some((&line[..space], &line[space + 1..]))
}

fn parse_hexadecimal(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

/// Calls `visit` with every mapped region of a process.
pub fn visit_mapped_regions(
    process: &Process,
    visit: impl FnMut(&MappedRegion<'_>),
) -> ProcResult<()> {
    let maps = process.open_relative("maps")?;
    read_mapped_regions(maps, visit).map_err(ProcError::from)
}

/// Calls `visit` with every region in the content of `/proc/PID/maps`. Skips lines of another form.
pub fn read_mapped_regions(
    maps: impl Read,
    mut visit: impl FnMut(&MappedRegion<'_>),
) -> io::Result<()> {
    let mut lines = BufReader::new(maps.take(MAX_MAPS_BYTES));
    let mut line = Vec::new();
    while lines.read_until(b'\n', &mut line)? > 0 {
        let text = line.strip_suffix(b"\n").unwrap_or(&line);
        if let Some(region) = MappedRegion::parse(text) {
            visit(&region);
        }
        line.clear();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use zernel_testkit::fuzz::FuzzTarget;

    use super::*;

    /// A short path that begins like that of shared memory, and one that is not valid text.
    const EXAMPLE_MAPS: &[u8] =
        b"8000-9000 r-xp 00001000 08:0a 5                  /opt/a b/libcuda.so.1 (deleted)\n\
        a000-b000 rwxs 00000000 00:01 6                          /SYSV\n\
        b000-c000 r-xp 00000000 00:01 7                          /SYSV\xff\xff\n\
        c000-d000 rw-p 00000000 00:00 0                          [heap]\n\
        d000-e000 rw-p 00000000 00:00 0 \n\
        e000-f000 r--p 00000000 00:00 0                          [stack:x\n\
        ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0  [vsyscall]\n";

    fn parsed_regions(maps: &[u8]) -> Vec<(u64, Option<Vec<u8>>)> {
        let mut regions = Vec::new();
        let visit = |region: &MappedRegion<'_>| {
            regions.push((region.start, region.path.map(<[u8]>::to_vec)));
        };
        read_mapped_regions(maps, visit).unwrap();
        regions
    }

    #[test]
    fn paths_are_taken_as_they_are() {
        let expected: [(u64, Option<&[u8]>); 7] = [
            (0x8000, Some(b"/opt/a b/libcuda.so.1 (deleted)")),
            (0xa000, Some(b"/SYSV")),
            (0xb000, Some(b"/SYSV\xff\xff")),
            (0xc000, None),
            (0xd000, None),
            (0xe000, None),
            (0xffff_ffff_ff60_0000, None),
        ];
        let expected = expected.map(|(start, path)| (start, path.map(<[u8]>::to_vec)));
        assert_eq!(parsed_regions(EXAMPLE_MAPS), expected);
        let line = EXAMPLE_MAPS.split(|byte| *byte == b'\n').next().unwrap();
        let region = MappedRegion::parse(line).unwrap();
        assert_eq!((region.end, region.offset), (0x9000, 0x1000));
        assert_eq!((region.device, region.inode), ((8, 10), 5));
        assert!(region.is_executable);
    }

    #[test]
    fn own_regions_agree_with_procfs() {
        let process = Process::myself().unwrap();
        let mut code = Vec::new();
        visit_mapped_regions(&process, |region| {
            if region.is_executable && region.path.is_some() {
                code.push((region.start, region.end, region.offset, region.inode));
            }
        })
        .unwrap();
        let maps = process.maps().unwrap();
        let executable = procfs::process::MMPermissions::EXECUTE;
        let expected = maps.iter().filter(|map| map.perms.contains(executable));
        let expected = expected
            .filter(|map| matches!(map.pathname, procfs::process::MMapPath::Path(_)))
            .map(|map| (map.address.0, map.address.1, map.offset, map.inode));
        assert!(code.len() > 2, "{code:?}");
        assert_eq!(code, expected.collect::<Vec<_>>());
    }

    #[test]
    fn fuzz_maps() {
        let words = [
            "[stack:",
            "[anon:",
            "/SYSV",
            " (deleted)",
            "-",
            ":",
            "]",
            "rwxp",
            "\n",
            " /",
        ];
        let mut found = 0_u64;
        let target = FuzzTarget::new("maps", 30_000)
            .input(EXAMPLE_MAPS)
            .words(words);
        let outcome = target.run(|maps| {
            let regions = parsed_regions(maps);
            assert!(regions.len() <= maps.len() / 10 + 1);
            found += regions.len() as u64;
        });
        assert!(found > outcome.inputs, "{found}: {outcome:?}");
    }
}
