//! The software CUDA driver, as a C program uses it.

mod support;

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use support::libraries::{MILLISECOND, NON_BLOCKING, NOT_READY, Program, got, ok};
use support::{Stage, alone, role};
use zernel_softgpu::config;

const OUT_OF_MEMORY: i32 = 2;
const INVALID_VALUE: i32 = 1;
/// The calling thread's default stream.
const PER_THREAD: u64 = 2;

#[test]
fn every_kind_of_memory_is_accounted_to_the_byte() {
    alone("every_kind_of_memory_is_accounted_to_the_byte", || {
        let program = Program::new();
        let cuda = &program.cuda;
        assert_eq!(program.used_memory(), 0);
        let plain = program.allocate(1000);
        assert_eq!(program.used_memory(), 1000);
        let mut pitch = 0;
        let pitched = got(|address| (cuda.cuMemAllocPitch_v2)(address, &mut pitch, 700, 3, 4));
        assert_eq!(program.used_memory(), 1000 + 3 * pitch);
        let managed = got(|address| (cuda.cuMemAllocManaged)(address, 5000, 1));
        let host = got(|address| (cuda.cuMemAllocHost_v2)(address, 1 << 20));
        assert_eq!(program.used_memory(), 6000 + 3 * pitch);
        let pooled = got(|address| (cuda.cuMemAllocAsync)(address, 333, 0));
        assert_eq!(program.used_memory(), 6333 + 3 * pitch);
        let pool = got(|pool| (cuda.cuDeviceGetDefaultMemPool)(pool, 0));
        assert_eq!(got(|used| (cuda.cuMemPoolGetAttribute)(pool, 7, used)), 333);
        ok((cuda.cuMemFreeAsync)(pooled, 0));
        assert_eq!(got(|used| (cuda.cuMemPoolGetAttribute)(pool, 7, used)), 0);
        assert_eq!(got(|high| (cuda.cuMemPoolGetAttribute)(pool, 8, high)), 333);
        for address in [plain, pitched, managed] {
            ok((cuda.cuMemFree_v2)(address));
            assert_eq!((cuda.cuMemFree_v2)(address), INVALID_VALUE);
        }
        ok((cuda.cuMemFreeHost)(host));
        assert_eq!(program.used_memory(), 0);
        assert_eq!((cuda.cuMemAlloc_v2)(&mut 0, 0), INVALID_VALUE);
        assert_eq!(
            program.error_name(INVALID_VALUE),
            "CUDA_ERROR_INVALID_VALUE"
        );
    });
}

#[test]
fn memory_runs_out_at_the_capacity_for_all_processes_together() {
    const TEST: &str = "memory_runs_out_at_the_capacity_for_all_processes_together";
    const GIB: usize = 1 << 30;
    let Some(role) = role() else {
        let stage = Stage::new(TEST).set(config::MEMORY_VARIABLE, 4 * GIB);
        let holder = stage.start("holder");
        zernel_testkit::eventually("the holder holds", || stage.path().join("held").exists());
        stage.start("refused").succeeds();
        holder.kill();
        stage.start("served").succeeds();
        return;
    };
    let program = Program::new();
    match role.as_str() {
        "holder" => {
            program.allocate(3 * GIB);
            support::publish("held", b"");
            loop {
                std::thread::park();
            }
        }
        "refused" => {
            assert_eq!((program.cuda.cuMemAlloc_v2)(&mut 0, GIB + 1), OUT_OF_MEMORY);
            program.allocate(GIB);
            assert_eq!((program.cuda.cuMemAlloc_v2)(&mut 0, 1), OUT_OF_MEMORY);
        }
        _ => {
            program.allocate(4 * GIB);
            assert_eq!((program.cuda.cuMemAlloc_v2)(&mut 0, 1), OUT_OF_MEMORY);
        }
    }
}

