"""A CUDA program that is no ML: four clusters of stars under their own gravity, each on a stream of its own.

Each cluster has 16,384 stars, and each star pulls at every other one. The host waits for one cluster after the other, measures
it and launches its next rounds, while the others go on. It needs only libcuda: a kernel in PTX, pinned memory and events.
"""

import argparse
import ctypes
import math
import os
import random
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import stamps

KNOWN = {"verdict": "none", "absent": ["DataLoading", "NcclCollective", "OptimizerStep"]}
SKIPPED = 77
CLUSTERS = 4
STARS = 16_384
ROUNDS = 8
BYTES = STARS * 16
# A star is x, y, z and its mass. Adds up the pull of all stars, then moves the star: 0.001 is the time of a round.
PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry pull(.param .u64 source, .param .u64 target, .param .u64 speeds, .param .u32 count)
{
    .reg .pred %p<3>;
    .reg .b32 %r<8>;
    .reg .f32 %f<28>;
    .reg .b64 %rd<12>;
    ld.param.u64 %rd1, [source];
    ld.param.u64 %rd2, [target];
    ld.param.u64 %rd3, [speeds];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra done;
    cvta.to.global.u64 %rd4, %rd1;
    cvta.to.global.u64 %rd5, %rd2;
    cvta.to.global.u64 %rd6, %rd3;
    mul.wide.u32 %rd7, %r5, 16;
    add.s64 %rd8, %rd4, %rd7;
    ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd8];
    mov.f32 %f5, 0f00000000;
    mov.f32 %f6, 0f00000000;
    mov.f32 %f7, 0f00000000;
    mov.u32 %r6, 0;
    mov.u64 %rd9, %rd4;
again:
    ld.global.v4.f32 {%f8, %f9, %f10, %f11}, [%rd9];
    sub.f32 %f12, %f8, %f1;
    sub.f32 %f13, %f9, %f2;
    sub.f32 %f14, %f10, %f3;
    mov.f32 %f15, 0f3C23D70A;
    fma.rn.f32 %f15, %f12, %f12, %f15;
    fma.rn.f32 %f15, %f13, %f13, %f15;
    fma.rn.f32 %f15, %f14, %f14, %f15;
    rsqrt.approx.f32 %f16, %f15;
    mul.f32 %f17, %f16, %f16;
    mul.f32 %f17, %f17, %f16;
    mul.f32 %f17, %f17, %f11;
    fma.rn.f32 %f5, %f12, %f17, %f5;
    fma.rn.f32 %f6, %f13, %f17, %f6;
    fma.rn.f32 %f7, %f14, %f17, %f7;
    add.s64 %rd9, %rd9, 16;
    add.u32 %r6, %r6, 1;
    setp.lt.u32 %p2, %r6, %r1;
    @%p2 bra again;
    add.s64 %rd10, %rd6, %rd7;
    ld.global.v4.f32 {%f18, %f19, %f20, %f21}, [%rd10];
    mov.f32 %f22, 0f3A83126F;
    fma.rn.f32 %f18, %f5, %f22, %f18;
    fma.rn.f32 %f19, %f6, %f22, %f19;
    fma.rn.f32 %f20, %f7, %f22, %f20;
    st.global.v4.f32 [%rd10], {%f18, %f19, %f20, %f21};
    fma.rn.f32 %f1, %f18, %f22, %f1;
    fma.rn.f32 %f2, %f19, %f22, %f2;
    fma.rn.f32 %f3, %f20, %f22, %f3;
    add.s64 %rd11, %rd5, %rd7;
    st.global.v4.f32 [%rd11], {%f1, %f2, %f3, %f4};
