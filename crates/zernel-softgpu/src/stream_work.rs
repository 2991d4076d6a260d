//! The kinds of work in a stream.

use std::ffi::c_void;
use std::sync::Arc;

use crate::clock::{self, WaitMethod};
use crate::completion::Completion;
use crate::driver_interface::ExternalLaunch;
use crate::graph::Graph;

/// A copy of `rows` rows of `width` bytes. Its creator checks the addresses.
#[derive(Debug, Clone, Copy)]
pub struct MemoryCopy {
    /// First byte to write.
    pub destination: u64,
    /// From one row to the next.
    pub destination_pitch: u64,
    /// First byte to read.
    pub source: u64,
    /// From one row to the next.
    pub source_pitch: u64,
    /// Bytes in a row.
    pub width: u64,
    /// Rows.
    pub rows: u64,
}

impl MemoryCopy {
    /// One row.
    #[must_use]
    pub fn linear(destination: u64, source: u64, bytes: u64) -> Self {
        Self {
            destination,
            destination_pitch: 0,
            source,
            source_pitch: 0,
            width: bytes,
            rows: 1,
        }
    }

    /// All bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.width * self.rows
    }

    fn execute(&self) {
        for row in 0..self.rows {
            let source = (self.source + row * self.source_pitch) as *const u8;
            let destination = (self.destination + row * self.destination_pitch) as *mut u8;
            // SAFETY: the driver checked that device addresses lie in device memory; for host
            // addresses the caller of the copy vouches, as with real hardware. They may overlap.
            unsafe { std::ptr::copy(source, destination, self.width as usize) };
        }
    }
}

/// A fill with a repeated value of `width` bytes (1, 2 or 4).
#[derive(Debug, Clone, Copy)]
pub struct MemoryFill {
    /// First byte to write.
    pub destination: u64,
    /// The value, in its low bytes.
    pub value: u32,
    /// Bytes of the value.
    pub width: u64,
    /// How many values.
    pub count: u64,
}

impl MemoryFill {
    /// All bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.width * self.count
    }

    fn execute(&self) {
        let value = self.value.to_ne_bytes();
        // SAFETY: the driver checked that the range lies in device memory.
        let memory = unsafe {
            std::slice::from_raw_parts_mut(self.destination as *mut u8, self.bytes() as usize)
        };
        for element in memory.chunks_exact_mut(self.width as usize) {
            element.copy_from_slice(&value[..self.width as usize]);
        }
    }
}

/// A function of the program, called after all earlier work of the stream.
#[derive(Debug, Clone, Copy)]
pub struct HostFunction {
    /// The function.
    pub function: extern "C" fn(*mut c_void),
    /// The callback's argument, an address that means something to the program only.
    pub argument: u64,
}

impl HostFunction {
    fn call(self) {
        (self.function)(self.argument as *mut c_void);
    }
}

/// Something done once in stream order, such as freeing memory.
pub type StreamAction = Arc<dyn Fn() + Send + Sync>;

/// One piece of work in a stream.
#[derive(Clone)]
pub enum StreamWork {
    /// Takes its time.
    Kernel {
        /// How long, ns.
        duration: u64,
    },
    /// Moves bytes and takes the time given.
    Copy {
        /// What to move.
        copy: MemoryCopy,
        /// How long, ns.
        duration: u64,
    },
    /// Writes bytes and takes the time given.
    Fill {
        /// What to write.
        fill: MemoryFill,
        /// How long, ns.
        duration: u64,
    },
    /// Calls the program back.
    Host(HostFunction),
    /// A kernel that another library runs.
    External {
        /// What to run.
        launch: ExternalLaunch,
    },
    /// Does something at once.
    Action(StreamAction),
    /// Waits for something in another stream.
    Wait(Arc<Completion>),
    /// Resolves a completion when all earlier work is done.
    Mark(Arc<Completion>),
    /// Runs a whole graph.
    Graph(Arc<Graph>),
}

impl std::fmt::Debug for StreamWork {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Kernel { .. } => "Kernel",
            Self::Copy { .. } => "Copy",
            Self::Fill { .. } => "Fill",
            Self::Host(_) => "Host",
            Self::External { .. } => "External",
            Self::Action(_) => "Action",
            Self::Wait(_) => "Wait",
            Self::Mark(_) => "Mark",
            Self::Graph(_) => "Graph",
        })
    }
}

impl StreamWork {
    /// Whether its end is known as soon as its start is known. If not, it needs a thread.
    #[must_use]
    pub fn is_immediate(&self) -> bool {
        match self {
            Self::Host(_) | Self::External { .. } => false,
            Self::Wait(completion) => completion.known_end().is_some(),
            Self::Graph(graph) => graph.is_immediate(),
            _ => true,
        }
    }

    /// Whether the device works while it lasts.
    #[must_use]
    pub fn occupies_device(&self) -> bool {
        matches!(
            self,
            Self::Kernel { .. } | Self::Copy { .. } | Self::Fill { .. } | Self::External { .. }
        )
    }

    /// Bytes it moves.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Copy { copy, .. } => copy.bytes(),
            Self::Fill { fill, .. } => fill.bytes(),
            _ => 0,
        }
    }

    /// Runs the work and returns the time at which it ends. Blocks unless the work is immediate. The stream runs the nodes of
    /// graphs one by one.
    pub(crate) fn execute(&self, start: u64) -> u64 {
        match self {
            Self::Kernel { duration } => start.saturating_add(*duration),
            Self::Copy { copy, duration } => {
                copy.execute();
                start.saturating_add(*duration)
            }
            Self::Fill { fill, duration } => {
                fill.execute();
                start.saturating_add(*duration)
            }
            Self::Host(function) => {
                clock::wait_until(start, WaitMethod::Block);
                function.call();
                clock::now_ns().max(start)
            }
            Self::External { launch } => launch.run(start).max(start),
            Self::Action(action) => {
                action();
                start
            }
            Self::Wait(completion) => completion
                .wait_until_end_is_known(WaitMethod::Block)
                .max(start),
            Self::Mark(completion) => {
                completion.set_end(start);
                start
            }
            Self::Graph(_) => start,
        }
    }
}
