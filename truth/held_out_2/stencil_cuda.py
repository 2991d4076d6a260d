"""A CUDA program that is no ML: heat spreads over a plate, and now and then a picture of it comes back for the CPU to look at.

It needs only libcuda: a kernel in PTX, a stream of its own, pinned memory and events.
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
SIDE = 2048
BYTES = SIDE * SIDE * 4
ROUNDS = 200
# Each inner cell becomes the mean of its four neighbours. The edge keeps its heat.
PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry spread(.param .u64 source, .param .u64 target, .param .u32 side)
{
    .reg .pred %p<6>;
    .reg .b32 %r<14>;
    .reg .f32 %f<8>;
    .reg .b64 %rd<12>;
    ld.param.u64 %rd1, [source];
    ld.param.u64 %rd2, [target];
    ld.param.u32 %r1, [side];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    mov.u32 %r6, %ctaid.y;
    sub.u32 %r7, %r1, 1;
    setp.eq.u32 %p1, %r5, 0;
    setp.ge.u32 %p2, %r5, %r7;
    setp.eq.u32 %p3, %r6, 0;
    setp.ge.u32 %p4, %r6, %r7;
    or.pred %p1, %p1, %p2;
    or.pred %p3, %p3, %p4;
    or.pred %p1, %p1, %p3;
    @%p1 bra done;
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mad.lo.u32 %r8, %r6, %r1, %r5;
    mul.wide.u32 %rd5, %r8, 4;
    mul.wide.u32 %rd6, %r1, 4;
    add.s64 %rd7, %rd3, %rd5;
    sub.s64 %rd8, %rd7, %rd6;
    add.s64 %rd9, %rd7, %rd6;
    ld.global.f32 %f1, [%rd7+-4];
    ld.global.f32 %f2, [%rd7+4];
    ld.global.f32 %f3, [%rd8];
    ld.global.f32 %f4, [%rd9];
    add.f32 %f5, %f1, %f2;
    add.f32 %f6, %f3, %f4;
    add.f32 %f5, %f5, %f6;
    mul.f32 %f5, %f5, 0f3E800000;
    add.s64 %rd10, %rd4, %rd5;
    st.global.f32 [%rd10], %f5;
done:
    ret;
}
\0"""


def check(code):
    if code != 0:
        raise OSError(f"CUDA answered {code}")


class Plate:
    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        check(self.cuda.cuInit(0))
        context, device, module = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_void_p()
        check(self.cuda.cuDeviceGet(ctypes.byref(device), 0))
        check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        check(self.cuda.cuCtxSetCurrent(context))
        self.function, self.stream, self.event = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        check(self.cuda.cuModuleLoadData(ctypes.byref(module), PTX))
        check(self.cuda.cuModuleGetFunction(ctypes.byref(self.function), module, b"spread"))
        check(self.cuda.cuStreamCreate(ctypes.byref(self.stream), ctypes.c_uint(1)))
        check(self.cuda.cuEventCreate(ctypes.byref(self.event), ctypes.c_uint(2)))
        self.cells = [ctypes.c_uint64(), ctypes.c_uint64()]
        for cells in self.cells:
            check(self.cuda.cuMemAlloc_v2(ctypes.byref(cells), ctypes.c_size_t(BYTES)))
        pinned = ctypes.c_void_p()
        check(self.cuda.cuMemHostAlloc(ctypes.byref(pinned), ctypes.c_size_t(BYTES), ctypes.c_uint(0)))
        self.picture = (ctypes.c_float * (SIDE * SIDE)).from_address(pinned.value)
        self.heat()

    def heat(self):
        """The upper edge has 100 degrees, all else none."""
        ctypes.memset(ctypes.addressof(self.picture), 0, BYTES)
        self.picture[:SIDE] = [100.0] * SIDE
        for cells in self.cells:
            check(self.cuda.cuMemcpyHtoDAsync_v2(cells, self.picture, ctypes.c_size_t(BYTES), self.stream))
        check(self.cuda.cuStreamSynchronize(self.stream))

    def launch(self):
        """Launch all rounds and the copy of the result."""
        side = ctypes.c_uint32(SIDE)
        for _ in range(ROUNDS):
            source, target = self.cells
            values = (ctypes.c_void_p * 3)(ctypes.addressof(source), ctypes.addressof(target), ctypes.addressof(side))
            check(self.cuda.cuLaunchKernel(self.function, SIDE // 256, SIDE, 1, 256, 1, 1, 0, self.stream, values, None))
            self.cells.reverse()
        check(self.cuda.cuMemcpyDtoHAsync_v2(self.picture, self.cells[0], ctypes.c_size_t(BYTES), self.stream))
        check(self.cuda.cuEventRecord(self.event, self.stream))

    def wait(self):
        check(self.cuda.cuEventSynchronize(self.event))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12, help="how long to run [12]")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: nothing to run, skips")
    args = parser.parse_args()
    try:
        plate = None if args.device == "cpu" else Plate()
    except OSError as error:
        plate = None
        print(f"stencil_cuda: {error}")
    if plate is None:
        print("stencil_cuda: skipped: no CUDA device")
        sys.exit(SKIPPED)
    stamps.begin(os.environ.get("ZERNEL_TRUTH_VARIANT", "stencil_cuda"), KNOWN)
    end = time.monotonic() + args.seconds
    count, depth = 0, 0
    while time.monotonic() < end:
        with stamps.step:
            with stamps.host:
                plate.launch()
            with stamps.gpu:
                plate.wait()
            with stamps.host:
                column = [plate.picture[row * SIDE + SIDE // 2] for row in range(SIDE)]
                depth = sum(cell > 0.1 for cell in column)
        count += 1
    stamps.end()
    if not 1 < depth < SIDE or any(upper < lower - 1e-3 for upper, lower in zip(column, column[1:])):
        sys.exit("stencil_cuda: wrong result")
    print(f"stencil_cuda: {count} pictures in {args.seconds:.1f} s, {depth} rows are warm")


if __name__ == "__main__":
    main()
