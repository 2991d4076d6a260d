//! draft
pub mod abi;
mod busy;
pub mod clock;
pub mod completion;
pub mod config;
pub mod device;
pub mod driver_interface;
pub mod export;
pub mod graph;
pub mod install;
pub mod memory;
pub mod node;
pub mod process;
pub mod registry;
pub mod shared_memory;
pub mod stream;
mod sys;
#[cfg(test)]
mod test_directory;
pub mod truth;
pub mod virtual_memory;
pub mod work;
