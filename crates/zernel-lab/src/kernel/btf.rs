//! Finds out from a kernel's type information (BTF) whether BPF schedulers load.
//!
//! Some functions that the kernel offers to schedulers have a last argument `aux` which the kernel fills in itself. The
//! public prototype must not show this argument: the build tools move it to a second function, named `…_impl`. If the
//! build tools do not know this, the argument stays in the public prototype, and the verifier refuses every scheduler:
//! `func_proto incompatible with vmlinux`. Debian's 7.2.12 (pahole 1.30) is such a kernel, its 7.2.13 (pahole 1.32) is
//! not.

use std::collections::BTreeSet;

use thiserror::Error;

/// The bytes are not valid BTF.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the kernel's type information (BTF) is damaged")]
pub struct BadBtf;

/// Names of the functions for schedulers whose prototype shows the argument that the kernel fills in. If there is one,
/// no BPF scheduler loads.
///
/// # Errors
/// The bytes are not BTF.
pub fn malformed_scheduler_functions(btf: &[u8]) -> Result<Vec<String>, BadBtf> {
    let mut functions = Vec::new();
    let mut prototypes_with_aux = BTreeSet::new();
    let types = BtfTypes::parse(btf)?;
    for (id, btf_type) in (1_u32..).zip(types.clone()) {
        let btf_type = btf_type?;
        match btf_type.kind {
            KIND_FUNC => functions.push((types.name_at(btf_type.name_offset)?, btf_type.target_id)),
            KIND_FUNC_PROTO => {
                for parameter in btf_type.member_bytes.chunks_exact(PARAMETER_BYTES) {
                    if types.name_at(read_word(parameter, 0)?)? == b"aux" {
                        prototypes_with_aux.insert(id);
                    }
                }
            }
            _ => {}
        }
    }
    let malformed = functions.into_iter().filter(|(name, prototype)| {
        let is_offered = name.starts_with(b"scx_bpf_") || name.starts_with(b"__scx_bpf_");
        is_offered && !name.ends_with(b"_impl") && prototypes_with_aux.contains(prototype)
    });
    Ok(malformed
        .map(|(name, _)| String::from_utf8_lossy(name).into_owned())
        .collect())
}

const BTF_MAGIC: u16 = 0xeb9f;
const TYPE_BYTES: usize = 12;
const PARAMETER_BYTES: usize = 8;
const KIND_FUNC: u32 = 12;
const KIND_FUNC_PROTO: u32 = 13;

/// Number of bytes that follow a type of this kind with this number of members.
fn member_bytes_after_type(kind: u32, members: usize) -> Result<usize, BadBtf> {
    const KIND_INT: u32 = 1;
    const KIND_ARRAY: u32 = 3;
    const KIND_STRUCT: u32 = 4;
    const KIND_UNION: u32 = 5;
    const KIND_ENUM: u32 = 6;
    const KIND_VAR: u32 = 14;
    const KIND_DATASEC: u32 = 15;
    const KIND_DECL_TAG: u32 = 17;
    const LAST_KIND: u32 = 19;
    const KIND_ENUM64: u32 = LAST_KIND;
    match kind {
        KIND_INT | KIND_VAR | KIND_DECL_TAG => Ok(4),
        KIND_ARRAY => Ok(12),
        KIND_STRUCT | KIND_UNION | KIND_DATASEC | KIND_ENUM64 => Ok(members * 12),
        KIND_ENUM | KIND_FUNC_PROTO => Ok(members * PARAMETER_BYTES),
        1..=LAST_KIND => Ok(0),
        _ => Err(BadBtf),
    }
}

/// One type in the type information.
struct BtfType<'a> {
    kind: u32,
    name_offset: u32,
    /// For a function: the id of the type that is its prototype.
    target_id: u32,
    member_bytes: &'a [u8],
}

/// All types, in the order of their ids from 1 on.
#[derive(Clone)]
struct BtfTypes<'a> {
    type_bytes: &'a [u8],
    name_bytes: &'a [u8],
}

impl<'a> BtfTypes<'a> {
    fn parse(btf: &'a [u8]) -> Result<Self, BadBtf> {
        let magic = btf.first_chunk().map(|bytes| u16::from_le_bytes(*bytes));
        if magic != Some(BTF_MAGIC) {
            return Err(BadBtf);
        }
        // Offsets in the BTF header count from the end of the header.
        let header_bytes = read_word(btf, 4)? as usize;
        let section = |offset: usize| {
            let start = header_bytes
                .checked_add(read_word(btf, offset)? as usize)
                .ok_or(BadBtf)?;
            let end = start
                .checked_add(read_word(btf, offset + 4)? as usize)
                .ok_or(BadBtf)?;
            btf.get(start..end).ok_or(BadBtf)
        };
        Ok(Self {
            type_bytes: section(8)?,
            name_bytes: section(16)?,
        })
    }

