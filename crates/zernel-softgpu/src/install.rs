//! Installs the software GPU's shared libraries under the names of the real ones.
//!
//! Cargo builds `libzernel_softgpu_cuda.so` and the other libraries; programs load `libcuda.so.1`.
//! Installing copies them into a directory for `LD_LIBRARY_PATH`. A copy may get another prologue in every
//! exported function, because real libraries have different prologues and a tracer must handle each.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

use object::{Object, ObjectSection, ObjectSymbol, SymbolKind};

/// Length of the stub of an exported function, in bytes.
pub const STUB_BYTES: usize = 16;

/// The three libraries: the file name that cargo gives each, and the name of the real one.
pub const CARGO_AND_REAL_LIBRARY_NAMES: [(&str, &str); 3] = [
    ("libzernel_softgpu_cuda.so", "libcuda.so.1"),
    ("libzernel_softgpu_nccl.so", "libnccl.so.2"),
    ("libzernel_softgpu_nvml.so", "libnvidia-ml.so.1"),
];

/// The first instructions of every exported function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Prologue {
    /// `push %rbp`, as the libraries are built: the kernel emulates it for an uprobe, which is cheap.
    #[default]
    Push,
    /// `endbr64`, then `push`: for an uprobe the kernel single-steps the first instruction, and emulates the second,
    /// so a probe is cheaper at the second.
    Endbr64,
    /// `mov %rdi,%rdi`, then `push`.
    Mov,
    /// `sub $8,%rsp`, and no `push` in the stub.
    Sub,
}

impl Prologue {
    /// All prologues.
    pub const ALL: [Self; 4] = [Self::Push, Self::Endbr64, Self::Mov, Self::Sub];

    /// Name of the prologue on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Push => "push",
            Self::Endbr64 => "endbr64",
            Self::Mov => "mov",
            Self::Sub => "sub",
        }
    }

    /// The prologue with this name on the command line.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|prologue| prologue.name() == name)
    }

    /// The machine code of the prologue: instructions that change nothing, before the jump to the body.
    #[must_use]
    pub fn machine_code(self) -> &'static [u8] {
        match self {
            Self::Push => &[0x55, 0x5d],
            Self::Endbr64 => &[0xf3, 0x0f, 0x1e, 0xfa, 0x55, 0x5d],
            Self::Mov => &[0x48, 0x89, 0xff, 0x55, 0x5d],
            Self::Sub => &[0x48, 0x83, 0xec, 0x08, 0x48, 0x83, 0xc4, 0x08],
        }
    }
}

/// Finds the directory with the built libraries: `ZERNEL_SOFTGPU_LIBRARIES`, or the folder of the running program
/// (where cargo leaves them, for programs and for tests), or `../lib/zernel`.
pub fn built_libraries() -> io::Result<PathBuf> {
    let program = env::current_exe()?;
    let beside = program.parent().unwrap_or(Path::new("/")).to_owned();
    let candidates = [
        env::var_os("ZERNEL_SOFTGPU_LIBRARIES").map(PathBuf::from),
        Some(beside.join("deps")),
        Some(beside.clone()),
        Some(beside.join("../lib/zernel")),
    ];
    let has_all = |directory: &PathBuf| {
        CARGO_AND_REAL_LIBRARY_NAMES
            .iter()
            .all(|(built, _)| directory.join(built).exists())
    };
    candidates.into_iter().flatten().find(has_all).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::NotFound,
            format!(
                "no software GPU libraries beside {}; build them (cargo build -p zernel-softgpu-cuda \
                 -p zernel-softgpu-nccl -p zernel-softgpu-nvml) or set ZERNEL_SOFTGPU_LIBRARIES",
                program.display()
            ),
        )
    })
}

/// Installs all three libraries into `directory`, and creates it if it does not exist.
pub fn install_libraries(directory: &Path, prologue: Prologue) -> io::Result<()> {
    let built = built_libraries()?;
    fs::create_dir_all(directory)?;
    for (source, name) in CARGO_AND_REAL_LIBRARY_NAMES {
        let mut library = fs::read(built.join(source))?;
        if prologue != Prologue::Push {
            rewrite_prologues(&mut library, prologue).map_err(|reason| {
                io::Error::new(io::ErrorKind::InvalidData, format!("{source}: {reason}"))
            })?;
        }
        replace_file(&directory.join(name), &library)?;
    }
    Ok(())
}

/// Writes a new file and renames it to `path`: a process may have the old file mapped.
fn replace_file(path: &Path, content: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension(format!("{}.new", std::process::id()));
    fs::write(&temporary, content)?;
    fs::rename(&temporary, path)
}

/// Offsets in the library file of all exported functions.
fn exported_functions(library: &[u8]) -> Result<Vec<usize>, String> {
    let file = object::File::parse(library).map_err(|error| error.to_string())?;
    let mut offsets = Vec::new();
    for symbol in file.dynamic_symbols() {
        if !symbol.is_definition() || symbol.kind() != SymbolKind::Text {
            continue;
        }
        let section = symbol
            .section_index()
            .ok_or("a function without a section")?;
        let section = file
            .section_by_index(section)
            .map_err(|error| error.to_string())?;
        let (start, _) = section.file_range().ok_or("a function outside the file")?;
        offsets.push((start + symbol.address() - section.address()) as usize);
    }
    Ok(offsets)
}

fn rewrite_prologues(library: &mut [u8], prologue: Prologue) -> Result<(), String> {
    for offset in exported_functions(library)? {
        let stub = library
            .get_mut(offset..offset + STUB_BYTES)
            .ok_or("a function outside the file")?;
        rewrite_stub(stub, prologue)
            .ok_or("an exported function is not one of our stubs; only x86-64 has them")?;
    }
    Ok(())
}

/// Writes other instructions before the jump of a stub, and moves the jump.
fn rewrite_stub(stub: &mut [u8], prologue: Prologue) -> Option<()> {
    const JUMP_OPCODE: u8 = 0xe9;
    const JUMP_BYTES: usize = 5;
    const TRAP_OPCODE: u8 = 0xcc;
    let old = Prologue::Push.machine_code();
    let rest = stub.strip_prefix(old)?.strip_prefix(&[JUMP_OPCODE])?;
    let distance = i32::from_le_bytes(rest.first_chunk::<4>().copied()?);
    let new = prologue.machine_code();
    let moved = i32::try_from(new.len() - old.len()).ok()?;
    stub.fill(TRAP_OPCODE);
    let (instructions, jump) = stub.split_at_mut(new.len());
    instructions.copy_from_slice(new);
    jump[0] = JUMP_OPCODE;
    jump[1..JUMP_BYTES].copy_from_slice(&(distance - moved).to_le_bytes());
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rewritten_stub_has_prologue_and_same_jump_target() {
        for prologue in Prologue::ALL {
            let mut stub = [0xcc; STUB_BYTES];
            stub[..7].copy_from_slice(&[0x55, 0x5d, 0xe9, 100, 0, 0, 0]);
            rewrite_stub(&mut stub, prologue).unwrap();
            let start = prologue.machine_code().len();
            assert_eq!(&stub[..start], prologue.machine_code());
            assert_eq!(stub[start], 0xe9);
            let distance = i32::from_le_bytes(stub[start + 1..start + 5].try_into().unwrap());
            assert_eq!(start as i32 + 5 + distance, 7 + 100);
        }
    }

    #[test]
    fn code_without_stub_is_not_rewritten() {
        let mut other = [0x90; STUB_BYTES];
        assert!(rewrite_stub(&mut other, Prologue::Mov).is_none());
        assert_eq!(other, [0x90; STUB_BYTES]);
    }
}
