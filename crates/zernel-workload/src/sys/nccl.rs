//! The few calls of NCCL that a training step makes.

use std::ffi::c_int;
use std::path::Path;
use std::ptr;

use super::library::{
    DeviceAddress, Library, LibraryError, LibraryHandle, LibraryStatus, check_status, library_calls,
};

/// Number of 64-bit words in a unique id, which is 128 opaque bytes.
pub(crate) const ID_WORDS: usize = 16;

/// The unique id of a communicator. One rank creates the id and passes it to the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct UniqueId(pub(crate) [u64; ID_WORDS]);

/// `ncclFloat32`.
const NCCL_FLOAT32: c_int = 7;
/// `ncclSum`.
const NCCL_SUM: c_int = 0;

library_calls! {
    unique_id = c"ncclGetUniqueId": fn(*mut UniqueId);
    init_rank = c"ncclCommInitRank": fn(*mut LibraryHandle, c_int, UniqueId, c_int);
    all_reduce = c"ncclAllReduce": fn(
        DeviceAddress, DeviceAddress, usize, c_int, c_int, LibraryHandle, LibraryHandle
    );
    destroy = c"ncclCommDestroy": fn(LibraryHandle);
}

/// The functions of a loaded NCCL library.
pub(crate) struct LoadedNccl {
    calls: Calls,
}

impl LoadedNccl {
    /// Loads `libnccl.so.2` from the folder of the CUDA driver, because the software GPU needs its own NCCL. If the
    /// folder has none, loads the library that the dynamic loader finds.
    pub(crate) fn load_beside_driver(driver: &Path) -> Result<Self, LibraryError> {
        const LIBRARY_NAME: &str = "libnccl.so.2";
        let beside = driver.with_file_name(LIBRARY_NAME);
        let library = match beside.is_file() {
            true => Library::load(&beside)?,
            false => Library::load(Path::new(LIBRARY_NAME))?,
        };
        Ok(Self {
            calls: Calls::find_functions(library)?,
        })
    }

    /// Makes the unique id of a new communicator.
    pub(crate) fn new_unique_id(&self) -> Result<UniqueId, LibraryError> {
        let mut id = UniqueId([0; ID_WORDS]);
        // SAFETY: `id` is as large as NCCL's, and lives through the call.
        check_status(unsafe { (self.calls.unique_id)(&raw mut id) })?;
        Ok(id)
    }

    /// Makes a communicator on the calling thread's device; returns when all ranks have joined it.
    pub(crate) fn join_communicator(
        self,
        id: UniqueId,
        rank: usize,
        ranks: usize,
    ) -> Result<JoinedCommunicator, LibraryError> {
        let mut handle = ptr::null_mut();
        // SAFETY: the handle is a local that lives through the call.
        check_status(unsafe {
            (self.calls.init_rank)(&raw mut handle, ranks as c_int, id, rank as c_int)
        })?;
        Ok(JoinedCommunicator {
            calls: self.calls,
            handle,
        })
    }
}

/// A communicator that one rank has joined.
pub(crate) struct JoinedCommunicator {
    calls: Calls,
    handle: LibraryHandle,
}

impl JoinedCommunicator {
    /// Queues an all-reduce: the sum over all ranks of `count` floats of device memory, in place.
    pub(crate) fn all_reduce(
        &self,
        floats: DeviceAddress,
        count: usize,
        stream: LibraryHandle,
    ) -> Result<(), LibraryError> {
        // SAFETY: the communicator lives until it is dropped; an address or a stream that is not the
        // device's is an error that NCCL returns.
        check_status(unsafe {
            (self.calls.all_reduce)(
                floats,
                floats,
                count,
                NCCL_FLOAT32,
                NCCL_SUM,
                self.handle,
                stream,
            )
        })
    }
}

impl Drop for JoinedCommunicator {
    fn drop(&mut self) {
        // SAFETY: the handle is NCCL's own and is used no more.
        unsafe { (self.calls.destroy)(self.handle) };
    }
}
