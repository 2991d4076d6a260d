//! Every way to launch a kernel, and how long each one takes.

mod support;

use std::ffi::{CStr, c_void};
use std::ptr;

use support::libraries::{
    CudaProgram, KernelNode, LaunchConfiguration, MILLISECOND_NS, assert_success, value_stored_by,
};
use support::run_in_fresh_process;

const HOST_LEAD_NS: u64 = 500 * MILLISECOND_NS;
const DEFAULT_KERNEL_MICROSECONDS: u64 = 10;

/// Microseconds that the work that `submit` puts into a stream takes on the device clock. A long kernel runs first, so
/// that the time that the host takes does not show.
fn device_duration_of(program: &CudaProgram, submit: impl FnOnce(u64)) -> u64 {
    let stream = program.create_stream();
    let (begin, end) = (program.create_event(0), program.create_event(0));
    program.launch(stream, HOST_LEAD_NS);
    assert_success((program.cuda.cuEventRecord)(begin, stream));
    submit(stream);
    assert_success((program.cuda.cuEventRecord)(end, stream));
    assert_success((program.cuda.cuStreamSynchronize)(stream));
    (f64::from(program.milliseconds_between(begin, end)) * 1000.0).round() as u64
}

#[test]
fn kernel_lasts_time_in_its_launch_parameter() {
    run_in_fresh_process("kernel_lasts_time_in_its_launch_parameter", || {
        let program = &CudaProgram::new();
        let cuda = &program.cuda;
        let image = c"softgpu kernel plain\nsoftgpu kernel slow 2000000\n";
        let module = value_stored_by(|module| (cuda.cuModuleLoadData)(module, image.as_ptr()));
        let find = |name: &CStr| {
            value_stored_by(|kernel| (cuda.cuModuleGetFunction)(kernel, module, name.as_ptr()))
        };
        let (plain, slow) = (find(c"plain"), find(c"slow"));
        let launch = |kernel, parameters, extra| {
            device_duration_of(program, |stream| {
                assert_success((cuda.cuLaunchKernel)(
                    kernel, 1, 1, 1, 8, 8, 1, 0, stream, parameters, extra,
                ));
            })
        };
        assert_eq!(
            launch(plain, ptr::null(), ptr::null()),
            DEFAULT_KERNEL_MICROSECONDS
        );
        assert_eq!(launch(slow, ptr::null(), ptr::null()), 2000);
        let time = 3 * MILLISECOND_NS;
        assert_eq!(launch(slow, [&raw const time].as_ptr(), ptr::null()), 3000);
        // The same parameter again, in a packed buffer: the address of the buffer, its size, and the end mark.
        let size = 8usize;
        let (address, length, end) = (
            ptr::without_provenance::<c_void>(1),
            ptr::without_provenance(2),
            ptr::null(),
        );
        let extra = [
            address,
            (&raw const time).cast(),
            length,
            (&raw const size).cast(),
            end,
        ];
        assert_eq!(launch(plain, ptr::null(), extra.as_ptr().cast()), 3000);

        let extended = device_duration_of(program, |stream| {
            let configuration = LaunchConfiguration {
                dimensions: [2, 1, 1, 64, 1, 1],
                shared_bytes: 0,
                stream,
                attributes: ptr::null(),
                attribute_count: 0,
            };
            assert_success((cuda.cuLaunchKernelEx)(
                &configuration,
                plain,
                [&raw const time].as_ptr(),
                ptr::null(),
            ));
        });
        let cooperative = device_duration_of(program, |stream| {
            let parameters = [&raw const time];
            assert_success((cuda.cuLaunchCooperativeKernel)(
                plain,
                1,
                1,
                1,
                8,
                1,
                1,
                0,
                stream,
                parameters.as_ptr(),
            ));
        });
        assert_eq!((extended, cooperative), (3000, 3000));
        assert_eq!(
            (cuda.cuModuleGetFunction)(&mut 0, module, c"other".as_ptr()),
            500
        );
        let too_many =
            (cuda.cuLaunchKernel)(plain, 1, 1, 1, 1025, 1, 1, 0, 0, ptr::null(), ptr::null());
        assert_eq!(too_many, 1);
        assert_success((cuda.cuModuleUnload)(module));
        let unloaded =
            (cuda.cuLaunchKernel)(plain, 1, 1, 1, 1, 1, 1, 0, 0, ptr::null(), ptr::null());
        assert_eq!(unloaded, 400);
        assert_eq!(
            (cuda.cuModuleLoadData)(&mut 0, c"softgpu nonsense".as_ptr()),
            200
        );
    });
}

