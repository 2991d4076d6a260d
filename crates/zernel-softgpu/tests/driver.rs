//! The software CUDA driver, as a C program uses it.

mod support;

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use support::libraries::{
    CUDA_ERROR_NOT_READY, CudaProgram, MILLISECOND_NS, STREAM_NON_BLOCKING, assert_success,
    value_stored_by,
};
use support::{Stage, role_of_process, run_in_fresh_process};
use zernel_softgpu::config;

const OUT_OF_MEMORY: i32 = 2;
const INVALID_VALUE: i32 = 1;
/// The stream handle that means the calling thread's own default stream.
const PER_THREAD_STREAM: u64 = 2;

#[test]
fn every_memory_kind_counts_in_used_memory() {
    run_in_fresh_process("every_memory_kind_counts_in_used_memory", || {
        let program = CudaProgram::new();
        let cuda = &program.cuda;
        assert_eq!(program.used_memory(), 0);
        let plain = program.allocate_memory(1000);
        assert_eq!(program.used_memory(), 1000);
        let mut pitch = 0;
        let pitched =
            value_stored_by(|address| (cuda.cuMemAllocPitch_v2)(address, &mut pitch, 700, 3, 4));
        assert_eq!(program.used_memory(), 1000 + 3 * pitch);
        let managed = value_stored_by(|address| (cuda.cuMemAllocManaged)(address, 5000, 1));
        let host = value_stored_by(|address| (cuda.cuMemAllocHost_v2)(address, 1 << 20));
        assert_eq!(program.used_memory(), 6000 + 3 * pitch);
        let pooled = value_stored_by(|address| (cuda.cuMemAllocAsync)(address, 333, 0));
        assert_eq!(program.used_memory(), 6333 + 3 * pitch);
        let pool = value_stored_by(|pool| (cuda.cuDeviceGetDefaultMemPool)(pool, 0));
        assert_eq!(
            value_stored_by(|used| (cuda.cuMemPoolGetAttribute)(pool, 7, used)),
            333
        );
        assert_success((cuda.cuMemFreeAsync)(pooled, 0));
        assert_eq!(
            value_stored_by(|used| (cuda.cuMemPoolGetAttribute)(pool, 7, used)),
            0
        );
        assert_eq!(
            value_stored_by(|high| (cuda.cuMemPoolGetAttribute)(pool, 8, high)),
            333
        );
        for address in [plain, pitched, managed] {
            assert_success((cuda.cuMemFree_v2)(address));
            assert_eq!((cuda.cuMemFree_v2)(address), INVALID_VALUE);
        }
        assert_success((cuda.cuMemFreeHost)(host));
        assert_eq!(program.used_memory(), 0);
        assert_eq!((cuda.cuMemAlloc_v2)(&mut 0, 0), INVALID_VALUE);
        assert_eq!(
            program.error_name(INVALID_VALUE),
            "CUDA_ERROR_INVALID_VALUE"
        );
    });
}

#[test]
fn device_memory_limit_holds_for_all_processes_together() {
    const TEST: &str = "device_memory_limit_holds_for_all_processes_together";
    const GIB: usize = 1 << 30;
    let Some(role) = role_of_process() else {
        let stage = Stage::new(TEST).set_variable(config::MEMORY_VARIABLE, 4 * GIB);
        let holder = stage.start("holder");
        zernel_testkit::eventually("the holder holds", || stage.path().join("held").exists());
        stage.start("refused").expect_success();
        holder.kill();
        stage.start("served").expect_success();
        return;
    };
    let program = CudaProgram::new();
    match role.as_str() {
        "holder" => {
            program.allocate_memory(3 * GIB);
            support::publish_file("held", b"");
            loop {
                std::thread::park();
            }
        }
        "refused" => {
            assert_eq!((program.cuda.cuMemAlloc_v2)(&mut 0, GIB + 1), OUT_OF_MEMORY);
            program.allocate_memory(GIB);
            assert_eq!((program.cuda.cuMemAlloc_v2)(&mut 0, 1), OUT_OF_MEMORY);
        }
        _ => {
            program.allocate_memory(4 * GIB);
            assert_eq!((program.cuda.cuMemAlloc_v2)(&mut 0, 1), OUT_OF_MEMORY);
        }
    }
}

