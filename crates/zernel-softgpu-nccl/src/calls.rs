//! The exported functions.

use std::ffi::c_char;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

use zernel_softgpu::abi::{In, Out};
use zernel_softgpu::exports;
use zernel_softgpu::truth::Call;

use crate::communicator::Communicator;
use crate::driver::{Place, driver};
use crate::element::{DataType, Reduction};
use crate::group::{self, note};
use crate::message::{Direction, Message};
use crate::operation::{Collective, Issued, Pattern, Task};
use crate::segment::{UniqueId, new_unique_id};
use crate::status::{NcclError, Outcome, description};

/// The version reported: 2.28.9.
const VERSION: i32 = 22809;

static LAST_ERROR: AtomicI32 = AtomicI32::new(0);

/// Remembers an error for `ncclGetLastError`, and for the group it happened in.
fn remember(outcome: Outcome) -> Outcome {
    if let Err(error) = outcome {
        LAST_ERROR.store(error.into(), Relaxed);
    }
    note(outcome)
}

fn root(rank: i32, communicator: &Communicator) -> Result<usize, NcclError> {
    let rank = usize::try_from(rank).map_err(|_| NcclError::InvalidArgument)?;
    match rank < communicator.segment.ranks() {
        true => Ok(rank),
        false => Err(NcclError::InvalidArgument),
    }
}

/// The arguments that all calls with data have in common.
struct Request {
    count: usize,
    data_type: i32,
    communicator: u64,
    stream: u64,
}

impl Request {
    /// Issues a collective.
    fn collective(
        &self,
        call: &mut Call,
        (send, receive): (u64, u64),
        pattern: impl FnOnce(&Communicator) -> Result<Pattern, NcclError>,
    ) -> Outcome {
        self.issue_task(call, |communicator, data_type, part| {
            Ok(Task::Collective(Collective {
                pattern: pattern(communicator)?,
                data_type,
                send,
                receive,
                part,
            }))
        })
    }

    /// Issues a send or a receive.
    fn message(&self, call: &mut Call, direction: Direction, buffer: u64, peer: i32) -> Outcome {
        self.issue_task(call, |communicator, _, bytes| {
            Ok(Task::Message(Message {
                direction,
                peer: root(peer, communicator)?,
                buffer,
                bytes,
            }))
        })
    }

    fn issue_task(
        &self,
        call: &mut Call,
        task: impl FnOnce(&Communicator, DataType, usize) -> Result<Task, NcclError>,
    ) -> Outcome {
        call.object = self.communicator;
        call.stream = self.stream;
        remember(self.try_issue_task(call, task))
    }

    fn try_issue_task(
        &self,
        call: &mut Call,
        task: impl FnOnce(&Communicator, DataType, usize) -> Result<Task, NcclError>,
    ) -> Outcome {
        let data_type = DataType::from_code(self.data_type)?;
        let bytes = self.count.checked_mul(data_type.bytes());
        let bytes = bytes.ok_or(NcclError::InvalidArgument)?;
        call.bytes = bytes as u64;
        let communicator = Communicator::usable(self.communicator)?;
        let issued = Issued {
            task: task(&communicator, data_type, bytes)?,
            symbol: call.symbol(),
        };
        group::launch_or_queue(communicator, self.stream, issued)
    }
}

/// The beginning of `ncclConfig_t`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Configuration {
    _size: usize,
    _magic: u32,
    _version: u32,
    blocking: i32,
}

fn join(id: UniqueId, rank: i32, ranks: i32, place: Place) -> group::Making {
    Box::new(move || Ok(Communicator::join(&id, rank, ranks, place)?.handle))
}

fn init_rank(handle: Out<u64>, ranks: i32, id: UniqueId, rank: i32) -> Outcome {
    if rank < 0 || rank >= ranks || handle.is_null() {
        return Err(NcclError::InvalidArgument);
    }
    let place = driver()?.current()?;
    group::make(handle, join(id, rank, ranks, place))
}

/// All ranks in this process, one per device.
fn init_all(handles: &Out<u64>, count: i32, devices: In<i32>) -> Outcome {
    let id = new_unique_id()?;
    let place = |rank: i32| {
        let device = match devices.is_null() {
            true => rank,
            false => devices.get_at(rank as usize)?,
        };
        driver()?.primary(device)
    };
    let places: Vec<Place> = (0..count).map(place).collect::<Result<_, NcclError>>()?;
    let making = places
        .iter()
        .zip(0..count)
        .map(|(place, rank)| join(id, rank, count, *place));
    let made = group::make_together(making.collect());
    for (index, made) in made.into_iter().enumerate() {
        handles.set_at(index, made?)?;
    }
    Ok(())
}

