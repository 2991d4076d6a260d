//! What the kernel can tell about ML processes.
//!
//! | module | subject |
//! |---|---|
//! | [`capability`] | which kinds of BPF program and map this machine really accepts, found by trying |
//! | [`twin`] | the kernel's copy of the phase rule, run on states of our choice |

pub mod capability;
pub mod twin;
