//! The inside of a bootable kernel image: its release, and the type information (BTF) of the kernel that it unpacks.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;

use object::{Object, ObjectSection};

use super::{KernelError, file_error};

/// The release inside a kernel image, by the x86 boot protocol: a magic word is at 0x202, and at 0x20e is the offset of
/// the text, counted from 0x200. The builder's name follows the release in the text.
pub(super) fn read_release(image: &Path) -> Result<String, KernelError> {
    const MAX_RELEASE_BYTES: usize = 128;
    let file = File::open(image).map_err(|error| file_error(image, error))?;
    let not_an_image = || KernelError::NotAKernelImage {
        path: image.to_owned(),
    };
    let mut header = [0; 14];
    file.read_exact_at(&mut header, 0x202)
        .map_err(|_| not_an_image())?;
    if !header.starts_with(b"HdrS") {
        return Err(not_an_image());
    }
    let offset = u64::from(u16::from_le_bytes([header[12], header[13]])) + 0x200;
    let mut text = [0; MAX_RELEASE_BYTES];
    let length = file
        .read_at(&mut text, offset)
        .map_err(|error| file_error(image, error))?;
    let release = text[..length]
        .split(|byte| matches!(byte, 0 | b' '))
        .next()
        .unwrap_or_default();
    String::from_utf8(release.to_vec()).map_err(|_| not_an_image())
}

/// The BTF of the kernel in an image. `None` if the kernel has no BTF or is not compressed with zstd, as Debian's
/// kernels with sched_ext are.
pub(super) fn read_btf(image: &Path) -> Option<Vec<u8>> {
    let image = fs::read(image).ok()?;
    let mut vmlinux = Vec::new();
    ruzstd::decoding::StreamingDecoder::new(compressed_kernel(&image)?)
        .ok()?
        .read_to_end(&mut vmlinux)
        .ok()?;
    let file = object::File::parse(&*vmlinux).ok()?;
    let btf = file.section_by_name(".BTF")?;
    btf.data().ok().map(<[u8]>::to_vec)
}

/// The compressed kernel in an image, by the x86 boot protocol: it follows the setup code, whose size in sectors is at
/// 0x1f1.
fn compressed_kernel(image: &[u8]) -> Option<&[u8]> {
    const SECTOR_BYTES: usize = 512;
    const ZSTD_MAGIC: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
    let word_at = |offset: usize| {
        let bytes = image.get(offset..)?.first_chunk()?;
        usize::try_from(u32::from_le_bytes(*bytes)).ok()
    };
    let setup_bytes = (usize::from(*image.get(0x1f1)?) + 1) * SECTOR_BYTES;
    let start = setup_bytes.checked_add(word_at(0x248)?)?;
    let payload = image.get(start..start.checked_add(word_at(0x24c)?)?)?;
    payload.starts_with(ZSTD_MAGIC).then_some(payload)
}