#[test]
fn context_memory_variable_reserves_memory_per_context() {
    const TEST: &str = "context_memory_variable_reserves_memory_per_context";
    if role_of_process().is_none() {
        let stage = Stage::new(TEST);
        return stage
            .set_variable(config::CONTEXT_MEMORY_VARIABLE, 300)
            .set_variable(config::MEMORY_VARIABLE, 800)
            .run_roles(1);
    }
    let program = CudaProgram::new();
    let cuda = &program.cuda;
    assert_eq!(program.used_memory(), 300);
    let second = value_stored_by(|context| (cuda.cuCtxCreate_v2)(context, 0, 0));
    program.allocate_memory(100);
    assert_eq!(program.used_memory(), 700);
    assert_eq!((cuda.cuCtxCreate_v2)(&mut 0, 0, 0), OUT_OF_MEMORY);
    assert_success((cuda.cuCtxDestroy_v2)(second));
    let first = value_stored_by(|context| (cuda.cuDevicePrimaryCtxRetain)(context, 0));
    assert_success((cuda.cuCtxSetCurrent)(first));
    assert_eq!(
        program.used_memory(),
        300,
        "its memory goes with it, and what was allocated in it"
    );
}

#[test]
fn virtual_memory_holds_data_and_is_counted_once() {
    run_in_fresh_process("virtual_memory_holds_data_and_is_counted_once", || {
        const BLOCK: usize = 2 << 20;
        let program = CudaProgram::new();
        let cuda = &program.cuda;
        // Memory properties: pinned memory on device 0.
        let properties = [1u64, 1, 0, 0];
        let address =
            value_stored_by(|address| (cuda.cuMemAddressReserve)(address, 4 * BLOCK, 0, 0, 0));
        assert_eq!(program.used_memory(), 0);
        let handles: Vec<u64> = (0..2)
            .map(|_| value_stored_by(|handle| (cuda.cuMemCreate)(handle, BLOCK, &properties, 0)))
            .collect();
        assert_eq!(program.used_memory(), 2 * BLOCK);
        for (index, handle) in handles.iter().enumerate() {
            assert_success((cuda.cuMemMap)(
                address + (index * BLOCK) as u64,
                BLOCK,
                0,
                *handle,
                0,
            ));
        }
        let read_write = [1, 0, 3];
        assert_success((cuda.cuMemSetAccess)(address, 2 * BLOCK, &read_write, 1));
        // One copy reaches across the boundary between two mappings.
        let seam = address + BLOCK as u64 - 4;
        program.upload(seam, &[1u32, 2]);
        assert_eq!(program.download::<u32>(seam, 2), [1, 2]);
        assert_eq!(
            (cuda.cuMemsetD8_v2)(address + 2 * BLOCK as u64, 1, 1),
            INVALID_VALUE
        );
        for handle in handles {
            assert_success((cuda.cuMemRelease)(handle));
        }
        assert_eq!(program.used_memory(), 2 * BLOCK, "mappings keep the memory");
        assert_ne!(
            (cuda.cuMemAddressFree)(address, 4 * BLOCK),
            0,
            "something is mapped"
        );
        assert_success((cuda.cuMemUnmap)(address, 2 * BLOCK));
        assert_eq!(program.used_memory(), 0);
        assert_success((cuda.cuMemAddressFree)(address, 4 * BLOCK));
    });
}