#[test]
fn a_context_may_take_memory_for_itself() {
    const TEST: &str = "a_context_may_take_memory_for_itself";
    if role().is_none() {
        let stage = Stage::new(TEST);
        return stage
            .set(config::CONTEXT_MEMORY_VARIABLE, 300)
            .set(config::MEMORY_VARIABLE, 800)
            .play(1);
    }
    let program = Program::new();
    let cuda = &program.cuda;
    assert_eq!(program.used_memory(), 300);
    let second = got(|context| (cuda.cuCtxCreate_v2)(context, 0, 0));
    program.allocate(100);
    assert_eq!(program.used_memory(), 700);
    assert_eq!((cuda.cuCtxCreate_v2)(&mut 0, 0, 0), OUT_OF_MEMORY);
    ok((cuda.cuCtxDestroy_v2)(second));
    let first = got(|context| (cuda.cuDevicePrimaryCtxRetain)(context, 0));
    ok((cuda.cuCtxSetCurrent)(first));
    assert_eq!(
        program.used_memory(),
        300,
        "its memory goes with it, and what was allocated in it"
    );
}

#[test]
fn virtual_memory_holds_data_and_is_counted_once() {
    alone("virtual_memory_holds_data_and_is_counted_once", || {
        const BLOCK: usize = 2 << 20;
        let program = Program::new();
        let cuda = &program.cuda;
        // Pinned, on device 0.
        let properties = [1u64, 1, 0, 0];
        let address = got(|address| (cuda.cuMemAddressReserve)(address, 4 * BLOCK, 0, 0, 0));
        assert_eq!(program.used_memory(), 0);
        let handles: Vec<u64> = (0..2)
            .map(|_| got(|handle| (cuda.cuMemCreate)(handle, BLOCK, &properties, 0)))
            .collect();
        assert_eq!(program.used_memory(), 2 * BLOCK);
        for (index, handle) in handles.iter().enumerate() {
            ok((cuda.cuMemMap)(
                address + (index * BLOCK) as u64,
                BLOCK,
                0,
                *handle,
                0,
            ));
        }
        let read_write = [1, 0, 3];
        ok((cuda.cuMemSetAccess)(address, 2 * BLOCK, &read_write, 1));
        // A copy across the boundary between the two.
        let seam = address + BLOCK as u64 - 4;
        program.upload(seam, &[1u32, 2]);
        assert_eq!(program.download::<u32>(seam, 2), [1, 2]);
        assert_eq!(
            (cuda.cuMemsetD8_v2)(address + 2 * BLOCK as u64, 1, 1),
            INVALID_VALUE
        );
        for handle in handles {
            ok((cuda.cuMemRelease)(handle));
        }
        assert_eq!(program.used_memory(), 2 * BLOCK, "mappings keep the memory");
        assert_ne!(
            (cuda.cuMemAddressFree)(address, 4 * BLOCK),
            0,
            "something is mapped"
        );
        ok((cuda.cuMemUnmap)(address, 2 * BLOCK));
        assert_eq!(program.used_memory(), 0);
        ok((cuda.cuMemAddressFree)(address, 4 * BLOCK));
    });
}

#[test]
fn copies_move_data_and_refuse_what_is_not_device_memory() {
    alone(
        "copies_move_data_and_refuse_what_is_not_device_memory",
        || {
            let program = Program::new();
            let cuda = &program.cuda;
            let (first, second) = (program.allocate(64), program.allocate(64));
            program.upload(first, &[7u32; 16]);
            let stream = program.stream();
            ok((cuda.cuMemcpyDtoDAsync_v2)(second, first, 64, stream));
            ok((cuda.cuMemsetD32Async)(second + 4, 9, 2, stream));
            ok((cuda.cuStreamSynchronize)(stream));
            assert_eq!(program.download::<u32>(second, 4), [7, 9, 9, 7]);
            // Rows of 4 bytes, 16 apart, to rows side by side.
            let rows = [0, 0, 2, 0, first, 0, 16, 0, 0, 2, 0, second, 0, 4, 4, 4];
            program.upload(first, &(0..16u32).collect::<Vec<_>>());
            ok((cuda.cuMemcpy2D_v2)(&rows));
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
            ok((cuda.cuPointerGetAttribute)(&mut kind, 2, first));
            assert_eq!(kind, 2);
            assert_eq!(
                (cuda.cuPointerGetAttribute)(&mut kind, 2, &raw const host as u64),
                INVALID_VALUE
            );
        },
    );
}