done:
    ret;
}
\0"""


def check(code):
    if code != 0:
        raise OSError(f"CUDA answered {code}")


def load_kernel(cuda):
    """Start CUDA and return the kernel."""
    check(cuda.cuInit(0))
    context, device, module, function = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    check(cuda.cuDeviceGet(ctypes.byref(device), 0))
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    check(cuda.cuCtxSetCurrent(context))
    check(cuda.cuModuleLoadData(ctypes.byref(module), PTX))
    check(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"pull"))
    return function


class Cluster:
    """Stars of equal mass in a ball, at rest."""

    def __init__(self, cuda, function, seed):
        self.cuda, self.function = cuda, function
        self.stream, self.event = ctypes.c_void_p(), ctypes.c_void_p()
        check(cuda.cuStreamCreate(ctypes.byref(self.stream), ctypes.c_uint(1)))
        check(cuda.cuEventCreate(ctypes.byref(self.event), ctypes.c_uint(2)))
        self.source, self.target, self.speeds = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
        for memory in (self.source, self.target, self.speeds):
            check(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(BYTES)))
        pinned = ctypes.c_void_p()
        check(cuda.cuMemHostAlloc(ctypes.byref(pinned), ctypes.c_size_t(BYTES), ctypes.c_uint(0)))
        self.stars = (ctypes.c_float * (STARS * 4)).from_address(pinned.value)
        draw = random.Random(seed)
        for star in range(STARS):
            self.stars[4 * star:4 * star + 4] = [draw.gauss(0, 1), draw.gauss(0, 1), draw.gauss(0, 1), 1 / STARS]
        check(cuda.cuMemsetD8Async(self.speeds, ctypes.c_ubyte(0), ctypes.c_size_t(BYTES), self.stream))
        check(cuda.cuMemcpyHtoDAsync_v2(self.source, self.stars, ctypes.c_size_t(BYTES), self.stream))
        check(cuda.cuStreamSynchronize(self.stream))

    def launch(self):
        """Launch some rounds and the copy of where the stars are then."""
        count = ctypes.c_uint32(STARS)
        for _ in range(ROUNDS):
            arguments = (self.source, self.target, self.speeds, count)
            values = (ctypes.c_void_p * 4)(*[ctypes.addressof(argument) for argument in arguments])
            check(self.cuda.cuLaunchKernel(self.function, STARS // 128, 1, 1, 128, 1, 1, 0, self.stream, values, None))
            self.source, self.target = self.target, self.source
        check(self.cuda.cuMemcpyDtoHAsync_v2(self.stars, self.source, ctypes.c_size_t(BYTES), self.stream))
        check(self.cuda.cuEventRecord(self.event, self.stream))

    def wait(self):
        check(self.cuda.cuEventSynchronize(self.event))

    def measure(self):
        """The centre of the stars along the first axis and their mean distance from it."""
        places = self.stars[0::4]
        centre = sum(places) / STARS
        return centre, sum(abs(place - centre) for place in places) / STARS


def find_clusters(device):
    if device == "cpu":
        return None
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        function = load_kernel(cuda)
        return [Cluster(cuda, function, seed) for seed in range(CLUSTERS)]
    except OSError as error:
        print(f"star_clusters: {error}")
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12, help="how long to run [12]")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: nothing to run, skips")
    args = parser.parse_args()
    clusters = find_clusters(args.device)
    if clusters is None:
        print("star_clusters: skipped: no CUDA device")
        sys.exit(SKIPPED)
    before = [cluster.measure() for cluster in clusters]
    stamps.begin(os.environ.get("ZERNEL_TRUTH_VARIANT", "star_clusters"), KNOWN)
    end = time.monotonic() + args.seconds
    for cluster in clusters:
        cluster.launch()
    count, sizes = 0, []
    while time.monotonic() < end:
        with stamps.step:
            for cluster in clusters:
                with stamps.gpu:
                    cluster.wait()
                with stamps.host:
                    sizes.append(cluster.measure())
                    cluster.launch()
        count += 1
    stamps.end()
    for cluster, (centre, _) in zip(clusters, before):
        cluster.wait()
        moved, size = cluster.measure()
        if not math.isfinite(size) or abs(moved - centre) > 0.05:
            sys.exit("star_clusters: wrong result")
    if sizes[-1][1] == before[-1][1]:
        sys.exit("star_clusters: no star has moved")
    print(f"star_clusters: {count} pictures of {CLUSTERS} clusters in {args.seconds:.1f} s")


if __name__ == "__main__":
    main()
