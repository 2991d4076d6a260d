//! Whether a kernel's type information (BTF) lets BPF schedulers load.
//!
//! Some functions that the kernel offers to schedulers have a last argument `aux` which the kernel fills in itself. The
//! public prototype must not show it: the build tools move it to a second function, named `…_impl`. Kernels built
//! with tools that do not know this keep it, and then the verifier refuses every scheduler: `func_proto incompatible
//! with vmlinux`. Debian's 7.2.12 (pahole 1.30) is such a kernel, its 7.2.13 (pahole 1.32) is not.

use std::collections::BTreeSet;

use thiserror::Error;

/// A text that is no BTF.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the kernel's type information (BTF) is damaged")]
pub struct BadBtf;

/// Names of the functions for schedulers whose prototype shows the argument that the kernel fills in. With one of them
/// no BPF scheduler loads.
///
/// # Errors
/// The bytes are not BTF.
pub fn malformed_scheduler_functions(btf: &[u8]) -> Result<Vec<String>, BadBtf> {
    let mut functions = Vec::new();
    let mut prototypes_with_aux = BTreeSet::new();
    let types = Types::parse(btf)?;
    for (id, item) in (1_u32..).zip(types.clone()) {
        let item = item?;
        match item.kind {
            FUNC => functions.push((types.name(item.name)?, item.target)),
            FUNC_PROTO => {
                for parameter in item.members.chunks_exact(PARAMETER_SIZE) {
                    if types.name(word(parameter, 0)?)? == b"aux" {
                        prototypes_with_aux.insert(id);
                    }
                }
            }
            _ => {}
        }
    }
    let malformed = functions.into_iter().filter(|(name, prototype)| {
        let offered = name.starts_with(b"scx_bpf_") || name.starts_with(b"__scx_bpf_");
        offered && !name.ends_with(b"_impl") && prototypes_with_aux.contains(prototype)
    });
    Ok(malformed
        .map(|(name, _)| String::from_utf8_lossy(name).into_owned())
        .collect())
}

const MAGIC: u16 = 0xeb9f;
const TYPE_SIZE: usize = 12;
const PARAMETER_SIZE: usize = 8;
const FUNC: u32 = 12;
const FUNC_PROTO: u32 = 13;

/// Bytes that follow a type of this kind with this number of members.
fn trailing_bytes(kind: u32, members: usize) -> Result<usize, BadBtf> {
    const INT: u32 = 1;
    const ARRAY: u32 = 3;
    const STRUCT: u32 = 4;
    const UNION: u32 = 5;
    const ENUM: u32 = 6;
    const VAR: u32 = 14;
    const DATASEC: u32 = 15;
    const DECL_TAG: u32 = 17;
    const LAST: u32 = 19;
    const ENUM64: u32 = LAST;
    match kind {
        INT | VAR | DECL_TAG => Ok(4),
        ARRAY => Ok(12),
        STRUCT | UNION | DATASEC | ENUM64 => Ok(members * 12),
        ENUM | FUNC_PROTO => Ok(members * PARAMETER_SIZE),
        1..=LAST => Ok(0),
        _ => Err(BadBtf),
    }
}

/// One type.
struct Type<'a> {
    kind: u32,
    name: u32,
    /// The type that it refers to, for functions.
    target: u32,
    members: &'a [u8],
}

/// The types of a BTF, in the order of their ids from 1 on.
#[derive(Clone)]
struct Types<'a> {
    types: &'a [u8],
    names: &'a [u8],
}

impl<'a> Types<'a> {
    fn parse(btf: &'a [u8]) -> Result<Self, BadBtf> {
        let magic = btf.first_chunk().map(|bytes| u16::from_le_bytes(*bytes));
        if magic != Some(MAGIC) {
            return Err(BadBtf);
        }
        // Offsets count from the end of the header.
        let header = word(btf, 4)? as usize;
        let section = |offset: usize| {
            let start = header
                .checked_add(word(btf, offset)? as usize)
                .ok_or(BadBtf)?;
            let end = start
                .checked_add(word(btf, offset + 4)? as usize)
                .ok_or(BadBtf)?;
            btf.get(start..end).ok_or(BadBtf)
        };
        Ok(Self {
            types: section(8)?,
            names: section(16)?,
        })
    }