/// All work is queued behind a long kernel, so that host time does not count.
#[test]
fn times_are_those_of_the_simulated_clock() {
    const TEST: &str = "times_are_those_of_the_simulated_clock";
    if role().is_none() {
        // 1 GB/s: a megabyte takes a millisecond.
        return Stage::new(TEST)
            .set(config::COPY_BANDWIDTH_VARIABLE, 1 << 30)
            .play(1);
    }
    let program = Program::new();
    let cuda = &program.cuda;
    let (first, second) = (program.stream(), program.stream());
    let events: Vec<u64> = (0..4).map(|_| program.event(0)).collect();
    let memory = program.allocate(1 << 20);
    let pinned = got(|address| (cuda.cuMemAllocHost_v2)(address, 1 << 20));

    program.launch(first, 1000 * MILLISECOND);
    ok((cuda.cuEventRecord)(events[0], first));
    program.launch(first, 3 * MILLISECOND);
    ok((cuda.cuEventRecord)(events[1], first));
    ok((cuda.cuStreamWaitEvent)(second, events[1], 0));
    ok((cuda.cuMemcpyHtoDAsync_v2)(
        memory,
        pinned as *const c_void,
        1 << 20,
        second,
    ));
    ok((cuda.cuEventRecord)(events[2], second));
    program.launch(first, 500_000);
    ok((cuda.cuEventRecord)(events[3], first));

    assert_eq!((cuda.cuStreamQuery)(second), NOT_READY);
    assert_eq!((cuda.cuEventQuery)(events[0]), NOT_READY);
    assert_eq!(
        (cuda.cuEventElapsedTime)(&mut 0.0, events[0], events[1]),
        NOT_READY
    );
    ok((cuda.cuCtxSynchronize)());
    ok((cuda.cuStreamQuery)(second));
    assert_eq!(program.elapsed(events[0], events[1]), 3.0);
    assert_eq!(
        program.elapsed(events[0], events[3]),
        3.5,
        "the first stream does not wait for the second"
    );
    let copy = program.elapsed(events[1], events[2]);
    assert!(
        (copy - (1e3 / 1024.0)).abs() < 0.001,
        "a MiB at a GiB/s took {copy} ms"
    );
}

#[test]
fn host_functions_run_in_stream_order() {
    static SEEN: AtomicU64 = AtomicU64::new(0);
    extern "C" fn see(argument: *mut c_void) {
        SEEN.store(SEEN.load(SeqCst) * 10 + argument as u64, SeqCst);
    }
    alone("host_functions_run_in_stream_order", || {
        let program = Program::new();
        let cuda = &program.cuda;
        let (first, second) = (program.stream(), program.stream());
        let event = program.event(0);
        let memory = program.allocate(8);
        program.launch(first, 20 * MILLISECOND);
        ok((cuda.cuLaunchHostFunc)(first, see, 3 as *mut c_void));
        ok((cuda.cuEventRecord)(event, first));
        ok((cuda.cuStreamWaitEvent)(second, event, 0));
        ok((cuda.cuLaunchHostFunc)(second, see, 4 as *mut c_void));
        ok((cuda.cuMemsetD32Async)(memory, 77, 2, second));
        assert_eq!((cuda.cuStreamQuery)(second), NOT_READY);
        ok((cuda.cuStreamSynchronize)(second));
        assert_eq!(SEEN.load(SeqCst), 34);
        assert_eq!(program.download::<u32>(memory, 2), [77, 77]);
        ok((cuda.cuMemFree_v2)(memory));
        ok((cuda.cuStreamDestroy_v2)(second));
        ok((cuda.cuStreamDestroy_v2)(first));
    });
}

#[test]
fn the_legacy_stream_waits_for_unknown_ends_too() {
    static DONE: AtomicU64 = AtomicU64::new(0);
    extern "C" fn slow(_: *mut c_void) {
        std::thread::sleep(std::time::Duration::from_millis(50));
        DONE.store(1, SeqCst);
    }
    alone("the_legacy_stream_waits_for_unknown_ends_too", || {
        let program = Program::new();
        let cuda = &program.cuda;
        let blocking = got(|stream| (cuda.cuStreamCreate)(stream, 0));
        let free = got(|stream| (cuda.cuStreamCreate)(stream, NON_BLOCKING));
        ok((cuda.cuLaunchHostFunc)(blocking, slow, ptr::null_mut()));
        program.launch(free, 1);
        ok((cuda.cuStreamSynchronize)(free));
        assert_eq!(DONE.load(SeqCst), 0);
        assert_eq!((cuda.cuStreamQuery)(0), NOT_READY);
        ok((cuda.cuStreamSynchronize)(0));
        assert_eq!(DONE.load(SeqCst), 1);
    });
}

