//! The truth log: the calls that every process really made. Tests compare probes with it.
//!
//! With `ZERNEL_SOFTGPU_LOG=DIR` each process writes one file per library into DIR: how often each thread entered each
//! function, and how many calls returned each result with how many bytes. With `ZERNEL_SOFTGPU_LOG_EVENTS=1` the files
//! also hold every single call with its CLOCK_MONOTONIC stamps, and every piece of device work with its start and end
//! on the simulated clock.
//!
//! The files are shared mappings written in place by one thread per block, so nothing is lost when the process is
//! killed, and a call takes no lock. If a thread dies inside a call, the call is logged as *entered* but not as
//! returned. (A thread killed between a function's first instruction and the count, some ten instructions later, leaves
//! no trace.)

mod call;
mod format;
mod log;
mod reader;

pub use call::{LoggedSymbol, OpenCall};
pub use log::{DeviceWork, log_device_work};
pub use reader::{LoggedEvent, LoggedEventKind, ProcessTruth, ReturnedCalls, TruthError, TruthLog};
