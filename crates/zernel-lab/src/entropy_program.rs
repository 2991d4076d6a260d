//! A program of 220 bytes that credits the guest kernel with given random bytes.
//!
//! Without `rdrand` and with an exact clock the kernel finds no entropy, and `getrandom` blocks for seconds. Only an
//! ioctl credits the kernel with entropy, and no shell can call it: busybox has `seedrng` from version 1.36 on.

/// The address at which the program is loaded.
const LOAD_ADDRESS: u64 = 0x40_0000;
/// Sizes of the ELF header and of one program header, in bytes.
const ELF_HEADER_BYTES: u16 = 64;
const PROGRAM_HEADER_BYTES: u16 = 56;
const CODE_OFFSET: u64 = ELF_HEADER_BYTES as u64 + PROGRAM_HEADER_BYTES as u64;

/// The instructions of the program, followed by the path that they refer to. `struct rand_pool_info` comes right after
/// the path.
const PROGRAM_INSTRUCTIONS: &[u8] = &[
    0xb8, 0x02, 0x00, 0x00, 0x00, // mov eax, 2 (open)
    0x48, 0x8d, 0x3d, 0x27, 0x00, 0x00, 0x00, // lea rdi, [path]
    0xbe, 0x01, 0x00, 0x00, 0x00, // mov esi, 1 (O_WRONLY)
    0x0f, 0x05, // syscall
    0x89, 0xc7, // mov edi, eax
    0xb8, 0x10, 0x00, 0x00, 0x00, // mov eax, 16 (ioctl)
    0xbe, 0x03, 0x52, 0x08, 0x40, // mov esi, RNDADDENTROPY
    0x48, 0x8d, 0x15, 0x1a, 0x00, 0x00, 0x00, // lea rdx, [pool]
    0x0f, 0x05, // syscall
    0x89, 0xc7, // mov edi, eax
    0xf7, 0xdf, // neg edi
    0xb8, 0x3c, 0x00, 0x00, 0x00, // mov eax, 60 (exit), with the error number
    0x0f, 0x05, // syscall
];
const RANDOM_DEVICE_PATH: &[u8] = b"/dev/urandom\0";

/// The program as a static x86-64 executable.
pub(crate) fn build_executable(entropy: &[u8; 64]) -> Vec<u8> {
    let mut content = [PROGRAM_INSTRUCTIONS, RANDOM_DEVICE_PATH].concat();
    let bytes = entropy.len() as u32;
    content.extend((bytes * 8).to_le_bytes());
    content.extend(bytes.to_le_bytes());
    content.extend(entropy);
    let mut file = elf_header();
    file.extend(program_header(CODE_OFFSET + content.len() as u64));
    file.extend(content);
    file
}

fn elf_header() -> Vec<u8> {
    const ELF_TYPE_EXECUTABLE: u16 = 2;
    const ELF_MACHINE_X86_64: u16 = 62;
    let mut header = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    header.extend(ELF_TYPE_EXECUTABLE.to_le_bytes());
    header.extend(ELF_MACHINE_X86_64.to_le_bytes());
    header.extend(1_u32.to_le_bytes());
    // ELF header: entry point, offset of the program headers, no sections.
    for word in [LOAD_ADDRESS + CODE_OFFSET, u64::from(ELF_HEADER_BYTES), 0] {
        header.extend(word.to_le_bytes());
    }
    header.extend(0_u32.to_le_bytes());
    for half in [ELF_HEADER_BYTES, PROGRAM_HEADER_BYTES, 1, 0, 0, 0] {
        header.extend(half.to_le_bytes());
    }
    header
}

/// Program header: one segment with the whole file, readable and executable.
fn program_header(size: u64) -> Vec<u8> {
    const LOADABLE_SEGMENT: u32 = 1;
    const READ_AND_EXECUTE: u32 = 5;
    const PAGE_BYTES: u64 = 0x1000;
    let mut header = [
        LOADABLE_SEGMENT.to_le_bytes(),
        READ_AND_EXECUTE.to_le_bytes(),
    ]
    .concat();
    for word in [0, LOAD_ADDRESS, LOAD_ADDRESS, size, size, PAGE_BYTES] {
        header.extend(word.to_le_bytes());
    }
    header
}

#[cfg(test)]
mod tests {
    use super::*;
    use object::{Object, ObjectSegment};

    #[test]
    fn entropy_executable_is_one_segment_ending_with_entropy() {
        let file = build_executable(&[0x5a; 64]);
        let parsed = object::File::parse(&*file).unwrap();
        assert_eq!(parsed.entry(), LOAD_ADDRESS + CODE_OFFSET);
        let segment = parsed.segments().next().unwrap();
        assert_eq!(segment.size(), file.len() as u64);
        assert!(file.ends_with(&[0x5a; 64]));
    }

    /// Addresses in the code are distances from the next instruction.
    #[test]
    fn code_refers_to_device_path_and_entropy() {
        let operand_target = |at: usize| usize::from(PROGRAM_INSTRUCTIONS[at - 4]) + at;
        assert_eq!(operand_target(12), PROGRAM_INSTRUCTIONS.len());
        assert_eq!(
            operand_target(38),
            PROGRAM_INSTRUCTIONS.len() + RANDOM_DEVICE_PATH.len()
        );
    }
}