#[test]
fn copies_move_data_and_refuse_what_is_not_device_memory() {
    run_in_fresh_process(
        "copies_move_data_and_refuse_what_is_not_device_memory",
        || {
            let program = CudaProgram::new();
            let cuda = &program.cuda;
            let (first, second) = (program.allocate_memory(64), program.allocate_memory(64));
            program.upload(first, &[7u32; 16]);
            let stream = program.create_stream();
            assert_success((cuda.cuMemcpyDtoDAsync_v2)(second, first, 64, stream));
            assert_success((cuda.cuMemsetD32Async)(second + 4, 9, 2, stream));
            assert_success((cuda.cuStreamSynchronize)(stream));
            assert_eq!(program.download::<u32>(second, 4), [7, 9, 9, 7]);
            // Copies rows of 4 bytes, whose starts are 16 bytes apart, to adjacent rows.
            let rows = [0, 0, 2, 0, first, 0, 16, 0, 0, 2, 0, second, 0, 4, 4, 4];
            program.upload(first, &(0..16u32).collect::<Vec<_>>());
            assert_success((cuda.cuMemcpy2D_v2)(&rows));
            assert_eq!(program.download::<u32>(second, 4), [0, 4, 8, 12]);
            let host = 5u64;
            assert_eq!(
                (cuda.cuMemcpyHtoD_v2)(first + 60, (&raw const host).cast(), 8),
                INVALID_VALUE
            );
            assert_eq!(
                (cuda.cuMemcpyHtoD_v2)(0x1000, (&raw const host).cast(), 8),
                INVALID_VALUE
            );
            let mut kind = 0;
            assert_success((cuda.cuPointerGetAttribute)(&mut kind, 2, first));
            assert_eq!(kind, 2);
            assert_eq!(
                (cuda.cuPointerGetAttribute)(&mut kind, 2, &raw const host as u64),
                INVALID_VALUE
            );
        },
    );
}

/// All work is queued behind a long kernel, so that the time that the host takes does not count.
#[test]
fn event_times_follow_simulated_clock() {
    const TEST: &str = "event_times_follow_simulated_clock";
    if role_of_process().is_none() {
        // At 1 GB/s, a copy of one megabyte takes a millisecond.
        return Stage::new(TEST)
            .set_variable(config::COPY_BANDWIDTH_VARIABLE, 1 << 30)
            .run_roles(1);
    }
    let program = CudaProgram::new();
    let cuda = &program.cuda;
    let (first, second) = (program.create_stream(), program.create_stream());
    let events: Vec<u64> = (0..4).map(|_| program.create_event(0)).collect();
    let memory = program.allocate_memory(1 << 20);
    let pinned = value_stored_by(|address| (cuda.cuMemAllocHost_v2)(address, 1 << 20));

    program.launch(first, 1000 * MILLISECOND_NS);
    assert_success((cuda.cuEventRecord)(events[0], first));
    program.launch(first, 3 * MILLISECOND_NS);
    assert_success((cuda.cuEventRecord)(events[1], first));
    assert_success((cuda.cuStreamWaitEvent)(second, events[1], 0));
    assert_success((cuda.cuMemcpyHtoDAsync_v2)(
        memory,
        pinned as *const c_void,
        1 << 20,
        second,
    ));
    assert_success((cuda.cuEventRecord)(events[2], second));
    program.launch(first, 500_000);
    assert_success((cuda.cuEventRecord)(events[3], first));

    assert_eq!((cuda.cuStreamQuery)(second), CUDA_ERROR_NOT_READY);
    assert_eq!((cuda.cuEventQuery)(events[0]), CUDA_ERROR_NOT_READY);
    assert_eq!(
        (cuda.cuEventElapsedTime)(&mut 0.0, events[0], events[1]),
        CUDA_ERROR_NOT_READY
    );
    assert_success((cuda.cuCtxSynchronize)());
    assert_success((cuda.cuStreamQuery)(second));
    assert_eq!(program.milliseconds_between(events[0], events[1]), 3.0);
    assert_eq!(
        program.milliseconds_between(events[0], events[3]),
        3.5,
        "the first stream does not wait for the second"
    );
    let copy = program.milliseconds_between(events[1], events[2]);
    assert!(
        (copy - (1e3 / 1024.0)).abs() < 0.001,
        "a MiB at a GiB/s took {copy} ms"
    );
}

