//! Collectives and messages as they run in a stream.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;

use zernel_softgpu::clock::{self, transfer_time_ns};
use zernel_softgpu::device::nccl_bandwidth;
use zernel_softgpu::driver_interface::ExternalKernel;
use zernel_softgpu::truth::{DeviceWork, LoggedSymbol, log_device_work};

use crate::communicator::Communicator;
use crate::driver::loaded_driver;
use crate::element::{DataType, Reduction, reduce_operands};
use crate::message::{Message, run_messages};
use crate::segment::{COLLECTIVE_CHUNK_BYTES, OperationAborted, RankWord};
use crate::status::NcclError;

/// Which data each rank gets from a collective.
#[derive(Debug, Clone, Copy)]
pub(crate) enum CollectivePattern {
    AllReduce(Reduction),
    Reduce(Reduction, usize),
    ReduceScatter(Reduction),
    Broadcast(usize),
    AllGather,
    Gather(usize),
    AllToAll,
    Scatter(usize),
}

/// A collective with the arguments that one rank passed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Collective {
    pub(crate) pattern: CollectivePattern,
    pub(crate) data_type: DataType,
    pub(crate) send_address: u64,
    pub(crate) receive_address: u64,
    /// Bytes of the part that belongs to one rank.
    pub(crate) rank_part_bytes: usize,
}

/// What one NCCL call asks for: a collective or a message.
#[derive(Debug, Clone, Copy)]
pub(crate) enum IssuedTask {
    Collective(Collective),
    Message(Message),
}

/// A collective or message, and the exported function that was called for it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IssuedCall {
    pub(crate) task: IssuedTask,
    pub(crate) symbol: &'static LoggedSymbol,
}

/// The work of one kernel launch: all collectives and messages of a group of calls for one communicator and one stream.
#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) communicator: Arc<Communicator>,
    pub(crate) stream: u64,
    pub(crate) tasks: Vec<IssuedCall>,
    /// The number of the operation in the communicator's order; `None` in a captured graph, which may run many times.
    operation_number: Option<u64>,
}

impl Operation {
    /// Launches collectives and messages in the stream, as one kernel.
    pub(crate) fn launch(
        communicator: Arc<Communicator>,
        stream: u64,
        tasks: Vec<IssuedCall>,
    ) -> Result<(), NcclError> {
        const PER_THREAD_STREAM: u64 = 2;
        let context = communicator.device_and_context.context;
        let launch = || {
            let driver = loaded_driver()?;
            let captured = driver.is_capturing(stream)?;
            let operation = Arc::new(Self {
                operation_number: (!captured).then(|| communicator.new_operation_number()),
                communicator,
                stream,
                tasks,
            });
            let launched =
                driver.launch_function(operation_kernel()?, stream, Arc::as_ptr(&operation) as u64);
            if launched.is_err() && operation.operation_number.is_some() {
                operation.communicator.mark_operation_finished();
            }
            launched
        };
        // A default stream belongs to the current context, so the communicator's context is made current.
        match stream > PER_THREAD_STREAM {
            true => launch(),
            false => loaded_driver()?.run_in_context(context, launch),
        }
    }

    fn run(&self, start: u64) -> u64 {
        if let Some(operation_number) = self.operation_number {
            self.communicator
                .wait_for_earlier_operations(operation_number);
        }
        let end = self.run_tasks(start).unwrap_or(start).max(clock::now_ns());
        if self.operation_number.is_some() {
            self.communicator.mark_operation_finished();
        }
        end
    }

    /// Runs all collectives in order, then all messages at once. Returns the end time.
    fn run_tasks(&self, start: u64) -> Result<u64, OperationAborted> {
        let mut end = start;
        for issued in &self.tasks {
            if let IssuedTask::Collective(collective) = &issued.task {
                end = collective.run(&self.communicator, end)?;
                self.log_device_work(
                    issued,
                    collective.offered_byte_count(self.communicator.segment.rank_count()),
                    start,
                    end,
                );
            }
        }
        let messages: Vec<Message> = self
            .messages_of_tasks()
            .map(|(message, _)| message)
            .collect();
        if !messages.is_empty() {
            end = run_messages(&self.communicator, &messages, end)?;
            self.messages_of_tasks().for_each(|(message, issued)| {
                self.log_device_work(issued, message.bytes, start, end);
            });
        }
        Ok(end)
    }