/// The program may reuse pageable memory as soon as the call returns, even if the stream still waits.
#[test]
fn copies_of_ordinary_memory_are_made_before_the_call_returns() {
    extern "C" fn slow(_: *mut c_void) {
        std::thread::sleep(std::time::Duration::from_millis(30));
    }
    alone(
        "copies_of_ordinary_memory_are_made_before_the_call_returns",
        || {
            let program = Program::new();
            let cuda = &program.cuda;
            let blocking = got(|stream| (cuda.cuStreamCreate)(stream, 0));
            // The stream itself has to wait, or the legacy stream, which it has to wait for.
            for waiting in [blocking, 0] {
                let memory = program.allocate(4);
                let mut ordinary = 41u32;
                ok((cuda.cuLaunchHostFunc)(waiting, slow, ptr::null_mut()));
                ok((cuda.cuMemcpyHtoDAsync_v2)(
                    memory,
                    (&raw const ordinary).cast(),
                    4,
                    blocking,
                ));
                // SAFETY: written behind the compiler's back on purpose, as another part of a
                // program would.
                unsafe { (&raw mut ordinary).write_volatile(99) };
                ok((cuda.cuCtxSynchronize)());
                assert_eq!(program.download::<u32>(memory, 1), [41]);
            }
        },
    );
}

#[test]
fn a_captured_graph_runs_as_often_as_it_is_launched() {
    alone("a_captured_graph_runs_as_often_as_it_is_launched", || {
        let program = Program::new();
        let cuda = &program.cuda;
        let (main, side) = (program.stream(), program.stream());
        let (fork, join, begin, end) = (
            program.event(0),
            program.event(0),
            program.event(0),
            program.event(0),
        );
        let memory = program.allocate(12);
        ok((cuda.cuStreamBeginCapture_v2)(main, 0));
        program.launch(main, 2 * MILLISECOND);
        ok((cuda.cuEventRecord)(fork, main));
        ok((cuda.cuStreamWaitEvent)(side, fork, 0));
        program.launch(side, 10 * MILLISECOND);
        ok((cuda.cuMemcpyDtoDAsync_v2)(memory + 4, memory, 4, side));
        ok((cuda.cuEventRecord)(join, side));
        program.launch(main, 4 * MILLISECOND);
        ok((cuda.cuStreamWaitEvent)(main, join, 0));
        assert_ne!(
            (cuda.cuStreamSynchronize)(main),
            0,
            "a capturing stream cannot be waited for"
        );
        assert_ne!((cuda.cuEventQuery)(join), 0);
        let graph = got(|graph| (cuda.cuStreamEndCapture)(main, graph));
        ok((cuda.cuStreamQuery)(side));
        let mut nodes = 0;
        ok((cuda.cuGraphGetNodes)(graph, ptr::null_mut(), &mut nodes));
        assert_eq!(nodes, 4);
        let executable = got(|executable| (cuda.cuGraphInstantiateWithFlags)(executable, graph, 0));
        ok((cuda.cuGraphDestroy)(graph));

        for round in 1..=3u32 {
            program.upload(memory, &[round, 0]);
            program.launch(main, 500 * MILLISECOND);
            ok((cuda.cuEventRecord)(begin, main));
            ok((cuda.cuGraphLaunch)(executable, main));
            ok((cuda.cuEventRecord)(end, main));
            ok((cuda.cuStreamSynchronize)(main));
            // The longer way through the graph: 2 + 10 ms, and a copy too short for a float of this size.
            let elapsed = program.elapsed(begin, end);
            assert!((elapsed - 12.0).abs() < 0.001, "{elapsed}");
            assert_eq!(program.download::<u32>(memory, 2), [round, round]);
        }
        ok((cuda.cuGraphExecDestroy)(executable));
    });
}