exports! { "nccl" =>
    fn ncclGetVersion(_call, version: Out<i32>) -> Outcome {
        remember(version.set(VERSION).map_err(Into::into))
    }

    fn ncclGetUniqueId(_call, id: Out<UniqueId>) -> Outcome {
        let made = new_unique_id().map_err(NcclError::from);
        remember(made.and_then(|made| Ok(id.set(made)?)))
    }

    fn ncclCommInitRank(call, handle: Out<u64>, ranks: i32, id: UniqueId, rank: i32) -> Outcome {
        call.object = id.cookie();
        remember(init_rank(handle, ranks, id, rank))
    }

    /// Communicators are always blocking, whatever they return; the rest of a configuration tunes hardware that
    /// is not there.
    fn ncclCommInitRankConfig(
        call, handle: Out<u64>, ranks: i32, id: UniqueId, rank: i32, configuration: In<Configuration>,
    ) -> Outcome {
        call.object = id.cookie();
        remember(init_rank(handle, ranks, id, rank))?;
        match configuration.get() {
            Ok(Configuration { blocking: 0, .. }) => Err(NcclError::InProgress),
            _ => Ok(()),
        }
    }

    fn ncclCommInitRankScalable(
        call, handle: Out<u64>, ranks: i32, rank: i32, id_count: i32, ids: In<UniqueId>,
        _configuration: u64,
    ) -> Outcome {
        if id_count < 1 {
            return remember(Err(NcclError::InvalidArgument));
        }
        let id = ids.get()?;
        call.object = id.cookie();
        remember(init_rank(handle, ranks, id, rank))
    }

    fn ncclCommInitAll(_call, handles: Out<u64>, count: i32, devices: In<i32>) -> Outcome {
        match count > 0 && !handles.is_null() {
            true => remember(init_all(&handles, count, devices)),
            false => remember(Err(NcclError::InvalidArgument)),
        }
    }

    /// A non-blocking communicator is created by another thread, and stored when it is ready.
    fn ncclCommSplit(
        call, handle: u64, color: i32, key: i32, new_handle: Out<u64>, configuration: In<Configuration>,
    ) -> Outcome {
        call.object = handle;
        let communicator = Communicator::usable(handle)?;
        if color < -1 {
            return remember(Err(NcclError::InvalidArgument));
        }
        let making = Box::new(move || {
            let split = communicator.split(color, key)?;
            Ok(split.map_or(0, |new| new.handle))
        });
        match configuration.get() {
            Ok(Configuration { blocking: 0, .. }) => {
                std::thread::spawn(move || group::make(new_handle, making));
                Err(NcclError::InProgress)
            }
            _ => remember(group::make(new_handle, making)),
        }
    }

    fn ncclCommFinalize(call, handle: u64) -> Outcome {
        call.object = handle;
        Communicator::get(handle)?.finalize();
        Ok(())
    }

    fn ncclCommDestroy(call, handle: u64) -> Outcome {
        call.object = handle;
        if handle != 0 {
            Communicator::get(handle)?.destroy();
        }
        Ok(())
    }

    fn ncclCommAbort(call, handle: u64) -> Outcome {
        call.object = handle;
        if handle != 0 {
            Communicator::get(handle)?.abort();
        }
        Ok(())
    }

    fn ncclCommGetAsyncError(call, handle: u64, error: Out<i32>) -> Outcome {
        call.object = handle;
        let current = Communicator::get(handle)?.error();
        Ok(error.set(current.map_or(0, Into::into))?)
    }

    fn ncclCommCount(call, handle: u64, count: Out<i32>) -> Outcome {
        call.object = handle;
        Ok(count.set(Communicator::get(handle)?.segment.ranks() as i32)?)
    }

    fn ncclCommCuDevice(call, handle: u64, device: Out<i32>) -> Outcome {
        call.object = handle;
        Ok(device.set(Communicator::get(handle)?.place.device)?)
    }

    fn ncclCommUserRank(call, handle: u64, rank: Out<i32>) -> Outcome {
        call.object = handle;
        Ok(rank.set(Communicator::get(handle)?.segment.rank() as i32)?)
    }

    /// Registered or not, buffers are used in place.
    fn ncclCommRegister(
        call, handle: u64, buffer: u64, _bytes: usize, registration: Out<u64>,
    ) -> Outcome {
        call.object = handle;
        Communicator::get(handle)?;
        Ok(registration.set(buffer)?)
    }

    fn ncclCommDeregister(call, handle: u64, _registration: u64) -> Outcome {
        call.object = handle;
        Communicator::get(handle).map(drop)
    }

    fn ncclMemAlloc(call, address: Out<u64>, bytes: usize) -> Outcome {
        call.bytes = bytes as u64;
        call.object = driver()?.allocate(bytes)?;
        Ok(address.set(call.object)?)
    }

    fn ncclMemFree(call, address: u64) -> Outcome {
        call.object = address;
        driver()?.free(address)
    }

    fn ncclGetErrorString(_call, code: i32) -> *const c_char {
        description(code).as_ptr()
    }

    fn ncclGetLastError(call, handle: u64) -> *const c_char {
        call.object = handle;
        description(LAST_ERROR.load(Relaxed)).as_ptr()
    }

    fn ncclGroupStart(_call) -> Outcome {
        group::start();
        Ok(())
    }

    fn ncclGroupEnd(_call) -> Outcome {
        group::end()
    }

    fn ncclAllReduce(
        call, send: u64, receive: u64, count: usize, data_type: i32, operation: i32,
        communicator: u64, stream: u64,
    ) -> Outcome {
        let request = Request { count, data_type, communicator, stream };
        request.collective(call, (send, receive), |_| {
            Ok(Pattern::AllReduce(Reduction::from_code(operation)?))
        })
    }

    fn ncclReduce(
        call, send: u64, receive: u64, count: usize, data_type: i32, operation: i32, root_rank: i32,
        communicator: u64, stream: u64,
    ) -> Outcome {
        let request = Request { count, data_type, communicator, stream };
        request.collective(call, (send, receive), |communicator| {
            Ok(Pattern::Reduce(Reduction::from_code(operation)?, root(root_rank, communicator)?))
        })
    }

    fn ncclReduceScatter(
        call, send: u64, receive: u64, count: usize, data_type: i32, operation: i32,
        communicator: u64, stream: u64,
    ) -> Outcome {
        let request = Request { count, data_type, communicator, stream };
        request.collective(call, (send, receive), |_| {
            Ok(Pattern::ReduceScatter(Reduction::from_code(operation)?))
        })
    }

    fn ncclBroadcast(
        call, send: u64, receive: u64, count: usize, data_type: i32, root_rank: i32,
        communicator: u64, stream: u64,
    ) -> Outcome {
        let request = Request { count, data_type, communicator, stream };
        request.collective(call, (send, receive), |communicator| {
            Ok(Pattern::Broadcast(root(root_rank, communicator)?))
        })
    }

    /// Calls the other one by its exported name, as NCCL does.
    fn ncclBcast(
        _call, buffer: u64, count: usize, data_type: i32, root_rank: i32, communicator: u64,
        stream: u64,
    ) -> Outcome {
        match ncclBroadcast(buffer, buffer, count, data_type, root_rank, communicator, stream) {
            0 => Ok(()),
            7 => Err(NcclError::InProgress),
            code => Err(NcclError::from_code(code).unwrap_or(NcclError::SystemError)),
        }
    }

    fn ncclAllGather(
        call, send: u64, receive: u64, count: usize, data_type: i32, communicator: u64, stream: u64,
    ) -> Outcome {
        let request = Request { count, data_type, communicator, stream };
        request.collective(call, (send, receive), |_| Ok(Pattern::AllGather))
    }

    fn ncclGather(
        call, send: u64, receive: u64, count: usize, data_type: i32, root_rank: i32,
        communicator: u64, stream: u64,
    ) -> Outcome {
        let request = Request { count, data_type, communicator, stream };
        request.collective(call, (send, receive), |communicator| {
            Ok(Pattern::Gather(root(root_rank, communicator)?))
        })
    }

    fn ncclScatter(
        call, send: u64, receive: u64, count: usize, data_type: i32, root_rank: i32,
        communicator: u64, stream: u64,
    ) -> Outcome {
        let request = Request { count, data_type, communicator, stream };
        request.collective(call, (send, receive), |communicator| {
            Ok(Pattern::Scatter(root(root_rank, communicator)?))
        })
    }

    fn ncclAlltoAll(
        call, send: u64, receive: u64, count: usize, data_type: i32, communicator: u64, stream: u64,
    ) -> Outcome {
        let request = Request { count, data_type, communicator, stream };
        request.collective(call, (send, receive), |_| Ok(Pattern::AllToAll))
    }

    fn ncclSend(
        call, buffer: u64, count: usize, data_type: i32, peer: i32, communicator: u64, stream: u64,
    ) -> Outcome {
        Request { count, data_type, communicator, stream }.message(call, Direction::Send, buffer, peer)
    }

    fn ncclRecv(
        call, buffer: u64, count: usize, data_type: i32, peer: i32, communicator: u64, stream: u64,
    ) -> Outcome {
        Request { count, data_type, communicator, stream }.message(call, Direction::Receive, buffer, peer)
    }
}
