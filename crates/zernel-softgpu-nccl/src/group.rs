//! Group calls: the calls between start and end run together.

use std::cell::RefCell;
use std::sync::Arc;

use zernel_softgpu::abi::Out;

use crate::communicator::Communicator;
use crate::operation::{Issued, Operation};
use crate::status::{NcclError, Outcome};

/// Creates a communicator and waits for the other ranks. 0 if this rank gets none.
pub(crate) type Making = Box<dyn FnOnce() -> Result<u64, NcclError> + Send>;

thread_local! {
    static GROUP: RefCell<Group> = const { RefCell::new(Group::new()) };
}

/// The calling thread's group.
struct Group {
    depth: usize,
    /// The first error of a call in the group.
    error: Option<NcclError>,
    issued: Vec<(Arc<Communicator>, u64, Issued)>,
    making: Vec<(Out<u64>, Making)>,
}

impl Group {
    const fn new() -> Self {
        Self {
            depth: 0,
            error: None,
            issued: Vec::new(),
            making: Vec::new(),
        }
    }
}

fn is_open() -> bool {
    GROUP.with_borrow(|group| group.depth > 0)
}

/// `ncclGroupStart`.
pub(crate) fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// `ncclGroupEnd`: the outermost one does everything.
pub(crate) fn end() -> Outcome {
    let group = GROUP.with_borrow_mut(|group| {
        group.depth = group.depth.checked_sub(1).ok_or(NcclError::InvalidUsage)?;
        let outermost = group.depth == 0;
        Ok::<_, NcclError>(outermost.then(|| std::mem::replace(group, Group::new())))
    })?;
    match group {
        Some(group) => group.run(),
        None => Ok(()),
    }
}

/// Launches a task, at once or when the group ends.
pub(crate) fn launch_or_queue(
    communicator: Arc<Communicator>,
    stream: u64,
    issued: Issued,
) -> Outcome {
    if is_open() {
        GROUP.with_borrow_mut(|group| group.issued.push((communicator, stream, issued)));
        return Ok(());
    }
    Operation::launch(communicator, stream, vec![issued])
}

/// Makes a communicator, at once or when the group ends.
pub(crate) fn make(handle: Out<u64>, making: Making) -> Outcome {
    if is_open() {
        GROUP.with_borrow_mut(|group| group.making.push((handle, making)));
        return Ok(());
    }
    Ok(handle.set(making()?)?)
}

/// Records that a call in the group failed, so that the whole group fails.
pub(crate) fn note(outcome: Outcome) -> Outcome {
    if let Err(error) = outcome
        && is_open()
    {
        GROUP.with_borrow_mut(|group| group.error = group.error.or(Some(error)));
    }
    outcome
}

impl Group {
    fn run(self) -> Outcome {
        if let Some(error) = self.error {
            return Err(error);
        }
        let (handles, making): (Vec<_>, Vec<_>) = self.making.into_iter().unzip();
        for (handle, made) in handles.iter().zip(make_together(making)) {
            handle.set(made?)?;
        }
        launch_all(self.issued)
    }
}

/// Creates all communicators at the same time, because they may wait for each other.
pub(crate) fn make_together(making: Vec<Making>) -> Vec<Result<u64, NcclError>> {
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

/// One launch for each communicator and stream, in the order of their first calls.
fn launch_all(issued: Vec<(Arc<Communicator>, u64, Issued)>) -> Outcome {
    let mut launches: Vec<(Arc<Communicator>, u64, Vec<Issued>)> = Vec::new();
    for (communicator, stream, issued) in issued {
        let same = |launch: &&mut (Arc<Communicator>, u64, Vec<Issued>)| {
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