#[test]
fn cuda_libraries_and_foreign_images_have_kernels() {
    run_in_fresh_process("cuda_libraries_and_foreign_images_have_kernels", || {
        let program = &CudaProgram::new();
        let cuda = &program.cuda;
        let load = |image: &CStr| {
            let none = ptr::null_mut();
            value_stored_by(|library| {
                (cuda.cuLibraryLoadData)(
                    library,
                    image.as_ptr().cast(),
                    none,
                    none,
                    0,
                    none,
                    none,
                    0,
                )
            })
        };
        let ours = load(c"softgpu kernel step 7000\n");
        let kernel =
            value_stored_by(|kernel| (cuda.cuLibraryGetKernel)(kernel, ours, c"step".as_ptr()));
        let function = value_stored_by(|function| (cuda.cuKernelGetFunction)(function, kernel));
        let mut name = ptr::null();
        assert_success((cuda.cuFuncGetName)(&mut name, function));
        // SAFETY: the name of a loaded function.
        assert_eq!(unsafe { CStr::from_ptr(name) }, c"step");
        let foreign = load(c".version 8.0\n.target sm_90\n");
        let any =
            value_stored_by(|kernel| (cuda.cuLibraryGetKernel)(kernel, foreign, c"any".as_ptr()));
        for (kernel, microseconds) in [
            (kernel, 7),
            (function, 7),
            (any, DEFAULT_KERNEL_MICROSECONDS),
        ] {
            let took = device_duration_of(program, |stream| {
                assert_success((cuda.cuLaunchKernel)(
                    kernel,
                    1,
                    1,
                    1,
                    1,
                    1,
                    1,
                    0,
                    stream,
                    ptr::null(),
                    ptr::null(),
                ));
            });
            assert_eq!(took, microseconds);
        }
        assert_success((cuda.cuLibraryUnload)(ours));
        assert_success((cuda.cuLibraryUnload)(foreign));
    });
}

#[test]
fn built_graph_lasts_as_long_as_its_longest_path() {
    run_in_fresh_process("built_graph_lasts_as_long_as_its_longest_path", || {
        let program = &CudaProgram::new();
        let cuda = &program.cuda;
        let graph = value_stored_by(|graph| (cuda.cuGraphCreate)(graph, 0));
        let add = |microseconds: u64, after: &[u64]| {
            let time = microseconds * 1000;
            let parameters = [&raw const time];
            let node = KernelNode {
                function: program.kernel,
                dimensions: [1; 6],
                shared_bytes: 0,
                parameters: parameters.as_ptr(),
                extra: ptr::null(),
                kernel: 0,
                context: 0,
            };
            value_stored_by(|handle| {
                (cuda.cuGraphAddKernelNode_v2)(handle, graph, after.as_ptr(), after.len(), &node)
            })
        };
        // Kernels in microseconds: 100 before both 200 and 300, then an empty node after both, then 50: 450 in all.
        let first = add(100, &[]);
        let (short, long) = (add(200, &[first]), add(300, &[first]));
        let both = [short, long];
        let joint =
            value_stored_by(|handle| (cuda.cuGraphAddEmptyNode)(handle, graph, both.as_ptr(), 2));
        add(50, &[joint]);
        assert_eq!(
            value_stored_by(|kind| (cuda.cuGraphNodeGetType)(long, kind)),
            0
        );
        assert_eq!(
            value_stored_by(|kind| (cuda.cuGraphNodeGetType)(joint, kind)),
            5
        );
        let executable =
            value_stored_by(|executable| (cuda.cuGraphInstantiateWithFlags)(executable, graph, 0));
        assert_success((cuda.cuGraphDestroy)(graph));
        for times in [1, 3] {
            let took = device_duration_of(program, |stream| {
                (0..times).for_each(|_| assert_success((cuda.cuGraphLaunch)(executable, stream)));
            });
            assert_eq!(took, 450 * times);
        }
        assert_success((cuda.cuGraphExecDestroy)(executable));
    });
}

#[test]
fn a_copy_in_the_threads_own_stream_does_not_wait_for_another_threads() {
    run_in_fresh_process(
        "a_copy_in_the_threads_own_stream_does_not_wait_for_another_threads",
        || {
            let program = &CudaProgram::new();
            let cuda = &program.cuda;
            let context = value_stored_by(|context| (cuda.cuCtxGetCurrent)(context));
            let memory = program.allocate_memory(4);
            let time = 3000 * MILLISECOND_NS;
            let parameters = [&raw const time];
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
                    assert_success((cuda.cuMemcpyHtoD_v2_ptds)(
                        memory,
                        (&raw const memory).cast(),
                        4,
                    ));
                });
            });
            assert_eq!((cuda.cuStreamQuery)(2), 600);
        },
    );
}
