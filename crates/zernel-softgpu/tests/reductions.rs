//! Compares every reduction of every data type with a reference.

mod support;

use support::libraries::assert_success;
use support::ranks::RankProcess;
use support::{Stage, role_of_process};

/// A data type of NCCL: its code, its size, and how a small whole number is encoded. Such numbers are exact in every
/// type and under every operation.
struct ElementType {
    code: i32,
    bytes: usize,
    encode: fn(i64) -> Vec<u8>,
}

const ELEMENT_TYPES: [ElementType; 10] = [
    ElementType {
        code: 0,
        bytes: 1,
        encode: |value| (value as i8).to_ne_bytes().to_vec(),
    },
    ElementType {
        code: 1,
        bytes: 1,
        encode: |value| (value as u8).to_ne_bytes().to_vec(),
    },
    ElementType {
        code: 2,
        bytes: 4,
        encode: |value| (value as i32).to_ne_bytes().to_vec(),
    },
    ElementType {
        code: 3,
        bytes: 4,
        encode: |value| (value as u32).to_ne_bytes().to_vec(),
    },
    ElementType {
        code: 4,
        bytes: 8,
        encode: |value| value.to_ne_bytes().to_vec(),
    },
    ElementType {
        code: 5,
        bytes: 8,
        encode: |value| (value as u64).to_ne_bytes().to_vec(),
    },
    ElementType {
        code: 6,
        bytes: 2,
        encode: |value| half_precision_bits(value).to_ne_bytes().to_vec(),
    },
    ElementType {
        code: 7,
        bytes: 4,
        encode: |value| (value as f32).to_ne_bytes().to_vec(),
    },
    ElementType {
        code: 8,
        bytes: 8,
        encode: |value| (value as f64).to_ne_bytes().to_vec(),
    },
    ElementType {
        code: 9,
        bytes: 2,
        encode: |value| {
            (((value as f32).to_bits() >> 16) as u16)
                .to_ne_bytes()
                .to_vec()
        },
    },
];

/// The bits of a whole number below 2048 in IEEE half precision.
fn half_precision_bits(value: i64) -> u16 {
    if value == 0 {
        return 0;
    }
    let exponent = value.ilog2();
    let fraction = (value << 10 >> exponent) as u16 & 0x3ff;
    ((exponent + 15) as u16) << 10 | fraction
}

/// A function that computes the expected result from one number of each rank.
type ReferenceReduction = fn(&[i64]) -> i64;

const REDUCTION_OPERATIONS: [(i32, ReferenceReduction); 5] = [
    (0, |values| values.iter().sum()),
    (1, |values| values.iter().product()),
    (2, |values| *values.iter().max().unwrap()),
    (3, |values| *values.iter().min().unwrap()),
    (4, |values| values.iter().sum::<i64>() / values.len() as i64),
];

/// The number that rank `rank` contributes at `index`. Sums over 2 and 4 ranks divide evenly, products stay small.
fn element_of_rank(rank: usize, index: usize) -> i64 {
    match rank % 2 {
        0 => 1 + (index % 3) as i64,
        _ => 3 - (index % 3) as i64,
    }
}

impl ElementType {
    fn encode_array(&self, values: impl Iterator<Item = i64>) -> Vec<u8> {
        values.flat_map(self.encode).collect()
    }

    fn input_of_rank(&self, rank: usize, count: usize) -> Vec<u8> {
        self.encode_array((0..count).map(|index| element_of_rank(rank, index)))
    }

    fn expected_result(
        &self,
        operation: ReferenceReduction,
        ranks: usize,
        count: usize,
    ) -> Vec<u8> {
        self.encode_array((0..count).map(|index| {
            let values: Vec<i64> = (0..ranks)
                .map(|rank| element_of_rank(rank, index))
                .collect();
            operation(&values)
        }))
    }
}

#[test]
fn reductions_of_all_types_and_operations_two_ranks() {
    check_reductions("reductions_of_all_types_and_operations_two_ranks", 2);
}

#[test]
fn reductions_of_all_types_and_operations_four_ranks() {
    check_reductions("reductions_of_all_types_and_operations_four_ranks", 4);
}

fn check_reductions(test: &'static str, ranks: usize) {
    const ELEMENT_COUNT: usize = 1000;
    if role_of_process().is_none() {
        return Stage::new(test).run_roles(ranks);
    }
    let rank = RankProcess::join(ranks);
    let nccl = &rank.nccl;
    let root = ranks - 1;
    for kind in &ELEMENT_TYPES {
        for (code, operation) in REDUCTION_OPERATIONS {
            let whole = ranks * ELEMENT_COUNT;
            let send = rank.upload(&kind.input_of_rank(rank.rank, whole));
            let blank = vec![0xeeu8; whole * kind.bytes];
            let (all, one, part) = (
                rank.upload(&blank),
                rank.upload(&blank),
                rank.upload(&blank),
            );
            assert_success((nccl.ncclAllReduce)(
                send,
                all,
                whole,
                kind.code,
                code,
                rank.communicator,
                rank.stream,
            ));
            assert_success((nccl.ncclReduce)(
                send,
                one,
                ELEMENT_COUNT,
                kind.code,
                code,
                root as i32,
                rank.communicator,
                rank.stream,
            ));
            assert_success((nccl.ncclReduceScatter)(
                send,
                part,
                ELEMENT_COUNT,
                kind.code,
                code,
                rank.communicator,
                rank.stream,
            ));
            rank.synchronize();
            let expected = kind.expected_result(operation, ranks, whole);
            let bytes = ELEMENT_COUNT * kind.bytes;
            assert_eq!(
                rank.program.download::<u8>(all, expected.len()),
                expected,
                "type {} operation {code}",
                kind.code
            );
            let of_root = if rank.rank == root { &expected } else { &blank };
            assert_eq!(rank.program.download::<u8>(one, bytes), of_root[..bytes]);
            let own = &expected[rank.rank * bytes..(rank.rank + 1) * bytes];
            assert_eq!(rank.program.download::<u8>(part, bytes), own);
            for buffer in [send, all, one, part] {
                assert_success((rank.program.cuda.cuMemFree_v2)(buffer));
            }
        }
    }
    rank.destroy_communicator();
}