    fn messages_of_tasks(&self) -> impl Iterator<Item = (Message, &IssuedCall)> {
        self.tasks.iter().filter_map(|issued| match issued.task {
            IssuedTask::Message(message) => Some((message, issued)),
            IssuedTask::Collective(_) => None,
        })
    }

    fn log_device_work(&self, issued: &IssuedCall, bytes: usize, start: u64, end: u64) {
        log_device_work(&DeviceWork {
            symbol: issued.symbol,
            stream: self.stream,
            bytes: bytes as u64,
            start,
            end: end.max(clock::now_ns()),
        });
    }
}

/// The kernel by which all operations are launched.
fn operation_kernel() -> Result<u64, NcclError> {
    static OPERATION_KERNEL: OnceLock<u64> = OnceLock::new();
    let driver = loaded_driver()?;
    Ok(*OPERATION_KERNEL.get_or_init(|| {
        let kernel = ExternalKernel {
            run_kernel: run_operation,
            add_argument_reference: retain_operation,
            drop_argument_reference: release_operation,
        };
        driver.create_kernel(c"ncclDevKernel_softgpu", kernel)
    }))
}

extern "C" fn run_operation(operation: u64, start: u64) -> u64 {
    // SAFETY: the launch that runs this holds the operation.
    let operation = unsafe { &*(operation as *const Operation) };
    operation.run(start)
}

extern "C" fn retain_operation(operation: u64) {
    // SAFETY: the caller holds a reference to the operation.
    unsafe { Arc::increment_strong_count(operation as *const Operation) };
}

extern "C" fn release_operation(operation: u64) {
    // SAFETY: pairs with an `add_argument_reference`.
    unsafe { Arc::decrement_strong_count(operation as *const Operation) };
}

/// How a part of a rank's data overlaps with a window of this data: the part begins at `start` and has `bytes` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PartOverlap {
    /// Where the overlap begins, in bytes from the start of the window.
    offset_in_window: usize,
    /// Where the overlap begins, in bytes from the start of the part.
    offset_in_part: usize,
    bytes: usize,
}

fn overlap_of_part(
    window: usize,
    window_bytes: usize,
    part: usize,
    rank_part_bytes: usize,
) -> Option<PartOverlap> {
    let start = window.max(part);
    let end = (window + window_bytes).min(part + rank_part_bytes);
    (start < end).then(|| PartOverlap {
        offset_in_window: start - window,
        offset_in_part: start - part,
        bytes: end - start,
    })
}

fn write_to_address(address: u64, bytes: &[u8]) {
    // SAFETY: the program's receive buffer, for which it vouches; not shared memory, so no overlap.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
}

impl Collective {
    /// Number of bytes that a contributing rank offers to the others: one part, or one part for each rank.
    pub(crate) fn offered_byte_count(&self, ranks: usize) -> usize {
        match self.pattern {
            CollectivePattern::ReduceScatter(_)
            | CollectivePattern::AllToAll
            | CollectivePattern::Scatter(_) => self.rank_part_bytes * ranks,
            _ => self.rank_part_bytes,
        }
    }

    /// Whether `rank` contributes data to the collective.
    fn contributes_data(&self, rank: usize) -> bool {
        match self.pattern {
            CollectivePattern::Broadcast(root) | CollectivePattern::Scatter(root) => rank == root,
            _ => true,
        }
    }

    /// Transfers the data chunk by chunk: each rank offers its own chunk, then each rank takes what it needs from the
    /// chunks of the others. Returns the end time.
    fn run(&self, communicator: &Communicator, start: u64) -> Result<u64, OperationAborted> {
        let segment = &communicator.segment;
        let check_abort =
            || communicator.check_abort(segment.waits_for_lost_rank(RankWord::CollectiveStepCount));
        let total = self.offered_byte_count(segment.rank_count());
        let mut all_started = start;
        segment
            .rank_word(segment.own_rank(), RankWord::Start)
            .store(start, Relaxed);
        let mut offset = 0;
        loop {
            let bytes = (total - offset).min(COLLECTIVE_CHUNK_BYTES);
            if self.contributes_data(segment.own_rank()) {
                segment.offer_bytes(self.send_address + offset as u64, bytes);
            }
            segment.await_all_ranks(RankWord::CollectiveStepCount, check_abort)?;
            for rank in 0..segment.rank_count() {
                all_started =
                    all_started.max(segment.rank_word(rank, RankWord::Start).load(Relaxed));
            }
            self.copy_or_reduce_chunk(communicator, offset, bytes);
            segment.await_all_ranks(RankWord::CollectiveStepCount, check_abort)?;
            offset += bytes;
            if offset >= total {
                return Ok(all_started + transfer_time_ns(total as u64, nccl_bandwidth()));
            }
        }
    }