#[test]
fn host_functions_run_in_stream_order() {
    static RECORDED_ARGUMENTS: AtomicU64 = AtomicU64::new(0);
    extern "C" fn record_argument(argument: *mut c_void) {
        RECORDED_ARGUMENTS.store(
            RECORDED_ARGUMENTS.load(SeqCst) * 10 + argument as u64,
            SeqCst,
        );
    }
    run_in_fresh_process("host_functions_run_in_stream_order", || {
        let program = CudaProgram::new();
        let cuda = &program.cuda;
        let (first, second) = (program.create_stream(), program.create_stream());
        let event = program.create_event(0);
        let memory = program.allocate_memory(8);
        program.launch(first, 20 * MILLISECOND_NS);
        assert_success((cuda.cuLaunchHostFunc)(
            first,
            record_argument,
            3 as *mut c_void,
        ));
        assert_success((cuda.cuEventRecord)(event, first));
        assert_success((cuda.cuStreamWaitEvent)(second, event, 0));
        assert_success((cuda.cuLaunchHostFunc)(
            second,
            record_argument,
            4 as *mut c_void,
        ));
        assert_success((cuda.cuMemsetD32Async)(memory, 77, 2, second));
        assert_eq!((cuda.cuStreamQuery)(second), CUDA_ERROR_NOT_READY);
        assert_success((cuda.cuStreamSynchronize)(second));
        assert_eq!(RECORDED_ARGUMENTS.load(SeqCst), 34);
        assert_eq!(program.download::<u32>(memory, 2), [77, 77]);
        assert_success((cuda.cuMemFree_v2)(memory));
        assert_success((cuda.cuStreamDestroy_v2)(second));
        assert_success((cuda.cuStreamDestroy_v2)(first));
    });
}

#[test]
fn legacy_stream_waits_for_work_with_unknown_end() {
    static HOST_FUNCTION_DONE: AtomicU64 = AtomicU64::new(0);
    extern "C" fn slow(_: *mut c_void) {
        std::thread::sleep(std::time::Duration::from_millis(50));
        HOST_FUNCTION_DONE.store(1, SeqCst);
    }
    run_in_fresh_process("legacy_stream_waits_for_work_with_unknown_end", || {
        let program = CudaProgram::new();
        let cuda = &program.cuda;
        let blocking = value_stored_by(|stream| (cuda.cuStreamCreate)(stream, 0));
        let free = value_stored_by(|stream| (cuda.cuStreamCreate)(stream, STREAM_NON_BLOCKING));
        assert_success((cuda.cuLaunchHostFunc)(blocking, slow, ptr::null_mut()));
        program.launch(free, 1);
        assert_success((cuda.cuStreamSynchronize)(free));
        assert_eq!(HOST_FUNCTION_DONE.load(SeqCst), 0);
        assert_eq!((cuda.cuStreamQuery)(0), CUDA_ERROR_NOT_READY);
        assert_success((cuda.cuStreamSynchronize)(0));
        assert_eq!(HOST_FUNCTION_DONE.load(SeqCst), 1);
    });
}

/// The program may reuse pageable memory as soon as the call returns, even if the stream still waits.
#[test]
fn pageable_memory_is_copied_before_call_returns() {
    extern "C" fn slow(_: *mut c_void) {
        std::thread::sleep(std::time::Duration::from_millis(30));
    }
    run_in_fresh_process("pageable_memory_is_copied_before_call_returns", || {
        let program = CudaProgram::new();
        let cuda = &program.cuda;
        let blocking = value_stored_by(|stream| (cuda.cuStreamCreate)(stream, 0));
        // The function runs in the stream of the copy, or in the legacy stream, which that stream waits for.
        for waiting in [blocking, 0] {
            let memory = program.allocate_memory(4);
            let mut ordinary = 41u32;
            assert_success((cuda.cuLaunchHostFunc)(waiting, slow, ptr::null_mut()));
            assert_success((cuda.cuMemcpyHtoDAsync_v2)(
                memory,
                (&raw const ordinary).cast(),
                4,
                blocking,
            ));
            // SAFETY: written behind the compiler's back on purpose, as another part of a
            // program would.
            unsafe { (&raw mut ordinary).write_volatile(99) };
            assert_success((cuda.cuCtxSynchronize)());
            assert_eq!(program.download::<u32>(memory, 1), [41]);
        }
    });
}