    fn name_at(&self, offset: u32) -> Result<&'a [u8], BadBtf> {
        let rest = self.name_bytes.get(offset as usize..).ok_or(BadBtf)?;
        rest.split(|byte| *byte == 0).next().ok_or(BadBtf)
    }

    fn parse_next_type(&mut self) -> Result<BtfType<'a>, BadBtf> {
        let (fields, rest) = self.type_bytes.split_at_checked(TYPE_BYTES).ok_or(BadBtf)?;
        let info = read_word(fields, 4)?;
        let kind = info >> 24 & 0x1f;
        let trailing_size = member_bytes_after_type(kind, (info & 0xffff) as usize)?;
        let (member_bytes, rest) = rest.split_at_checked(trailing_size).ok_or(BadBtf)?;
        self.type_bytes = rest;
        Ok(BtfType {
            kind,
            name_offset: read_word(fields, 0)?,
            target_id: read_word(fields, 8)?,
            member_bytes,
        })
    }
}

impl<'a> Iterator for BtfTypes<'a> {
    type Item = Result<BtfType<'a>, BadBtf>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.type_bytes.is_empty() {
            return None;
        }
        let btf_type = self.parse_next_type();
        if btf_type.is_err() {
            self.type_bytes = &[];
        }
        Some(btf_type)
    }
}

/// The little-endian 32-bit word at an offset.
fn read_word(bytes: &[u8], offset: usize) -> Result<u32, BadBtf> {
    let word = bytes.get(offset..).and_then(|rest| rest.first_chunk());
    word.map(|bytes| u32::from_le_bytes(*bytes)).ok_or(BadBtf)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME_BYTES: &[u8] = b"\0aux\0scx_bpf_kick\0scx_bpf_kick_impl\0other\0cpu\0";

    fn name_offset(text: &str) -> u32 {
        let wanted = [b"\0", text.as_bytes(), b"\0"].concat();
        let place = NAME_BYTES
            .windows(wanted.len())
            .position(|part| part == wanted);
        place.unwrap() as u32 + 1
    }

    /// Adds a function and its prototype, which is the type with the next id.
    fn function_and_prototype(id: u32, function_name: &str, parameters: &[&str]) -> Vec<u8> {
        let mut words = vec![name_offset(function_name), KIND_FUNC << 24, id + 1];
        words.extend([0, KIND_FUNC_PROTO << 24 | parameters.len() as u32, 0]);
        for parameter in parameters {
            words.extend([name_offset(parameter), 0]);
        }
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn btf_with_functions(functions: &[(&str, &[&str])]) -> Vec<u8> {
        let ids = (1..).step_by(2);
        let types: Vec<u8> = ids
            .zip(functions)
            .flat_map(|(id, (name, parameters))| function_and_prototype(id, name, parameters))
            .collect();
        let mut bytes = vec![0x9f, 0xeb, 1, 0];
        for word in [
            24,
            0,
            types.len() as u32,
            types.len() as u32,
            NAME_BYTES.len() as u32,
        ] {
            bytes.extend(word.to_le_bytes());
        }
        [bytes, types, NAME_BYTES.to_vec()].concat()
    }

    #[test]
    fn public_kfuncs_with_aux_argument_are_malformed() {
        let good = btf_with_functions(&[
            ("scx_bpf_kick", &["cpu"]),
            ("scx_bpf_kick_impl", &["cpu", "aux"]),
            ("other", &["aux"]),
        ]);
        assert_eq!(malformed_scheduler_functions(&good), Ok(Vec::new()));
        let bad = btf_with_functions(&[("other", &["cpu"]), ("scx_bpf_kick", &["cpu", "aux"])]);
        assert_eq!(
            malformed_scheduler_functions(&bad),
            Ok(vec!["scx_bpf_kick".to_owned()])
        );
    }

    #[test]
    fn damaged_btf_never_panics() {
        let good = btf_with_functions(&[("scx_bpf_kick", &["cpu"])]);
        for length in 0..good.len() {
            assert_eq!(malformed_scheduler_functions(&good[..length]), Err(BadBtf));
        }
        for position in 0..good.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut changed = good.clone();
                changed[position] = value;
                // Damaged BTF gives an answer or an error, but never a panic.
                let _ = malformed_scheduler_functions(&changed);
            }
        }
    }

    #[test]
    fn btf_of_running_kernel_is_read() {
        if let Ok(btf) = std::fs::read("/sys/kernel/btf/vmlinux") {
            assert!(malformed_scheduler_functions(&btf).is_ok());
        }
    }
}