/// Captures a kernel, and launches it in two streams that are idle until the same moment.
#[test]
fn launches_of_one_graph_do_not_overlap() {
    extern "C" fn slow(_: *mut c_void) {
        std::thread::sleep(std::time::Duration::from_millis(30));
    }
    alone("launches_of_one_graph_do_not_overlap", || {
        let program = Program::new();
        let cuda = &program.cuda;
        let (first, second) = (program.stream(), program.stream());
        ok((cuda.cuStreamBeginCapture_v2)(first, 0));
        program.launch(first, 7 * MILLISECOND);
        let graph = got(|graph| (cuda.cuStreamEndCapture)(first, graph));
        let executable = got(|executable| (cuda.cuGraphInstantiateWithFlags)(executable, graph, 0));
        let (gate, ends) = (program.event(0), [program.event(0), program.event(0)]);
        // The second time around the first stream's end is not known at the second launch.
        for is_known in [true, false] {
            program.launch(first, 1000 * MILLISECOND);
            if !is_known {
                ok((cuda.cuLaunchHostFunc)(first, slow, ptr::null_mut()));
            }
            ok((cuda.cuEventRecord)(gate, first));
            if is_known {
                ok((cuda.cuStreamWaitEvent)(second, gate, 0));
            }
            for (stream, end) in [first, second].into_iter().zip(ends) {
                ok((cuda.cuGraphLaunch)(executable, stream));
                ok((cuda.cuEventRecord)(end, stream));
            }
            ok((cuda.cuCtxSynchronize)());
            assert_eq!(program.elapsed(gate, ends[0]), 7.0);
            assert_eq!(program.elapsed(gate, ends[1]), 14.0);
        }
    });
}

#[test]
fn a_capture_with_a_fork_left_aside_is_refused() {
    const UNJOINED: i32 = 904;
    alone("a_capture_with_a_fork_left_aside_is_refused", || {
        let program = Program::new();
        let cuda = &program.cuda;
        let (main, side) = (program.stream(), program.stream());
        let (fork, join) = (program.event(0), program.event(0));
        let capture = |last: &dyn Fn()| {
            ok((cuda.cuStreamBeginCapture_v2)(main, 0));
            program.launch(main, 1);
            ok((cuda.cuEventRecord)(fork, main));
            ok((cuda.cuStreamWaitEvent)(side, fork, 0));
            program.launch(side, 1);
            ok((cuda.cuEventRecord)(join, side));
            last();
            let mut graph = 77;
            ((cuda.cuStreamEndCapture)(main, &mut graph), graph)
        };
        let join_it = || ok((cuda.cuStreamWaitEvent)(main, join, 0));
        assert_eq!(capture(&|| ()), (UNJOINED, 0));
        assert_eq!(
            program.error_name(UNJOINED),
            "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"
        );
        // What comes after the join is left aside too.
        let (status, _) = capture(&|| {
            join_it();
            program.launch(side, 1);
        });
        assert_eq!(status, UNJOINED);
        ok((cuda.cuStreamSynchronize)(main));
        ok((cuda.cuStreamSynchronize)(side));
        ok(capture(&join_it).0);
    });
}

/// A stream with a known end, one with an unknown end, and the default stream of a thread that has exited.
#[test]
fn the_context_waits_for_destroyed_streams() {
    static DONE: AtomicU64 = AtomicU64::new(0);
    extern "C" fn slow(_: *mut c_void) {
        std::thread::sleep(std::time::Duration::from_millis(100));
        DONE.store(1, SeqCst);
    }
    alone("the_context_waits_for_destroyed_streams", || {
        let program = &Program::new();
        let cuda = &program.cuda;
        let (known, unknown, work_done) = (program.stream(), program.stream(), program.event(0));
        let context = got(|context| (cuda.cuCtxGetCurrent)(context));
        program.launch(known, 500 * MILLISECOND);
        ok((cuda.cuEventRecord)(work_done, known));
        ok((cuda.cuStreamDestroy_v2)(known));
        ok((cuda.cuCtxSynchronize)());
        ok((cuda.cuEventQuery)(work_done));

        ok((cuda.cuLaunchHostFunc)(unknown, slow, ptr::null_mut()));
        ok((cuda.cuStreamDestroy_v2)(unknown));
        ok((cuda.cuCtxSynchronize)());
        assert_eq!(DONE.load(SeqCst), 1);

        let short_lived = || {
            ok((cuda.cuCtxSetCurrent)(context));
            program.launch(PER_THREAD, 500 * MILLISECOND);
            ok((cuda.cuEventRecord)(work_done, PER_THREAD));
        };
        std::thread::scope(|scope| scope.spawn(short_lived).join().unwrap());
        ok((cuda.cuCtxSynchronize)());
        ok((cuda.cuEventQuery)(work_done));
    });
}

