//! Launches, copies and waits.

mod layout;
pub(crate) mod metrics;
mod state;

pub use state::CudaCalls;

#[cfg(test)]
pub(super) use layout::MIRRORS;
use layout::{
    CALL, CONTEXT_WAIT, COPY_2D, COPY_3D, EVENT_RECORD, EVENT_WAIT, STREAM_WAIT,
    STREAM_WAITS_FOR_EVENT,
};
use zernel_phase::steps::StepMark;
use zernel_phase::tracker::ThreadEvent::{
    CopyToDevice, CopyToHostEnter, CopyToHostLeave, GpuSyncEnter, GpuSyncLeave, Launch,
};

use super::{CallKind, CopyDirection, DurationKind, Probe, ProbedFunction, SamplingGroup};
use zernel_elf::LibraryKind::Cuda;

const fn probed_cuda_function(role: u8, names: &'static [&'static str]) -> ProbedFunction {
    ProbedFunction::new(Cuda, Probe::CudaTrace, role, names)
}

const fn launches(names: &'static [&'static str]) -> ProbedFunction {
    probed_cuda_function(CALL, names)
        .counted_as(CallKind::Launch)
        .timed_as(DurationKind::Launch)
        .enter_event(Launch)
}

const fn launches_kernels(names: &'static [&'static str]) -> ProbedFunction {
    launches(names).sampled_with(SamplingGroup::Kernels)
}

/// A copy function whose third argument is the number of bytes.
const fn copies(direction: CopyDirection, names: &'static [&'static str]) -> ProbedFunction {
    let symbol = probed_cuda_function(CALL, names)
        .counted_as(CallKind::Copy(direction))
        .kept_arguments([3, 0, 0, 0])
        .bytes_argument(1);
    match direction {
        CopyDirection::HostToDevice => symbol.enter_event(CopyToDevice).step_mark(StepMark::CopyIn),
        CopyDirection::DeviceToHost => symbol.step_mark(StepMark::CopyOut).called_frequently(),
        _ => symbol.called_frequently(),
    }
}

/// A copy function that returns only when the copy is done.
const fn copies_and_waits(
    direction: CopyDirection,
    names: &'static [&'static str],
) -> ProbedFunction {
    let mut symbol = copies(direction, names).timed_as(DurationKind::CopyWait);
    if let CopyDirection::DeviceToHost = direction {
        symbol = symbol.enter_and_leave_events(GpuSyncEnter, GpuSyncLeave);
    }
    symbol
}

/// A copy function whose first argument points to a struct with source and destination.
const fn describes_copy(role: u8, names: &'static [&'static str]) -> ProbedFunction {
    probed_cuda_function(role, names)
        .counted_as(CallKind::Copy(CopyDirection::Unified))
        .kept_arguments([1, 0, 0, 0])
        .bytes_argument(2)
}

const fn waits(role: u8, family: DurationKind, names: &'static [&'static str]) -> ProbedFunction {
    probed_cuda_function(role, names)
        .kept_arguments([1, 0, 0, 0])
        .counted_as(CallKind::Wait)
        .timed_as(family)
        .enter_and_leave_events(GpuSyncEnter, GpuSyncLeave)
        .step_mark(StepMark::Wait)
}

