//! The functions that the software NCCL exports.

use std::ffi::c_char;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

use zernel_softgpu::abi_arguments::{InArgument, OutArgument};
use zernel_softgpu::exports;
use zernel_softgpu::truth::OpenCall;

use crate::communicator::Communicator;
use crate::driver::{DeviceAndContext, loaded_driver};
use crate::element::{DataType, Reduction};
use crate::group::{self, record_group_error};
use crate::message::{Direction, Message};
use crate::operation::{Collective, CollectivePattern, IssuedCall, IssuedTask};
use crate::segment::{UniqueId, new_unique_id};
use crate::status::{NcclError, Outcome, error_description};

/// The NCCL version that `ncclGetVersion` reports: 2.28.9.
const NCCL_VERSION: i32 = 22809;

static LAST_ERROR: AtomicI32 = AtomicI32::new(0);

/// Remembers an error for `ncclGetLastError`, and for the group of calls in which it happened.
fn store_last_error(outcome: Outcome) -> Outcome {
    if let Err(error) = outcome {
        LAST_ERROR.store(error.into(), Relaxed);
    }
    record_group_error(outcome)
}

fn check_rank(rank: i32, communicator: &Communicator) -> Result<usize, NcclError> {
    let rank = usize::try_from(rank).map_err(|_| NcclError::InvalidArgument)?;
    match rank < communicator.segment.rank_count() {
        true => Ok(rank),
        false => Err(NcclError::InvalidArgument),
    }
}

/// The arguments that all NCCL functions with data have in common.
struct DataCallArguments {
    count: usize,
    data_type: i32,
    communicator: u64,
    stream: u64,
}

impl DataCallArguments {
    /// Issues a collective on one rank: launches it, or adds it to the open group of calls.
    fn issue_collective(
        &self,
        call: &mut OpenCall,
        (send, receive): (u64, u64),
        pattern: impl FnOnce(&Communicator) -> Result<CollectivePattern, NcclError>,
    ) -> Outcome {
        self.issue_task(call, |communicator, data_type, part| {
            Ok(IssuedTask::Collective(Collective {
                pattern: pattern(communicator)?,
                data_type,
                send_address: send,
                receive_address: receive,
                rank_part_bytes: part,
            }))
        })
    }

    /// Issues a send or a receive: launches it, or adds it to the open group of calls.
    fn issue_message(
        &self,
        call: &mut OpenCall,
        direction: Direction,
        buffer: u64,
        peer: i32,
    ) -> Outcome {
        self.issue_task(call, |communicator, _, bytes| {
            Ok(IssuedTask::Message(Message {
                direction,
                peer: check_rank(peer, communicator)?,
                buffer,
                bytes,
            }))
        })
    }

    fn issue_task(
        &self,
        call: &mut OpenCall,
        task: impl FnOnce(&Communicator, DataType, usize) -> Result<IssuedTask, NcclError>,
    ) -> Outcome {
        call.object = self.communicator;
        call.stream = self.stream;
        store_last_error(self.try_issue_task(call, task))
    }

    fn try_issue_task(
        &self,
        call: &mut OpenCall,
        task: impl FnOnce(&Communicator, DataType, usize) -> Result<IssuedTask, NcclError>,
    ) -> Outcome {
        let data_type = DataType::from_code(self.data_type)?;
        let bytes = self.count.checked_mul(data_type.element_bytes());
        let bytes = bytes.ok_or(NcclError::InvalidArgument)?;
        call.bytes = bytes as u64;
        let communicator = Communicator::usable_from_handle(self.communicator)?;
        let issued = IssuedCall {
            task: task(&communicator, data_type, bytes)?,
            symbol: call.symbol(),
        };
        group::launch_operation_or_queue(communicator, self.stream, issued)
    }
}

/// The beginning of `ncclConfig_t`, as far as this library reads it.
#[derive(Clone, Copy)]
#[repr(C)]
struct NcclConfiguration {
    _size: usize,
    _magic: u32,
    _version: u32,
    blocking: i32,
}

fn communicator_creation(
    id: UniqueId,
    rank: i32,
    ranks: i32,
    place: DeviceAndContext,
) -> group::CommunicatorCreation {
    Box::new(move || Ok(Communicator::join(&id, rank, ranks, place)?.handle))
}

fn create_communicator_of_rank(
    handle: OutArgument<u64>,
    ranks: i32,
    id: UniqueId,
    rank: i32,
) -> Outcome {
    if rank < 0 || rank >= ranks || handle.is_null() {
        return Err(NcclError::InvalidArgument);
    }
    let place = loaded_driver()?.current_device_and_context()?;
    group::create_communicator_or_queue(handle, communicator_creation(id, rank, ranks, place))
}

