//! Calls that only a training loop makes, and layers of models.

pub(crate) mod metrics;
mod state;

use std::collections::BTreeSet;

pub use state::CompileTimes;
#[cfg(test)]
pub(super) use state::MIRRORS;
use state::{
    BACKWARD, BACKWARD_THREAD, CHECKPOINT, COUNTER, COUNTER_START, COUNTER_STOP, LAYER, OPTIMIZER,
    RECORD_END, RECORD_FUNCTION,
};
use zernel_phase::steps::StepMark;
use zernel_phase::tracker::ThreadEvent::{BackwardBegin, OptimizerMarker, OtherWorkBegin};

use super::{Probe, ProbedFunction};
use zernel_elf::LibraryKind::{self, C10, TorchCpu, TorchPython};

/// Whether these functions show a training loop, with its announcements, backward passes and layers.
pub(crate) fn show_training_loop<'a>(functions: impl Iterator<Item = &'a ProbedFunction>) -> bool {
    let own = functions.filter(|function| function.probe == Probe::Torch);
    let roles: BTreeSet<u8> = own.map(|function| function.role).collect();
    roles.is_superset(&BTreeSet::from([RECORD_FUNCTION, BACKWARD_THREAD, LAYER]))
}

const fn torch_function(
    role: u8,
    label: &'static str,
    names: &'static [&'static str],
) -> ProbedFunction {
    ProbedFunction::new(TorchCpu, Probe::Torch, role, names).cpp_function(label)
}

/// The exit of `record_function` unpacks its record with this template. Several libraries export a copy of the
/// template; programs call the copy in the library that is loaded first.
const fn record_ending_function(library: LibraryKind, label: &'static str) -> ProbedFunction {
    ProbedFunction::new(
        library,
        Probe::Torch,
        RECORD_END,
        &["_ZNO3c106IValue13toCustomClassIN5torch8autograd8profiler20PythonRecordFunctionEE"],
    )
    .cpp_function(label)
}

/// A method of the handle of a wait counter in libc10. `PyTorch`'s compiler times itself with such counters, also in
/// processes that compile for others.
const fn wait_counter(
    role: u8,
    label: &'static str,
    names: &'static [&'static str],
) -> ProbedFunction {
    ProbedFunction::new(C10, Probe::Torch, role, names)
        .cpp_function(label)
        .no_ml_evidence()
}

pub(super) const SYMBOLS: &[ProbedFunction] = &[
    torch_function(
        BACKWARD,
        "torch::autograd::Engine::execute",
        &["_ZN5torch8autograd6Engine7executeE"],
    )
    .enter_event(BackwardBegin)
    .step_mark(StepMark::Backward),
    // The thread that asks for gradients runs this until it has them. Some versions of PyTorch call this function and
    // not `execute`.
    torch_function(
        BACKWARD_THREAD,
        "torch::autograd::Engine::thread_main",
        &["_ZN5torch8autograd6Engine11thread_mainE"],
    )
    .enter_event(BackwardBegin),
    // PyTorch calls this function at the begin of batches, of optimizer steps and of forward passes of models on
    // several GPUs, with or without a profiler. The recorded name shows which of them begins; see torch.bpf.h.
    torch_function(
        RECORD_FUNCTION,
        "torch::autograd::profiler::record_function_enter_new",
        &["_ZN5torch8autograd8profiler25record_function_enter_newE"],
    ),
    record_ending_function(
        TorchPython,
        "c10::IValue::toCustomClass<PythonRecordFunction> of libtorch_python",
    ),
    record_ending_function(
        TorchCpu,
        "c10::IValue::toCustomClass<PythonRecordFunction> of libtorch_cpu",
    ),
    wait_counter(
        COUNTER,
        "c10::monitor::WaitCounterHandle::WaitCounterHandle",
        &["_ZN3c107monitor17WaitCounterHandleC1E"],
    ),
    wait_counter(
        COUNTER_START,
        "c10::monitor::WaitCounterHandle::start",
        &["_ZN3c107monitor17WaitCounterHandle5startE"],
    ),
    wait_counter(
        COUNTER_STOP,
        "c10::monitor::WaitCounterHandle::stop",
        &["_ZN3c107monitor17WaitCounterHandle4stopE"],
    ),
    // Layers of models, in training and in inference. Programs that use tensors for something else hardly call them.
    torch_function(
        LAYER,
        "at::_ops::linear::call",
        &[
            "_ZN2at4_ops6linear4callE",
            "_ZN2at4_ops9embedding4callE",
            "_ZN2at4_ops11convolution4callE",
            "_ZN2at4_ops17native_layer_norm4callE",
            "_ZN2at4_ops28scaled_dot_product_attention4callE",
        ],
    )
    .no_ml_evidence()
    .called_frequently(),
    // `torch.save` opens a file with `setup` and writes a tensor with each `writeRecord`.
    torch_function(
        CHECKPOINT,
        "caffe2::serialize::PyTorchStreamWriter::setup",
        &[
            "_ZN6caffe29serialize19PyTorchStreamWriter5setupE",
            "_ZN6caffe29serialize19PyTorchStreamWriter11writeRecordE",
        ],
    )
    .enter_event(OtherWorkBegin),
    torch_function(
        OPTIMIZER,
        "at::_ops::_fused_adam_::call",
        &[
            "_ZN2at4_ops12_fused_adam_4callE",
            "_ZN2at4_ops13_fused_adamw_4callE",
            "_ZN2at4_ops11_fused_sgd_4callE",
        ],
    )
    .enter_event(OptimizerMarker)
    .step_mark(StepMark::Optimizer),
    // Optimizers that update tensor by tensor, or all tensors operation by operation. Little else than optimizers
    // calls these functions. Averages of models call `lerp`, after some steps only, so it is no step mark.
    torch_function(
        OPTIMIZER,
        "at::_ops::_foreach_addcdiv_::call",
        &[
            "_ZN2at4_ops24_foreach_addcdiv__Scalar4callE",
            "_ZN2at4_ops28_foreach_addcdiv__ScalarList4callE",
            "_ZN2at4_ops24_foreach_addcdiv__Tensor4callE",
        ],
    )
    .enter_event(OptimizerMarker)
    .step_mark(StepMark::Optimizer)
    .called_frequently(),
    torch_function(
        OPTIMIZER,
        "at::_ops::_foreach_lerp_::call",
        &[
            "_ZN2at4_ops19_foreach_lerp__List4callE",
            "_ZN2at4_ops21_foreach_lerp__Scalar4callE",
        ],
    )
    .enter_event(OptimizerMarker)
    .called_frequently(),
    torch_function(
        OPTIMIZER,
        "at::_ops::addcdiv_::call",
        &["_ZN2at4_ops8addcdiv_4callE"],
    )
    .enter_event(OptimizerMarker)
    .step_mark(StepMark::Optimizer)
    .called_frequently(),
];