pub(super) const SYMBOLS: &[ProbedFunction] = &[
    launches_kernels(&["cuLaunchKernel", "cuLaunchKernel_ptsz"]),
    launches_kernels(&["cuLaunchKernelEx", "cuLaunchKernelEx_ptsz"]),
    launches_kernels(&[
        "cuLaunchCooperativeKernel",
        "cuLaunchCooperativeKernel_ptsz",
    ]),
    launches(&["cuGraphLaunch", "cuGraphLaunch_ptsz"])
        .step_mark(StepMark::Graph)
        .called_frequently(),
    waits(
        STREAM_WAIT,
        DurationKind::StreamWait,
        &["cuStreamSynchronize", "cuStreamSynchronize_ptsz"],
    ),
    waits(EVENT_WAIT, DurationKind::EventWait, &["cuEventSynchronize"]),
    waits(
        CONTEXT_WAIT,
        DurationKind::ContextWait,
        &["cuCtxSynchronize", "cuCtxSynchronize_v2"],
    ),
    copies_and_waits(
        CopyDirection::HostToDevice,
        &["cuMemcpyHtoD_v2", "cuMemcpyHtoD_v2_ptds"],
    ),
    copies(
        CopyDirection::HostToDevice,
        &["cuMemcpyHtoDAsync_v2", "cuMemcpyHtoDAsync_v2_ptsz"],
    ),
    copies_and_waits(
        CopyDirection::DeviceToHost,
        &["cuMemcpyDtoH_v2", "cuMemcpyDtoH_v2_ptds"],
    ),
    // If the host memory is not pinned, `cuMemcpyDtoHAsync` too returns only when the copy is done.
    copies(
        CopyDirection::DeviceToHost,
        &["cuMemcpyDtoHAsync_v2", "cuMemcpyDtoHAsync_v2_ptsz"],
    )
    .timed_as(DurationKind::CopyWait)
    .enter_and_leave_events(CopyToHostEnter, CopyToHostLeave),
    copies(
        CopyDirection::DeviceToDevice,
        &["cuMemcpyDtoD_v2", "cuMemcpyDtoD_v2_ptds"],
    ),
    copies(
        CopyDirection::DeviceToDevice,
        &["cuMemcpyDtoDAsync_v2", "cuMemcpyDtoDAsync_v2_ptsz"],
    ),
    copies(
        CopyDirection::DeviceToDevice,
        &[
            "cuMemcpyPeer",
            "cuMemcpyPeer_ptds",
            "cuMemcpyPeerAsync",
            "cuMemcpyPeerAsync_ptsz",
        ],
    )
    .kept_arguments([5, 0, 0, 0]),
    copies(CopyDirection::Unified, &["cuMemcpy", "cuMemcpy_ptds"]),
    copies(
        CopyDirection::Unified,
        &["cuMemcpyAsync", "cuMemcpyAsync_ptsz"],
    ),
    describes_copy(
        COPY_2D,
        &[
            "cuMemcpy2D_v2",
            "cuMemcpy2D_v2_ptds",
            "cuMemcpy2DUnaligned_v2",
            "cuMemcpy2DUnaligned_v2_ptds",
        ],
    ),
    describes_copy(COPY_2D, &["cuMemcpy2DAsync_v2", "cuMemcpy2DAsync_v2_ptsz"]).called_frequently(),
    describes_copy(
        COPY_3D,
        &[
            "cuMemcpy3D_v2",
            "cuMemcpy3D_v2_ptds",
            "cuMemcpy3DPeer",
            "cuMemcpy3DPeer_ptds",
        ],
    ),
    describes_copy(
        COPY_3D,
        &[
            "cuMemcpy3DAsync_v2",
            "cuMemcpy3DAsync_v2_ptsz",
            "cuMemcpy3DPeerAsync",
            "cuMemcpy3DPeerAsync_ptsz",
        ],
    )
    .called_frequently(),
    probed_cuda_function(
        EVENT_RECORD,
        &[
            "cuEventRecord",
            "cuEventRecord_ptsz",
            "cuEventRecordWithFlags",
            "cuEventRecordWithFlags_ptsz",
        ],
    )
    .kept_arguments([1, 2, 0, 0])
    .called_frequently(),
    probed_cuda_function(
        STREAM_WAITS_FOR_EVENT,
        &["cuStreamWaitEvent", "cuStreamWaitEvent_ptsz"],
    )
    .kept_arguments([1, 2, 0, 0])
    .called_frequently(),
];

/// Whether a function orders events and streams. Calls that order events and streams determine which collectives a
/// wait covers.
pub(crate) fn orders_events(symbol: &ProbedFunction) -> bool {
    symbol.probe == Probe::CudaTrace && matches!(symbol.role, EVENT_RECORD | STREAM_WAITS_FOR_EVENT)
}