#[test]
fn captured_graph_runs_at_each_launch() {
    run_in_fresh_process("captured_graph_runs_at_each_launch", || {
        let program = CudaProgram::new();
        let cuda = &program.cuda;
        let (main, side) = (program.create_stream(), program.create_stream());
        let (fork, join, begin, end) = (
            program.create_event(0),
            program.create_event(0),
            program.create_event(0),
            program.create_event(0),
        );
        let memory = program.allocate_memory(12);
        assert_success((cuda.cuStreamBeginCapture_v2)(main, 0));
        program.launch(main, 2 * MILLISECOND_NS);
        assert_success((cuda.cuEventRecord)(fork, main));
        assert_success((cuda.cuStreamWaitEvent)(side, fork, 0));
        program.launch(side, 10 * MILLISECOND_NS);
        assert_success((cuda.cuMemcpyDtoDAsync_v2)(memory + 4, memory, 4, side));
        assert_success((cuda.cuEventRecord)(join, side));
        program.launch(main, 4 * MILLISECOND_NS);
        assert_success((cuda.cuStreamWaitEvent)(main, join, 0));
        assert_ne!(
            (cuda.cuStreamSynchronize)(main),
            0,
            "a capturing stream cannot be waited for"
        );
        assert_ne!((cuda.cuEventQuery)(join), 0);
        let graph = value_stored_by(|graph| (cuda.cuStreamEndCapture)(main, graph));
        assert_success((cuda.cuStreamQuery)(side));
        let mut nodes = 0;
        assert_success((cuda.cuGraphGetNodes)(graph, ptr::null_mut(), &mut nodes));
        assert_eq!(nodes, 4);
        let executable =
            value_stored_by(|executable| (cuda.cuGraphInstantiateWithFlags)(executable, graph, 0));
        assert_success((cuda.cuGraphDestroy)(graph));

        for round in 1..=3u32 {
            program.upload(memory, &[round, 0]);
            program.launch(main, 500 * MILLISECOND_NS);
            assert_success((cuda.cuEventRecord)(begin, main));
            assert_success((cuda.cuGraphLaunch)(executable, main));
            assert_success((cuda.cuEventRecord)(end, main));
            assert_success((cuda.cuStreamSynchronize)(main));
            // The longer way through the graph takes 2 + 10 ms, and a copy that is too short to change a float of this
            // size.
            let elapsed = program.milliseconds_between(begin, end);
            assert!((elapsed - 12.0).abs() < 0.001, "{elapsed}");
            assert_eq!(program.download::<u32>(memory, 2), [round, round]);
        }
        assert_success((cuda.cuGraphExecDestroy)(executable));
    });
}

/// Captures a kernel in a graph, and launches the graph in two streams that are idle until the same moment.
#[test]
fn launches_of_one_graph_do_not_overlap() {
    extern "C" fn slow(_: *mut c_void) {
        std::thread::sleep(std::time::Duration::from_millis(30));
    }
    run_in_fresh_process("launches_of_one_graph_do_not_overlap", || {
        let program = CudaProgram::new();
        let cuda = &program.cuda;
        let (first, second) = (program.create_stream(), program.create_stream());
        assert_success((cuda.cuStreamBeginCapture_v2)(first, 0));
        program.launch(first, 7 * MILLISECOND_NS);
        let graph = value_stored_by(|graph| (cuda.cuStreamEndCapture)(first, graph));
        let executable =
            value_stored_by(|executable| (cuda.cuGraphInstantiateWithFlags)(executable, graph, 0));
        let (gate, ends) = (
            program.create_event(0),
            [program.create_event(0), program.create_event(0)],
        );
        // In the second round, the end of the first stream's work is not known at the second launch.
        for is_known in [true, false] {
            program.launch(first, 1000 * MILLISECOND_NS);
            if !is_known {
                assert_success((cuda.cuLaunchHostFunc)(first, slow, ptr::null_mut()));
            }
            assert_success((cuda.cuEventRecord)(gate, first));
            if is_known {
                assert_success((cuda.cuStreamWaitEvent)(second, gate, 0));
            }
            for (stream, end) in [first, second].into_iter().zip(ends) {
                assert_success((cuda.cuGraphLaunch)(executable, stream));
                assert_success((cuda.cuEventRecord)(end, stream));
            }
            assert_success((cuda.cuCtxSynchronize)());
            assert_eq!(program.milliseconds_between(gate, ends[0]), 7.0);
            assert_eq!(program.milliseconds_between(gate, ends[1]), 14.0);
        }
    });
}

