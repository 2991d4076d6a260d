//! Group calls: calls between `ncclGroupStart` and `ncclGroupEnd` are collected and run together.

use std::cell::RefCell;
use std::sync::Arc;

use zernel_softgpu::abi_arguments::OutArgument;

use crate::communicator::Communicator;
use crate::operation::{IssuedCall, Operation};
use crate::status::{NcclError, Outcome};

/// A function that creates a communicator and waits for the other ranks. It returns the handle, or 0 if this rank gets
/// no communicator.
pub(crate) type CommunicatorCreation = Box<dyn FnOnce() -> Result<u64, NcclError> + Send>;

thread_local! {
    static THREAD_CALL_GROUP: RefCell<CallGroup> = const { RefCell::new(CallGroup::new()) };
}

/// The group of calls that the calling thread has open.
struct CallGroup {
    depth: usize,
    /// The error of the first call in the group that failed.
    error: Option<NcclError>,
    issued_calls: Vec<(Arc<Communicator>, u64, IssuedCall)>,
    communicators_to_create: Vec<(OutArgument<u64>, CommunicatorCreation)>,
}

impl CallGroup {
    const fn new() -> Self {
        Self {
            depth: 0,
            error: None,
            issued_calls: Vec::new(),
            communicators_to_create: Vec::new(),
        }
    }
}

fn is_group_open() -> bool {
    THREAD_CALL_GROUP.with_borrow(|group| group.depth > 0)
}

/// `ncclGroupStart`: opens a group, or a group inside the open one.
pub(crate) fn start_group() {
    THREAD_CALL_GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// `ncclGroupEnd`: the end of the outermost group runs all collected calls.
pub(crate) fn end_group() -> Outcome {
    let group = THREAD_CALL_GROUP.with_borrow_mut(|group| {
        group.depth = group.depth.checked_sub(1).ok_or(NcclError::InvalidUsage)?;
        let outermost = group.depth == 0;
        Ok::<_, NcclError>(outermost.then(|| std::mem::replace(group, CallGroup::new())))
    })?;
    match group {
        Some(group) => group.run(),
        None => Ok(()),
    }
}

/// Launches an issued call at once, or collects it if a group is open.
pub(crate) fn launch_operation_or_queue(
    communicator: Arc<Communicator>,
    stream: u64,
    issued: IssuedCall,
) -> Outcome {
    if is_group_open() {
        THREAD_CALL_GROUP
            .with_borrow_mut(|group| group.issued_calls.push((communicator, stream, issued)));
        return Ok(());
    }
    Operation::launch(communicator, stream, vec![issued])
}

/// Creates a communicator at once, or when the open group ends.
pub(crate) fn create_communicator_or_queue(
    handle: OutArgument<u64>,
    making: CommunicatorCreation,
) -> Outcome {
    if is_group_open() {
        THREAD_CALL_GROUP
            .with_borrow_mut(|group| group.communicators_to_create.push((handle, making)));
        return Ok(());
    }
    Ok(handle.set(making()?)?)
}

/// Records that a call failed, so that the whole open group fails.
pub(crate) fn record_group_error(outcome: Outcome) -> Outcome {
    if let Err(error) = outcome
        && is_group_open()
    {
        THREAD_CALL_GROUP.with_borrow_mut(|group| group.error = group.error.or(Some(error)));
    }
    outcome
}

impl CallGroup {
    fn run(self) -> Outcome {
        if let Some(error) = self.error {
            return Err(error);
        }
        let (handles, making): (Vec<_>, Vec<_>) = self.communicators_to_create.into_iter().unzip();
        for (handle, made) in handles.iter().zip(create_communicators_together(making)) {
            handle.set(made?)?;
        }
        launch_operations(self.issued_calls)
    }
}

/// Creates all communicators at the same time, each on a thread of its own, because they may wait for each other.
pub(crate) fn create_communicators_together(
    making: Vec<CommunicatorCreation>,
) -> Vec<Result<u64, NcclError>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = making
            .into_iter()
            .map(|making| scope.spawn(making))
            .collect();
        let results = threads.into_iter().map(std::thread::ScopedJoinHandle::join);
        results
            .map(|result| result.unwrap_or(Err(NcclError::SystemError)))
            .collect()
    })
}

/// Launches the collected calls: one launch for each communicator and stream, in the order of their first calls.
fn launch_operations(issued: Vec<(Arc<Communicator>, u64, IssuedCall)>) -> Outcome {
    let mut launches: Vec<(Arc<Communicator>, u64, Vec<IssuedCall>)> = Vec::new();
    for (communicator, stream, issued) in issued {
        let same = |launch: &&mut (Arc<Communicator>, u64, Vec<IssuedCall>)| {
            Arc::ptr_eq(&launch.0, &communicator) && launch.1 == stream
        };
        match launches.iter_mut().find(same) {
            Some((_, _, tasks)) => tasks.push(issued),
            None => launches.push((communicator, stream, vec![issued])),
        }
    }
    let mut launches = launches.into_iter();
    launches.try_for_each(|(communicator, stream, tasks)| {
        Operation::launch(communicator, stream, tasks)
    })
}
