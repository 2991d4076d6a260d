"""A CUDA program that is no ML: it moves blocks to the GPU, filters them with a kernel of its own and reads them back.

It needs only libcuda, no PyTorch, and no compiler: the driver compiles the PTX below.
"""

import argparse
import ctypes
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import stamps

KNOWN = {"verdict": "none", "absent": ["DataLoading", "NcclCollective", "OptimizerStep"]}
SKIPPED = 77
ELEMENTS = 1 << 22
# values[i] = values[i] * 3 + 1, for 64-bit integers
PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 values, .param .u32 count)
{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [values];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra done;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.u32 %rd3, %r5, 8;
    add.s64 %rd4, %rd2, %rd3;
    ld.global.u64 %rd5, [%rd4];
    mul.lo.u64 %rd5, %rd5, 3;
    add.s64 %rd5, %rd5, 1;
    st.global.u64 [%rd4], %rd5;
done:
    ret;
}
\0"""


def check(code):
    if code != 0:
        raise OSError(f"CUDA answered {code}")


class Device:
    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        check(self.cuda.cuInit(0))
        context, device = ctypes.c_void_p(), ctypes.c_int()
        check(self.cuda.cuDeviceGet(ctypes.byref(device), 0))
        check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        check(self.cuda.cuCtxSetCurrent(context))
        module = ctypes.c_void_p()
        self.function = ctypes.c_void_p()
        self.memory = ctypes.c_uint64()
        check(self.cuda.cuModuleLoadData(ctypes.byref(module), PTX))
        check(self.cuda.cuModuleGetFunction(ctypes.byref(self.function), module, b"scale"))
        check(self.cuda.cuMemAlloc_v2(ctypes.byref(self.memory), ctypes.c_size_t(ELEMENTS * 8)))

    def filter(self, block, launches):
        size = ctypes.c_size_t(ELEMENTS * 8)
        count = ctypes.c_uint32(ELEMENTS)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(self.memory), ctypes.addressof(count))
        with stamps.gpu:
            check(self.cuda.cuMemcpyHtoD_v2(self.memory, block, size))
        with stamps.host:
            for _ in range(launches):
                check(self.cuda.cuLaunchKernel(self.function, ELEMENTS // 256, 1, 1, 256, 1, 1, 0, None, values, None))
        with stamps.gpu:
            check(self.cuda.cuMemcpyDtoH_v2(block, self.memory, size))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12, help="how long to run [12]")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: nothing to run, skips")
    args = parser.parse_args()
    try:
        device = None if args.device == "cpu" else Device()
    except OSError as error:
        device = None
        print(f"not_ml: {error}")
    if device is None:
        print("not_ml: skipped: no CUDA device")
        sys.exit(SKIPPED)
    block = (ctypes.c_uint64 * ELEMENTS)()
    stamps.begin(os.environ.get("ZERNEL_TRUTH_VARIANT", "not_ml"), KNOWN)
    end = time.monotonic() + args.seconds
    count = 0
    while time.monotonic() < end:
        with stamps.step:
            device.filter(block, 50)
        count += 1
    expected = 0
    for _ in range(50 * count):
        expected = (expected * 3 + 1) % (1 << 64)
    if block[ELEMENTS - 1] != expected:
        sys.exit("not_ml: wrong result")
    print(f"not_ml: {count} blocks in {args.seconds:.1f} s")


if __name__ == "__main__":
    main()