#[test]
fn functions_are_found_by_name_where_they_are_exported() {
    alone(
        "functions_are_found_by_name_where_they_are_exported",
        || {
            let program = Program::new();
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
            const PER_THREAD: u64 = 2;
            assert_eq!(
                find(c"cuMemAlloc", 12090, 0),
                (0, cuda.cuMemAlloc_v2 as usize, 0)
            );
            assert_eq!(
                find(c"cuStreamSynchronize", 12090, 0).1,
                cuda.cuStreamSynchronize as usize
            );
            assert_eq!(
                find(c"cuStreamSynchronize", 12090, PER_THREAD).1,
                cuda.cuStreamSynchronize_ptsz as usize
            );
            assert_eq!(find(c"cuInit", 12090, PER_THREAD).1, cuda.cuInit as usize);
            assert_eq!(find(c"cuNoSuchThing", 12090, 0), (500, 0, 1));
            assert_eq!(find(c"cuGetProcAddress", 11000, 0), (500, 0, 2));
            assert_eq!(
                (cuda.cuGetExportTable)(&mut ptr::null(), [0u8; 16].as_ptr().cast()),
                801
            );
        },
    );
}

#[test]
fn per_thread_default_streams_do_not_wait_for_each_other() {
    alone(
        "per_thread_default_streams_do_not_wait_for_each_other",
        || {
            let program = &Program::new();
            let cuda = &program.cuda;
            let context = got(|context| (cuda.cuCtxGetCurrent)(context));
            let duration = 2000 * MILLISECOND;
            let parameters = [&raw const duration];
            ok((cuda.cuLaunchKernel_ptsz)(
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
                    ok((cuda.cuCtxSetCurrent)(context));
                    ok((cuda.cuStreamSynchronize_ptsz)(0));
                });
            });
            assert_eq!((cuda.cuStreamQuery)(2), NOT_READY, "our own is still busy");
            ok((cuda.cuStreamSynchronize_ptsz)(0));
        },
    );
}

#[test]
fn a_forked_child_cannot_use_the_driver_but_others_can() {
    const TEST: &str = "a_forked_child_cannot_use_the_driver_but_others_can";
    const NOT_INITIALIZED: i32 = 3;
    alone(TEST, || {
        let program = Program::new();
        assert!(support::in_forked_child(|| {
            (program.cuda.cuInit)(0) == NOT_INITIALIZED
                && (program.cuda.cuMemAlloc_v2)(&mut 0, 1) == NOT_INITIALIZED
        }));
        program.allocate(1);
    });
}

#[test]
fn devices_are_many_and_chosen_by_the_environment() {
    const TEST: &str = "devices_are_many_and_chosen_by_the_environment";
    if role().is_none() {
        return Stage::new(TEST)
            .set(config::DEVICES_VARIABLE, 4)
            .set("CUDA_VISIBLE_DEVICES", "2,0")
            .play(1);
    }
    let program = Program::on_device(1);
    let cuda = &program.cuda;
    assert_eq!(got(|count| (cuda.cuDeviceGetCount)(count)), 2);
    let uuid = |device| got(|uuid: &mut [u8; 16]| (cuda.cuDeviceGetUuid_v2)(uuid, device))[15];
    assert_eq!((uuid(0), uuid(1)), (2, 0));
    assert_eq!((cuda.cuDeviceGetUuid_v2)(&mut [0; 16], 2), 101);
    program.allocate(100);
    assert_eq!(program.used_memory(), 100);
}
