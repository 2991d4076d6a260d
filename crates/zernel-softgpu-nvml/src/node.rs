//! The simulated node as NVML sees it, between `nvmlInit` and `nvmlShutdown`.

use std::sync::{Arc, Mutex, Once, PoisonError};

use zernel_softgpu::node::Node;
use zernel_softgpu::process;

use crate::status::NvmlError;

/// The handle of the first device; other handles follow. The number is large, so that null and invalid handles are
/// noticed.
const FIRST_DEVICE_HANDLE: u64 = 0x6e76_6d6c_0000;

static LIBRARY_STATE: Mutex<LibraryState> = Mutex::new(LibraryState {
    init_count: 0,
    node: None,
});

static REGISTER_LEAVE_AT_EXIT: Once = Once::new();

struct LibraryState {
    init_count: usize,
    node: Option<Arc<Node>>,
}

/// The library leaves the node when the process exits, because a program need not call `nvmlShutdown`.
extern "C" fn leave_node() {
    // This function does not wait for the lock: in an exiting process the thread that holds it may never run again.
    if let Ok(state) = LIBRARY_STATE.try_lock()
        && let Some(node) = &state.node
    {
        node.leave();
    }
}

/// `nvmlInit`: may be called any number of times. After the last shutdown, the next call opens the node again.
pub(crate) fn initialise_library() -> Result<(), NvmlError> {
    let mut state = LIBRARY_STATE.lock().unwrap_or_else(PoisonError::into_inner);
    if state.node.is_none() {
        let node = Node::open().map_err(|error| {
            eprintln!("softgpu: NVML: cannot use the simulated node's state: {error}");
            NvmlError::OperatingSystem
        })?;
        state.node = Some(node);
        REGISTER_LEAVE_AT_EXIT.call_once(|| process::at_exit(leave_node));
    }
    state.init_count += 1;
    Ok(())
}

/// `nvmlShutdown`: the last of as many calls as there were of `nvmlInit` leaves the node.
pub(crate) fn shut_down() -> Result<(), NvmlError> {
    let mut state = LIBRARY_STATE.lock().unwrap_or_else(PoisonError::into_inner);
    state.init_count = state
        .init_count
        .checked_sub(1)
        .ok_or(NvmlError::Uninitialized)?;
    if state.init_count == 0 {
        state.node = None;
    }
    Ok(())
}

/// The node that `nvmlInit` has opened; an error before that.
pub(crate) fn open_node() -> Result<Arc<Node>, NvmlError> {
    let state = LIBRARY_STATE.lock().unwrap_or_else(PoisonError::into_inner);
    state.node.clone().ok_or(NvmlError::Uninitialized)
}

/// The handle of the device with this index.
pub(crate) fn handle_of_device(index: usize) -> u64 {
    FIRST_DEVICE_HANDLE + index as u64
}

/// The opened node, and the index of the device that a handle refers to.
pub(crate) fn node_and_device_index(handle: u64) -> Result<(Arc<Node>, usize), NvmlError> {
    let node = open_node()?;
    let index = handle.wrapping_sub(FIRST_DEVICE_HANDLE) as usize;
    match index < node.device_count() {
        true => Ok((node, index)),
        false => Err(NvmlError::InvalidArgument),
    }
}