    fn name(&self, offset: u32) -> Result<&'a [u8], BadBtf> {
        let rest = self.names.get(offset as usize..).ok_or(BadBtf)?;
        rest.split(|byte| *byte == 0).next().ok_or(BadBtf)
    }

    fn take_type(&mut self) -> Result<Type<'a>, BadBtf> {
        let (fields, rest) = self.types.split_at_checked(TYPE_SIZE).ok_or(BadBtf)?;
        let info = word(fields, 4)?;
        let kind = info >> 24 & 0x1f;
        let trailing = trailing_bytes(kind, (info & 0xffff) as usize)?;
        let (members, rest) = rest.split_at_checked(trailing).ok_or(BadBtf)?;
        self.types = rest;
        Ok(Type {
            kind,
            name: word(fields, 0)?,
            target: word(fields, 8)?,
            members,
        })
    }
}

impl<'a> Iterator for Types<'a> {
    type Item = Result<Type<'a>, BadBtf>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.types.is_empty() {
            return None;
        }
        let item = self.take_type();
        if item.is_err() {
            self.types = &[];
        }
        Some(item)
    }
}

/// The little-endian word at an offset.
fn word(bytes: &[u8], offset: usize) -> Result<u32, BadBtf> {
    let word = bytes.get(offset..).and_then(|rest| rest.first_chunk());
    word.map(|bytes| u32::from_le_bytes(*bytes)).ok_or(BadBtf)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: &[u8] = b"\0aux\0scx_bpf_kick\0scx_bpf_kick_impl\0other\0cpu\0";

    fn name(text: &str) -> u32 {
        let wanted = [b"\0", text.as_bytes(), b"\0"].concat();
        let place = NAMES.windows(wanted.len()).position(|part| part == wanted);
        place.unwrap() as u32 + 1
    }

    /// A function and its prototype, which is the type with the next id.
    fn function(id: u32, function_name: &str, parameters: &[&str]) -> Vec<u8> {
        let mut words = vec![name(function_name), FUNC << 24, id + 1];
        words.extend([0, FUNC_PROTO << 24 | parameters.len() as u32, 0]);
        for parameter in parameters {
            words.extend([name(parameter), 0]);
        }
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn btf(functions: &[(&str, &[&str])]) -> Vec<u8> {
        let ids = (1..).step_by(2);
        let types: Vec<u8> = ids
            .zip(functions)
            .flat_map(|(id, (name, parameters))| function(id, name, parameters))
            .collect();
        let mut bytes = vec![0x9f, 0xeb, 1, 0];
        for word in [
            24,
            0,
            types.len() as u32,
            types.len() as u32,
            NAMES.len() as u32,
        ] {
            bytes.extend(word.to_le_bytes());
        }
        [bytes, types, NAMES.to_vec()].concat()
    }

    #[test]
    fn only_public_scheduler_functions_with_the_hidden_argument_are_malformed() {
        let good = btf(&[
            ("scx_bpf_kick", &["cpu"]),
            ("scx_bpf_kick_impl", &["cpu", "aux"]),
            ("other", &["aux"]),
        ]);
        assert_eq!(malformed_scheduler_functions(&good), Ok(Vec::new()));
        let bad = btf(&[("other", &["cpu"]), ("scx_bpf_kick", &["cpu", "aux"])]);
        assert_eq!(
            malformed_scheduler_functions(&bad),
            Ok(vec!["scx_bpf_kick".to_owned()])
        );
    }

    #[test]
    fn damaged_bytes_are_refused_and_never_panic() {
        let good = btf(&[("scx_bpf_kick", &["cpu"])]);
        for length in 0..good.len() {
            assert_eq!(malformed_scheduler_functions(&good[..length]), Err(BadBtf));
        }
        for position in 0..good.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut changed = good.clone();
                changed[position] = value;
                // Whatever the answer, it comes without a panic.
                let _ = malformed_scheduler_functions(&changed);
            }
        }
    }

    #[test]
    fn this_machines_kernel_is_read() {
        if let Ok(btf) = std::fs::read("/sys/kernel/btf/vmlinux") {
            assert!(malformed_scheduler_functions(&btf).is_ok());
        }
    }
}
