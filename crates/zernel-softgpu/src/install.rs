//! draft
/// x
pub const STUB_BYTES: usize = 16;
