//! Chooses the instruction near a function's entry that is cheapest to probe.
//!
//! A probe replaces an instruction by a trap. The kernel *emulates* `push` of a register, one-byte `nop` and relative
//! branches. For any other instruction the CPU single-steps a copy, which costs a second trap and about ten times the
//! time. So if the kernel does not emulate a function's first instruction, the probe is placed on the first emulated
//! one after it. Everything that a probe sees must be unchanged up to that instruction: the stack pointer, the
//! argument registers, memory, and the number of executions per call.
//!
//! A full decoder is used instead of a list of harmless encodings. A list of encodings would have to be right about
//! all other instructions too, and could not find the branches of a whole function.

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, OpAccess,
    Register,
};

/// Largest distance from the entry to the probed instruction.
pub(super) const MAX_BYTES_AFTER_ENTRY: usize = 16;

/// Bytes of a function that decide which instruction is probed: the largest distance plus the
/// longest instruction.
pub(super) const ENTRY_BYTES: usize = MAX_BYTES_AFTER_ENTRY + 15;

/// Registers that a probe reads: the arguments, and the stack pointer to find the caller.
const CALL_REGISTERS: [Register; 7] = [
    Register::RSP,
    Register::RDI,
    Register::RSI,
    Register::RDX,
    Register::RCX,
    Register::R8,
    Register::R9,
];

/// Returns the bytes from the entry to the first emulated instruction, if all instructions before it
/// preserve the call. A call instruction qualifies only at the entry.
pub(super) fn first_emulated_instruction(code: &[u8]) -> Option<usize> {
    let mut decoder = Decoder::new(64, code, DecoderOptions::NONE);
    let mut effects = InstructionInfoFactory::new();
    loop {
        let bytes_after_entry = decoder.position();
        let rest = code.get(bytes_after_entry..)?;
        if bytes_after_entry > MAX_BYTES_AFTER_ENTRY || !decoder.can_decode() {
            return None;
        }
        let instruction = decoder.decode();
        if instruction.is_invalid() {
            return None;
        }
        if is_emulated(rest) && !(bytes_after_entry > 0 && is_call(&instruction)) {
            return Some(bytes_after_entry);
        }
        if !preserves_call_state(&instruction, &mut effects) {
            return None;
        }
    }
}

/// Whether the instruction at the start of `code` cannot be single-stepped as a copy by what it means in 32-bit code.
///
/// The kernel decodes a probed instruction once for all processes, as code of the first process that maps the file. Any
/// user can map a library in a 32-bit process. In 32-bit code an operand relative to the instruction pointer is an absolute
/// address, and REX and VEX prefixes are instructions. The copy of the instruction then reads a wrong address, or the
/// kernel corrects the target of a jump, and other processes crash.
pub(super) fn differs_in_32_bit_code(code: &[u8]) -> bool {
    let instruction = Decoder::new(64, code, DecoderOptions::NONE).decode();
    let has_prefix = matches!(code, [0x40..=0x4f | 0x62 | 0xc4 | 0xc5, ..]);
    let jumps = instruction.flow_control() != FlowControl::Next;
    instruction.is_ip_rel_memory_operand() || (has_prefix && jumps)
}

/// Whether the kernel emulates the instruction at the start of `code`.
///
/// Prefixed forms and longer `nop`s are excluded, because kernels differ in them. Some kernels turn
/// a probe on a five-byte `nop` into a call, which overwrites the red zone below the stack pointer.
fn is_emulated(code: &[u8]) -> bool {
    matches!(
        code,
        [0x50..=0x57, ..]               // push
            | [0x41, 0x50..=0x57, ..]   // push of r8 to r15
            | [0x90, ..]                // nop
            | [0xe8 | 0xe9 | 0xeb, ..]  // call, jmp
            | [0x70..=0x7f, ..]         // conditional jumps
            | [0x0f, 0x80..=0x8f, ..]
    )
}

/// Calls are excluded after the entry, because an emulated call does not update the shadow stack.
fn is_call(instruction: &Instruction) -> bool {
    instruction.flow_control() == FlowControl::Call
}