#[test]
fn capture_with_unjoined_stream_is_refused() {
    const ERROR_CAPTURE_UNJOINED: i32 = 904;
    run_in_fresh_process("capture_with_unjoined_stream_is_refused", || {
        let program = CudaProgram::new();
        let cuda = &program.cuda;
        let (main, side) = (program.create_stream(), program.create_stream());
        let (fork, join) = (program.create_event(0), program.create_event(0));
        let capture = |last: &dyn Fn()| {
            assert_success((cuda.cuStreamBeginCapture_v2)(main, 0));
            program.launch(main, 1);
            assert_success((cuda.cuEventRecord)(fork, main));
            assert_success((cuda.cuStreamWaitEvent)(side, fork, 0));
            program.launch(side, 1);
            assert_success((cuda.cuEventRecord)(join, side));
            last();
            let mut graph = 77;
            ((cuda.cuStreamEndCapture)(main, &mut graph), graph)
        };
        let join_it = || assert_success((cuda.cuStreamWaitEvent)(main, join, 0));
        assert_eq!(capture(&|| ()), (ERROR_CAPTURE_UNJOINED, 0));
        assert_eq!(
            program.error_name(ERROR_CAPTURE_UNJOINED),
            "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"
        );
        // Work that a stream captures after the join is not joined either.
        let (status, _) = capture(&|| {
            join_it();
            program.launch(side, 1);
        });
        assert_eq!(status, ERROR_CAPTURE_UNJOINED);
        assert_success((cuda.cuStreamSynchronize)(main));
        assert_success((cuda.cuStreamSynchronize)(side));
        assert_success(capture(&join_it).0);
    });
}

/// Three streams: one with a known end, one with an unknown end, and the default stream of a thread that has exited.
#[test]
fn the_context_waits_for_destroyed_streams() {
    static HOST_FUNCTION_DONE: AtomicU64 = AtomicU64::new(0);
    extern "C" fn slow(_: *mut c_void) {
        std::thread::sleep(std::time::Duration::from_millis(100));
        HOST_FUNCTION_DONE.store(1, SeqCst);
    }
    run_in_fresh_process("the_context_waits_for_destroyed_streams", || {
        let program = &CudaProgram::new();
        let cuda = &program.cuda;
        let (known, unknown, work_done) = (
            program.create_stream(),
            program.create_stream(),
            program.create_event(0),
        );
        let context = value_stored_by(|context| (cuda.cuCtxGetCurrent)(context));
        program.launch(known, 500 * MILLISECOND_NS);
        assert_success((cuda.cuEventRecord)(work_done, known));
        assert_success((cuda.cuStreamDestroy_v2)(known));
        assert_success((cuda.cuCtxSynchronize)());
        assert_success((cuda.cuEventQuery)(work_done));

        assert_success((cuda.cuLaunchHostFunc)(unknown, slow, ptr::null_mut()));
        assert_success((cuda.cuStreamDestroy_v2)(unknown));
        assert_success((cuda.cuCtxSynchronize)());
        assert_eq!(HOST_FUNCTION_DONE.load(SeqCst), 1);

        let short_lived = || {
            assert_success((cuda.cuCtxSetCurrent)(context));
            program.launch(PER_THREAD_STREAM, 500 * MILLISECOND_NS);
            assert_success((cuda.cuEventRecord)(work_done, PER_THREAD_STREAM));
        };
        std::thread::scope(|scope| scope.spawn(short_lived).join().unwrap());
        assert_success((cuda.cuCtxSynchronize)());
        assert_success((cuda.cuEventQuery)(work_done));
    });
}