/// Creates a communicator with all ranks in this process, one per device.
fn create_communicators_of_process(
    handles: &OutArgument<u64>,
    count: i32,
    devices: InArgument<i32>,
) -> Outcome {
    let id = new_unique_id()?;
    let place = |rank: i32| {
        let device = match devices.is_null() {
            true => rank,
            false => devices.get_at(rank as usize)?,
        };
        loaded_driver()?.device_and_primary_context(device)
    };
    let places: Vec<DeviceAndContext> = (0..count).map(place).collect::<Result<_, NcclError>>()?;
    let making = places
        .iter()
        .zip(0..count)
        .map(|(place, rank)| communicator_creation(id, rank, count, *place));
    let made = group::create_communicators_together(making.collect());
    for (index, made) in made.into_iter().enumerate() {
        handles.set_at(index, made?)?;
    }
    Ok(())
}

exports! { "nccl" =>
    fn ncclGetVersion(_call, version: OutArgument<i32>) -> Outcome {
        store_last_error(version.set(NCCL_VERSION).map_err(Into::into))
    }

    fn ncclGetUniqueId(_call, id: OutArgument<UniqueId>) -> Outcome {
        let made = new_unique_id().map_err(NcclError::from);
        store_last_error(made.and_then(|made| Ok(id.set(made)?)))
    }

    fn ncclCommInitRank(call, handle: OutArgument<u64>, ranks: i32, id: UniqueId, rank: i32) -> Outcome {
        call.object = id.cookie();
        store_last_error(create_communicator_of_rank(handle, ranks, id, rank))
    }

    /// Communicators always block here, even if they report that they do not. All other fields of a configuration tune
    /// hardware that is not simulated.
    fn ncclCommInitRankConfig(
        call, handle: OutArgument<u64>, ranks: i32, id: UniqueId, rank: i32, configuration: InArgument<NcclConfiguration>,
    ) -> Outcome {
        call.object = id.cookie();
        store_last_error(create_communicator_of_rank(handle, ranks, id, rank))?;
        match configuration.get() {
            Ok(NcclConfiguration { blocking: 0, .. }) => Err(NcclError::InProgress),
            _ => Ok(()),
        }
    }

    fn ncclCommInitRankScalable(
        call, handle: OutArgument<u64>, ranks: i32, rank: i32, id_count: i32, ids: InArgument<UniqueId>,
        _configuration: u64,
    ) -> Outcome {
        if id_count < 1 {
            return store_last_error(Err(NcclError::InvalidArgument));
        }
        let id = ids.get()?;
        call.object = id.cookie();
        store_last_error(create_communicator_of_rank(handle, ranks, id, rank))
    }

    fn ncclCommInitAll(_call, handles: OutArgument<u64>, count: i32, devices: InArgument<i32>) -> Outcome {
        match count > 0 && !handles.is_null() {
            true => store_last_error(create_communicators_of_process(&handles, count, devices)),
            false => store_last_error(Err(NcclError::InvalidArgument)),
        }
    }

    /// Another thread creates a non-blocking communicator, and stores it when it is ready.
    fn ncclCommSplit(
        call, handle: u64, color: i32, key: i32, new_handle: OutArgument<u64>, configuration: InArgument<NcclConfiguration>,
    ) -> Outcome {
        call.object = handle;
        let communicator = Communicator::usable_from_handle(handle)?;
        if color < -1 {
            return store_last_error(Err(NcclError::InvalidArgument));
        }
        let making = Box::new(move || {
            let split = communicator.split(color, key)?;
            Ok(split.map_or(0, |new| new.handle))
        });
        match configuration.get() {
            Ok(NcclConfiguration { blocking: 0, .. }) => {
                std::thread::spawn(move || group::create_communicator_or_queue(new_handle, making));
                Err(NcclError::InProgress)
            }
            _ => store_last_error(group::create_communicator_or_queue(new_handle, making)),
        }
    }

    fn ncclCommFinalize(call, handle: u64) -> Outcome {
        call.object = handle;
        Communicator::from_handle(handle)?.finalize();
        Ok(())
    }

    fn ncclCommDestroy(call, handle: u64) -> Outcome {
        call.object = handle;
        if handle != 0 {
            Communicator::from_handle(handle)?.destroy();
        }
        Ok(())
    }

    fn ncclCommAbort(call, handle: u64) -> Outcome {
        call.object = handle;
        if handle != 0 {
            Communicator::from_handle(handle)?.abort();
        }
        Ok(())
    }

    fn ncclCommGetAsyncError(call, handle: u64, error: OutArgument<i32>) -> Outcome {
        call.object = handle;
        let current = Communicator::from_handle(handle)?.async_error();
        Ok(error.set(current.map_or(0, Into::into))?)
    }

    fn ncclCommCount(call, handle: u64, count: OutArgument<i32>) -> Outcome {
        call.object = handle;
        Ok(count.set(Communicator::from_handle(handle)?.segment.rank_count() as i32)?)
    }

    fn ncclCommCuDevice(call, handle: u64, device: OutArgument<i32>) -> Outcome {
        call.object = handle;
        Ok(device.set(Communicator::from_handle(handle)?.device_and_context.device)?)
    }

    fn ncclCommUserRank(call, handle: u64, rank: OutArgument<i32>) -> Outcome {
        call.object = handle;
        Ok(rank.set(Communicator::from_handle(handle)?.segment.own_rank() as i32)?)
    }

    /// Registration changes nothing: buffers are used in place in any case.
    fn ncclCommRegister(
        call, handle: u64, buffer: u64, _bytes: usize, registration: OutArgument<u64>,
    ) -> Outcome {
        call.object = handle;
        Communicator::from_handle(handle)?;
        Ok(registration.set(buffer)?)
    }

    fn ncclCommDeregister(call, handle: u64, _registration: u64) -> Outcome {
        call.object = handle;
        Communicator::from_handle(handle).map(drop)
    }

    fn ncclMemAlloc(call, address: OutArgument<u64>, bytes: usize) -> Outcome {
        call.bytes = bytes as u64;
        call.object = loaded_driver()?.allocate_device_memory(bytes)?;
        Ok(address.set(call.object)?)
    }

    fn ncclMemFree(call, address: u64) -> Outcome {
        call.object = address;
        loaded_driver()?.free_device_memory(address)
    }

    fn ncclGetErrorString(_call, code: i32) -> *const c_char {
        error_description(code).as_ptr()
    }

    fn ncclGetLastError(call, handle: u64) -> *const c_char {
        call.object = handle;
        error_description(LAST_ERROR.load(Relaxed)).as_ptr()
    }

    fn ncclGroupStart(_call) -> Outcome {
        group::start_group();
        Ok(())
    }

    fn ncclGroupEnd(_call) -> Outcome {
        group::end_group()
    }

    fn ncclAllReduce(
        call, send: u64, receive: u64, count: usize, data_type: i32, operation: i32,
        communicator: u64, stream: u64,
    ) -> Outcome {
        let request = DataCallArguments { count, data_type, communicator, stream };
        request.issue_collective(call, (send, receive), |_| {
            Ok(CollectivePattern::AllReduce(Reduction::from_code(operation)?))
        })
    }

    fn ncclReduce(
        call, send: u64, receive: u64, count: usize, data_type: i32, operation: i32, root_rank: i32,
        communicator: u64, stream: u64,
    ) -> Outcome {
        let request = DataCallArguments { count, data_type, communicator, stream };
        request.issue_collective(call, (send, receive), |communicator| {
            Ok(CollectivePattern::Reduce(Reduction::from_code(operation)?, check_rank(root_rank, communicator)?))
        })
    }

    fn ncclReduceScatter(
        call, send: u64, receive: u64, count: usize, data_type: i32, operation: i32,
        communicator: u64, stream: u64,
    ) -> Outcome {
        let request = DataCallArguments { count, data_type, communicator, stream };
        request.issue_collective(call, (send, receive), |_| {
            Ok(CollectivePattern::ReduceScatter(Reduction::from_code(operation)?))
        })
    }

    fn ncclBroadcast(
        call, send: u64, receive: u64, count: usize, data_type: i32, root_rank: i32,
        communicator: u64, stream: u64,
    ) -> Outcome {
        let request = DataCallArguments { count, data_type, communicator, stream };
        request.issue_collective(call, (send, receive), |communicator| {
            Ok(CollectivePattern::Broadcast(check_rank(root_rank, communicator)?))
        })
    }

    /// `ncclBcast` calls `ncclBroadcast` by its exported name, as NCCL does.
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
        let request = DataCallArguments { count, data_type, communicator, stream };
        request.issue_collective(call, (send, receive), |_| Ok(CollectivePattern::AllGather))
    }

    fn ncclGather(
        call, send: u64, receive: u64, count: usize, data_type: i32, root_rank: i32,
        communicator: u64, stream: u64,
    ) -> Outcome {
        let request = DataCallArguments { count, data_type, communicator, stream };
        request.issue_collective(call, (send, receive), |communicator| {
            Ok(CollectivePattern::Gather(check_rank(root_rank, communicator)?))
        })
    }

    fn ncclScatter(
        call, send: u64, receive: u64, count: usize, data_type: i32, root_rank: i32,
        communicator: u64, stream: u64,
    ) -> Outcome {
        let request = DataCallArguments { count, data_type, communicator, stream };
        request.issue_collective(call, (send, receive), |communicator| {
            Ok(CollectivePattern::Scatter(check_rank(root_rank, communicator)?))
        })
    }

    fn ncclAlltoAll(
        call, send: u64, receive: u64, count: usize, data_type: i32, communicator: u64, stream: u64,
    ) -> Outcome {
        let request = DataCallArguments { count, data_type, communicator, stream };
        request.issue_collective(call, (send, receive), |_| Ok(CollectivePattern::AllToAll))
    }

    fn ncclSend(
        call, buffer: u64, count: usize, data_type: i32, peer: i32, communicator: u64, stream: u64,
    ) -> Outcome {
        DataCallArguments { count, data_type, communicator, stream }.issue_message(call, Direction::Send, buffer, peer)
    }

    fn ncclRecv(
        call, buffer: u64, count: usize, data_type: i32, peer: i32, communicator: u64, stream: u64,
    ) -> Outcome {
        DataCallArguments { count, data_type, communicator, stream }.issue_message(call, Direction::Receive, buffer, peer)
    }
}