/// Whether the instruction leaves memory, the stack pointer and the argument registers unchanged.
fn preserves_call_state(instruction: &Instruction, effects: &mut InstructionInfoFactory) -> bool {
    if instruction.flow_control() != FlowControl::Next {
        return false;
    }
    if is_self_move(instruction) {
        return true;
    }
    let effects = effects.info(instruction);
    let registers = effects.used_registers().iter();
    let memory = effects.used_memory().iter();
    registers
        .filter(|used| CALL_REGISTERS.contains(&used.register().full_register()))
        .map(iced_x86::UsedRegister::access)
        .chain(memory.map(iced_x86::UsedMemory::access))
        .all(|access| {
            matches!(
                access,
                OpAccess::Read | OpAccess::CondRead | OpAccess::NoMemAccess | OpAccess::None
            )
        })
}

/// Whether the instruction is a 64-bit move of a register to itself, as left for hot patching. The 32-bit form of the
/// move is excluded, because it clears the upper half of the register.
fn is_self_move(instruction: &Instruction) -> bool {
    matches!(instruction.code(), Code::Mov_r64_rm64 | Code::Mov_rm64_r64)
        && instruction.op0_register() != Register::None
        && instruction.op0_register() == instruction.op1_register()
}

/// Whether no branch of the function targets an instruction after the entry, up to and including the one at
/// `bytes_after_entry`. `function` is the whole code of the function.
pub(super) fn is_executed_once_per_call(function: &[u8], bytes_after_entry: usize) -> bool {
    // An address far from zero, so that branch targets in both directions are valid.
    const ENTRY_ADDRESS: u64 = 1 << 40;
    let skipped = ENTRY_ADDRESS + 1..=ENTRY_ADDRESS + bytes_after_entry as u64;
    let mut decoder = Decoder::with_ip(64, function, ENTRY_ADDRESS, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        if instruction.is_invalid() || skipped.contains(&instruction.near_branch_target()) {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_emulated_first_instruction_is_chosen() {
        for code in [
            &[0x55, 0x48, 0x89, 0xe5][..], // push %rbp
            &[0x41, 0x57, 0x41, 0x56],     // push %r15
            &[0x90, 0xc3],                 // nop
            &[0xe9, 0, 0, 0, 0],           // jmp
            &[0xeb, 0xfe],                 // jmp, short
            &[0xe8, 0, 0, 0, 0, 0xc3],     // call
        ] {
            assert_eq!(first_emulated_instruction(code), Some(0), "{code:02x?}");
        }
    }

    #[test]
    fn instructions_that_preserve_the_call_are_skipped() {
        for (code, expected) in [
            (&[0xf3, 0x0f, 0x1e, 0xfa, 0x55][..], 4), // endbr64
            (&[0xf3, 0x0f, 0x1e, 0xfa, 0x41, 0x57], 4),
            (&[0x48, 0x89, 0xff, 0x55], 3),       // mov %rdi,%rdi
            (&[0x48, 0x89, 0xf8, 0x53], 3),       // mov %rdi,%rax
            (&[0x31, 0xc0, 0x53], 2),             // xor %eax,%eax
            (&[0x0f, 0x1f, 0x44, 0, 0, 0x55], 5), // five-byte nop
            (&[0x48, 0x85, 0xff, 0x74, 0x05], 3), // test %rdi,%rdi; je
            (&[0x48, 0x85, 0xff, 0x0f, 0x84, 0, 0, 0, 1], 3),
            (&[0x48, 0xb8, 1, 2, 3, 4, 5, 6, 7, 8, 0x55], 10), // movabs to %rax
            (&[0x4c, 0x8d, 0x54, 0x24, 0x08, 0x55], 5),        // lea 8(%rsp),%r10
            (&[0x8b, 0x07, 0x55], 2),                          // mov (%rdi),%eax
        ] {
            assert_eq!(
                first_emulated_instruction(code),
                Some(expected),
                "{code:02x?}"
            );
        }
    }

    #[test]
    fn instructions_that_change_the_call_are_not_skipped() {
        for code in [
            &[][..],
            &[0x48, 0x83, 0xec, 0x08, 0x55],       // sub $8,%rsp
            &[0x89, 0xff, 0x55],                   // mov %edi,%edi
            &[0x31, 0xff, 0x55],                   // xor %edi,%edi
            &[0x40, 0xb6, 0x01, 0x55],             // mov $1,%sil
            &[0x48, 0x0f, 0x44, 0xf8, 0x55],       // cmove %rax,%rdi
            &[0x48, 0x87, 0xc1, 0x55],             // xchg %rax,%rcx
            &[0x48, 0x99, 0x55],                   // cqo writes %rdx
            &[0xc7, 0x07, 0, 0, 0, 0, 0x55],       // movl $0,(%rdi)
            &[0x48, 0x89, 0x7c, 0x24, 0xf8, 0x55], // mov %rdi,-8(%rsp)
            &[0x6a, 0x00, 0x55],                   // push $0
            &[0xff, 0x37, 0x55],                   // push (%rdi)
            &[0x5d, 0x55],                         // pop
            &[0xff, 0xe0, 0x55],                   // jmp *%rax
            &[0xe3, 0x00, 0x55],                   // jrcxz
            &[0xc3, 0x55],                         // ret
            &[0x0f, 0x05, 0x55],                   // syscall
            &[0xcc, 0x55],                         // int3
            &[0x31, 0xc0, 0xe8, 0, 0, 0, 0],       // call after another instruction
            &[0x06, 0x55],                         // invalid instruction
            &[0x48],                               // incomplete instruction
            &[0xe9, 0, 0],
        ] {
            assert_eq!(first_emulated_instruction(code), None, "{code:02x?}");
        }
    }

    #[test]
    fn instructions_that_differ_in_32_bit_code_are_found() {
        for code in [
            &[0x48, 0x8b, 0x05, 1, 2, 3, 4][..], // mov 0x4030201(%rip),%rax
            &[0x8b, 0x05, 1, 2, 3, 4],           // mov 0x4030201(%rip),%eax
            &[0xff, 0x25, 1, 2, 3, 4],           // jmp *0x4030201(%rip)
            &[0x41, 0xff, 0xe2],                 // jmp *%r10
        ] {
            assert!(differs_in_32_bit_code(code), "{code:02x?}");
        }
        for code in [
            &[0x48, 0x83, 0xec, 0x08][..], // sub $8,%rsp
            &[0xf3, 0x0f, 0x1e, 0xfa],     // endbr64
            &[0x8b, 0x07],                 // mov (%rdi),%eax
            &[0xff, 0xe0],                 // jmp *%rax
            &[],
        ] {
            assert!(!differs_in_32_bit_code(code), "{code:02x?}");
        }
    }

    #[test]
    fn the_distance_from_the_entry_is_bounded() {
        let nops = |count: usize| {
            let mut code = [0x66, 0x90].repeat(count);
            code.push(0x55);
            code
        };
        assert_eq!(
            first_emulated_instruction(&nops(MAX_BYTES_AFTER_ENTRY / 2)),
            Some(MAX_BYTES_AFTER_ENTRY)
        );
        assert_eq!(
            first_emulated_instruction(&nops(MAX_BYTES_AFTER_ENTRY / 2 + 1)),
            None
        );
    }

    #[test]
    fn a_branch_into_the_skipped_range_is_found() {
        // xor %eax,%eax; push %rbx; nop; then a jump to offset `back`.
        let function = |back: i8| [0x31, 0xc0, 0x53, 0x90, 0xeb, (back - 6) as u8];
        assert!(is_executed_once_per_call(&function(0), 2), "to the entry");
        assert!(!is_executed_once_per_call(&function(2), 2), "to the push");
        assert!(is_executed_once_per_call(&function(3), 2), "past the push");
        assert!(
            !is_executed_once_per_call(&[0x31, 0xc0, 0x53, 0x06], 2),
            "undecodable"
        );
    }
}
