//! A stand-in for `libtorch_cpu.so` and `libc10.so`: the functions by which `PyTorch` announces what a training loop does.
//! They have the exported names and the arguments of the real ones, and do nothing.

/// Declares functions that start with `push`, as the real ones do, and return their first argument.
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

        /// The exported names.
        pub const EXPORTS: &[&str] = &[$($exported),*];
    };
}

announcements! {
    /// `torch::autograd::profiler::record_function_enter_new`: the place of the result, a name, optional arguments.
    record_function_enter_new = "_ZN5torch8autograd8profiler25record_function_enter_newERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERKSt8optionalIS7_E",
    /// `c10::IValue::toCustomClass<PythonRecordFunction>`: the end of what was announced.
    record_function_exit = "_ZNO3c106IValue13toCustomClassIN5torch8autograd8profiler20PythonRecordFunctionEE",
    /// `torch::autograd::Engine::thread_main`: the engine, a shared pointer to the graph of the pass.
    thread_main = "_ZN5torch8autograd6Engine11thread_mainERKSt10shared_ptrINS0_9GraphTaskEE",
    /// `c10d::ProcessGroupGloo::allreduce`.
    gloo_allreduce = "_ZN4c10d16ProcessGroupGloo9allreduceERSt6vectorIN2at6TensorESaIS3_EERKNS_16AllreduceOptionsE",
    /// `c10d::Reducer::finalize_backward`.
    finalize_backward = "_ZN4c10d7Reducer17finalize_backwardEv",
    /// `c10::monitor::WaitCounterHandle::WaitCounterHandle`, of libc10: the handle, length and text of a name.
    counter_handle = "_ZN3c107monitor17WaitCounterHandleC1ESt17basic_string_viewIcSt11char_traitsIcEE",
    /// `c10::monitor::WaitCounterHandle::start`: the place of the result, the handle.
    counter_start = "_ZN3c107monitor17WaitCounterHandle5startEv",
    /// `c10::monitor::WaitCounterHandle::stop`: the handle, what was started.
    counter_stop = "_ZN3c107monitor17WaitCounterHandle4stopERKNS_11SmallVectorIlLj6EEE",
}
