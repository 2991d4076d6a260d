//! A stand-in for `libtorch_cpu.so` and `libc10.so`: the functions by which `PyTorch` announces what a training loop
//! does. These have the exported names and the arguments of the real functions, and do nothing.

/// Declares functions that start with the instruction `push`, as the real ones do, and return their first argument.
macro_rules! announcements {
    ($($(#[$doc:meta])* $name:ident = $exported:literal,)*) => {
        $(
            $(#[$doc])*
            #[cfg(target_arch = "x86_64")]
            #[unsafe(naked)]
            #[unsafe(export_name = $exported)]
            pub extern "C" fn $name() {
                core::arch::naked_asm!("push rbp", "pop rbp", "mov rax, rdi", "ret")
            }
        )*

        /// The names of all exported functions.
        pub const EXPORTS: &[&str] = &[$($exported),*];
    };
}

announcements! {
    /// `torch::autograd::profiler::record_function_enter_new`, with its arguments: the place of the result, a name,
    /// optional arguments.
    record_function_enter_new = "_ZN5torch8autograd8profiler25record_function_enter_newERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERKSt8optionalIS7_E",
    /// `c10::IValue::toCustomClass<PythonRecordFunction>`, called at the end of what `record_function_enter_new`
    /// announced.
    record_function_exit = "_ZNO3c106IValue13toCustomClassIN5torch8autograd8profiler20PythonRecordFunctionEE",
    /// `torch::autograd::Engine::execute`, which the thread that asks for a backward pass calls before `thread_main`.
    execute = "_ZN5torch8autograd6Engine7executeERKSt6vectorINS0_4EdgeESaIS3_EERKS2_IN2at6TensorESaIS9_EEbbbS7_",
    /// `torch::autograd::Engine::thread_main`, with its arguments: the engine, and a shared pointer to the graph of the
    /// backward pass.
    thread_main = "_ZN5torch8autograd6Engine11thread_mainERKSt10shared_ptrINS0_9GraphTaskEE",
    /// `c10d::Work::wait`: the thread that calls it blocks until its peers have called too.
    work_wait = "_ZN4c10d4Work4waitENSt6chrono8durationIlSt5ratioILl1ELl1000EEEE",
    /// `c10d::ProcessGroupGloo::allreduce`.
    gloo_allreduce = "_ZN4c10d16ProcessGroupGloo9allreduceERSt6vectorIN2at6TensorESaIS3_EERKNS_16AllreduceOptionsE",
    /// `c10d::Reducer::finalize_backward`.
    finalize_backward = "_ZN4c10d7Reducer17finalize_backwardEv",
    /// `at::_ops::linear::call`: a layer of a model.
    linear = "_ZN2at4_ops6linear4callERKNS_6TensorES4_RKSt8optionalIS2_E",
    /// `c10::monitor::WaitCounterHandle::WaitCounterHandle` of libc10, with its arguments: the handle, the length and
    /// the text of a name.
    counter_handle = "_ZN3c107monitor17WaitCounterHandleC1ESt17basic_string_viewIcSt11char_traitsIcEE",
    /// `c10::monitor::WaitCounterHandle::start`, with its arguments: the place of the result, the handle.
    counter_start = "_ZN3c107monitor17WaitCounterHandle5startEv",
    /// `c10::monitor::WaitCounterHandle::stop`, with its arguments: the handle, and the result of `start`.
    counter_stop = "_ZN3c107monitor17WaitCounterHandle4stopERKNS_11SmallVectorIlLj6EEE",
}