    /// Copies or reduces the bytes that this rank needs from the chunk at `offset` of all ranks.
    fn copy_or_reduce_chunk(&self, communicator: &Communicator, offset: usize, bytes: usize) {
        let segment = &communicator.segment;
        let (own, ranks) = (segment.own_rank(), segment.rank_count());
        let here = self.receive_address + offset as u64;
        match self.pattern {
            CollectivePattern::AllReduce(reduction) => {
                self.reduce_chunk(communicator, reduction, 0..bytes, here);
            }
            CollectivePattern::Reduce(reduction, root) if root == own => {
                self.reduce_chunk(communicator, reduction, 0..bytes, here);
            }
            CollectivePattern::ReduceScatter(reduction) => {
                if let Some(own) = overlap_of_part(
                    offset,
                    bytes,
                    own * self.rank_part_bytes,
                    self.rank_part_bytes,
                ) {
                    let range = own.offset_in_window..own.offset_in_window + own.bytes;
                    self.reduce_chunk(
                        communicator,
                        reduction,
                        range,
                        self.receive_address + own.offset_in_part as u64,
                    );
                }
            }
            CollectivePattern::Broadcast(root) => {
                write_to_address(here, segment.offered_bytes(root, bytes));
            }
            CollectivePattern::AllGather => self.gather_chunk(communicator, offset, bytes),
            CollectivePattern::Gather(root) if root == own => {
                self.gather_chunk(communicator, offset, bytes);
            }
            CollectivePattern::AllToAll => (0..ranks).for_each(|from| {
                self.copy_own_part(
                    communicator,
                    from,
                    offset,
                    bytes,
                    from * self.rank_part_bytes,
                );
            }),
            CollectivePattern::Scatter(root) => {
                self.copy_own_part(communicator, root, offset, bytes, 0);
            }
            CollectivePattern::Reduce(..) | CollectivePattern::Gather(_) => {}
        }
    }

    fn gather_chunk(&self, communicator: &Communicator, offset: usize, bytes: usize) {
        for rank in 0..communicator.segment.rank_count() {
            let place = self.receive_address + (rank * self.rank_part_bytes + offset) as u64;
            write_to_address(place, communicator.segment.offered_bytes(rank, bytes));
        }
    }

    fn reduce_chunk(
        &self,
        communicator: &Communicator,
        reduction: Reduction,
        range: std::ops::Range<usize>,
        receive: u64,
    ) {
        let segment = &communicator.segment;
        let shown = |rank| &segment.offered_bytes(rank, range.end)[range.clone()];
        let operands: Vec<&[u8]> = (0..segment.rank_count()).map(shown).collect();
        let mut result = vec![0; range.len()];
        reduce_operands(self.data_type, reduction, &operands, &mut result);
        write_to_address(receive, &result);
    }

    /// Copies this rank's part of the data that `source_rank` offers to `place` in the receive buffer.
    fn copy_own_part(
        &self,
        communicator: &Communicator,
        source_rank: usize,
        offset: usize,
        bytes: usize,
        place: usize,
    ) {
        let segment = &communicator.segment;
        if let Some(own) = overlap_of_part(
            offset,
            bytes,
            segment.own_rank() * self.rank_part_bytes,
            self.rank_part_bytes,
        ) {
            let shown = segment.offered_bytes(source_rank, bytes);
            let address = self.receive_address + (place + own.offset_in_part) as u64;
            write_to_address(
                address,
                &shown[own.offset_in_window..own.offset_in_window + own.bytes],
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlap_of_part_is_intersection_with_window() {
        assert_eq!(overlap_of_part(0, 10, 10, 5), None);
        let all = PartOverlap {
            offset_in_window: 2,
            offset_in_part: 0,
            bytes: 5,
        };
        assert_eq!(overlap_of_part(10, 10, 12, 5), Some(all));
        let end = PartOverlap {
            offset_in_window: 0,
            offset_in_part: 3,
            bytes: 7,
        };
        assert_eq!(overlap_of_part(10, 10, 7, 10), Some(end));
    }
}
