//! The kinds of work that a stream can do.

use std::ffi::c_void;
use std::sync::Arc;

use crate::clock::{self, WaitMethod};
use crate::completion::Completion;
use crate::driver_interface::ExternalLaunch;
use crate::graph::Graph;

/// A copy of `rows` rows of `width` bytes. The function that creates this value checks the addresses.
#[derive(Debug, Clone, Copy)]
pub struct MemoryCopy {
    /// Address of the first byte to write.
    pub destination: u64,
    /// Distance between the starts of two rows at the destination, in bytes.
    pub destination_pitch: u64,
    /// Address of the first byte to read.
    pub source: u64,
    /// Distance between the starts of two rows at the source, in bytes.
    pub source_pitch: u64,
    /// Number of bytes in a row.
    pub width: u64,
    /// Number of rows.
    pub rows: u64,
}

impl MemoryCopy {
    /// A copy of a single row.
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

    /// Number of bytes that are copied.
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

/// Memory to be filled with a repeated value of `width` bytes (1, 2 or 4).
#[derive(Debug, Clone, Copy)]
pub struct MemoryFill {
    /// Address of the first byte to write.
    pub destination: u64,
    /// The value to write, in its low bytes.
    pub value: u32,
    /// Number of bytes of the value.
    pub width: u64,
    /// How often the value is written.
    pub count: u64,
}

impl MemoryFill {
    /// Number of bytes that are written.
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
    /// The program's function.
    pub function: extern "C" fn(*mut c_void),
    /// The argument of the program's function. Only the program knows what it means.
    pub argument: u64,
}

impl HostFunction {
    fn call(self) {
        (self.function)(self.argument as *mut c_void);
    }
}

/// A function of the driver that runs once in stream order, for example to free memory.
pub type StreamAction = Arc<dyn Fn() + Send + Sync>;

/// One piece of work in a stream.
#[derive(Clone)]
pub enum StreamWork {
    /// A kernel that computes nothing and takes the given time.
    Kernel {
        /// Duration of the kernel in nanoseconds.
        duration: u64,
    },
    /// A copy of memory that takes the given time.
    Copy {
        /// What is copied from where to where.
        copy: MemoryCopy,
        /// Duration of the copy in nanoseconds.
        duration: u64,
    },
    /// A fill of memory that takes the given time.
    Fill {
        /// Which memory is filled with which value.
        fill: MemoryFill,
        /// Duration of the fill in nanoseconds.
        duration: u64,
    },
    /// A call of the program's function.
    Host(HostFunction),
    /// A kernel that another library runs.
    External {
        /// The kernel to run, with its argument.
        launch: ExternalLaunch,
    },
    /// A call of a function of the driver.
    Action(StreamAction),
    /// A wait for the end of work in another stream.
    WaitForCompletion(Arc<Completion>),
    /// A marker that sets the end of a completion when all earlier work in the stream is done.
    SetCompletion(Arc<Completion>),
    /// A launch of a whole graph.
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
            Self::WaitForCompletion(_) => "Wait",
            Self::SetCompletion(_) => "Mark",
            Self::Graph(_) => "Graph",
        })
    }
}

impl StreamWork {
    /// Whether the end of the work is known as soon as its start is known. If not, a thread of the stream has to run
    /// the work.
    #[must_use]
    pub fn has_known_duration(&self) -> bool {
        match self {
            Self::Host(_) | Self::External { .. } => false,
            Self::WaitForCompletion(completion) => completion.known_end().is_some(),
            Self::Graph(graph) => graph.has_known_duration(),
            _ => true,
        }
    }

    /// Whether the device counts as busy while the work lasts.
    #[must_use]
    pub fn occupies_device(&self) -> bool {
        matches!(
            self,
            Self::Kernel { .. } | Self::Copy { .. } | Self::Fill { .. } | Self::External { .. }
        )
    }

    /// Number of bytes that the work copies or fills.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Copy { copy, .. } => copy.bytes(),
            Self::Fill { fill, .. } => fill.bytes(),
            _ => 0,
        }
    }

    /// Does the work and returns the time at which it ends. Blocks if the end is not known at the start. The stream
    /// runs the nodes of graphs one by one.
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
            Self::WaitForCompletion(completion) => completion
                .wait_until_end_is_known(WaitMethod::Block)
                .max(start),
            Self::SetCompletion(completion) => {
                completion.set_end(start);
                start
            }
            Self::Graph(_) => start,
        }
    }
}