#[test]
fn get_proc_address_finds_exported_functions() {
    run_in_fresh_process("get_proc_address_finds_exported_functions", || {
        let program = CudaProgram::new();
        let cuda = &program.cuda;
        let find = |name: &std::ffi::CStr, version, flags| {
            let (mut address, mut status) = (0, -1);
            let code = (cuda.cuGetProcAddress_v2)(
                name.as_ptr(),
                &mut address,
                version,
                flags,
                &mut status,
            );
            (code, address, status)
        };
        const PER_THREAD_DEFAULT_STREAM: u64 = 2;
        assert_eq!(
            find(c"cuMemAlloc", 12090, 0),
            (0, cuda.cuMemAlloc_v2 as usize, 0)
        );
        assert_eq!(
            find(c"cuStreamSynchronize", 12090, 0).1,
            cuda.cuStreamSynchronize as usize
        );
        assert_eq!(
            find(c"cuStreamSynchronize", 12090, PER_THREAD_DEFAULT_STREAM).1,
            cuda.cuStreamSynchronize_ptsz as usize
        );
        assert_eq!(
            find(c"cuInit", 12090, PER_THREAD_DEFAULT_STREAM).1,
            cuda.cuInit as usize
        );
        assert_eq!(find(c"cuNoSuchThing", 12090, 0), (500, 0, 1));
        assert_eq!(find(c"cuGetProcAddress", 11000, 0), (500, 0, 2));
        assert_eq!(
            (cuda.cuGetExportTable)(&mut ptr::null(), [0u8; 16].as_ptr().cast()),
            801
        );
    });
}

#[test]
fn per_thread_default_streams_do_not_wait_for_each_other() {
    run_in_fresh_process(
        "per_thread_default_streams_do_not_wait_for_each_other",
        || {
            let program = &CudaProgram::new();
            let cuda = &program.cuda;
            let context = value_stored_by(|context| (cuda.cuCtxGetCurrent)(context));
            let duration = 2000 * MILLISECOND_NS;
            let parameters = [&raw const duration];
            assert_success((cuda.cuLaunchKernel_ptsz)(
                program.kernel,
                1,
                1,
                1,
                1,
                1,
                1,
                0,
                0,
                parameters.as_ptr(),
                ptr::null(),
            ));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    assert_success((cuda.cuCtxSetCurrent)(context));
                    assert_success((cuda.cuStreamSynchronize_ptsz)(0));
                });
            });
            assert_eq!(
                (cuda.cuStreamQuery)(2),
                CUDA_ERROR_NOT_READY,
                "our own is still busy"
            );
            assert_success((cuda.cuStreamSynchronize_ptsz)(0));
        },
    );
}

#[test]
fn a_forked_child_cannot_use_the_driver_but_others_can() {
    const TEST: &str = "a_forked_child_cannot_use_the_driver_but_others_can";
    const ERROR_NOT_INITIALIZED: i32 = 3;
    run_in_fresh_process(TEST, || {
        let program = CudaProgram::new();
        assert!(support::in_forked_child(|| {
            (program.cuda.cuInit)(0) == ERROR_NOT_INITIALIZED
                && (program.cuda.cuMemAlloc_v2)(&mut 0, 1) == ERROR_NOT_INITIALIZED
        }));
        program.allocate_memory(1);
    });
}

#[test]
fn cuda_visible_devices_selects_devices() {
    const TEST: &str = "cuda_visible_devices_selects_devices";
    if role_of_process().is_none() {
        return Stage::new(TEST)
            .set_variable(config::DEVICES_VARIABLE, 4)
            .set_variable("CUDA_VISIBLE_DEVICES", "2,0")
            .run_roles(1);
    }
    let program = CudaProgram::on_device(1);
    let cuda = &program.cuda;
    assert_eq!(value_stored_by(|count| (cuda.cuDeviceGetCount)(count)), 2);
    let uuid =
        |device| value_stored_by(|uuid: &mut [u8; 16]| (cuda.cuDeviceGetUuid_v2)(uuid, device))[15];
    assert_eq!((uuid(0), uuid(1)), (2, 0));
    assert_eq!((cuda.cuDeviceGetUuid_v2)(&mut [0; 16], 2), 101);
    program.allocate_memory(100);
    assert_eq!(program.used_memory(), 100);
}
