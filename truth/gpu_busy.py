"""GPU busy: the fraction of each second in which at least one kernel ran, as NVML samples it.

A thread asks once per second. The figure is of the whole GPU, so it is the job's own only while the job is alone.
"""

import ctypes
import threading
import time

GPU_UTILIZATION_SAMPLES = 1


class Sample(ctypes.Structure):
    _fields_ = [("microseconds", ctypes.c_ulonglong), ("value", ctypes.c_uint), ("padding", ctypes.c_uint)]


class Rates(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class GpuBusy:
    def __init__(self, index=0):
        self.seconds = []
        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self.device = ctypes.c_void_p()
        check(self.nvml.nvmlInit_v2())
        check(self.nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self.device)))
        self.last_seen = int(time.time() * 1e6)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run, name="gpu_busy", daemon=True)
        self.thread.start()

    def run(self):
        while not self.ended.wait(1.0):
            fraction = self.since_last()
            if fraction is not None:
                self.seconds.append([time.monotonic_ns(), fraction])

    def since_last(self):
        """Mean of the samples since the last call; without samples, the driver's latest rate."""
        count, kind = ctypes.c_uint(0), ctypes.c_uint(0)
        asked = (self.device, GPU_UTILIZATION_SAMPLES, ctypes.c_ulonglong(self.last_seen))
        code = self.nvml.nvmlDeviceGetSamples(*asked, ctypes.byref(kind), ctypes.byref(count), None)
        if code == 0 and count.value:
            samples = (Sample * count.value)()
            code = self.nvml.nvmlDeviceGetSamples(*asked, ctypes.byref(kind), ctypes.byref(count), samples)
            fresh = [s for s in samples[: count.value] if s.microseconds > self.last_seen]
            if code == 0 and fresh:
                self.last_seen = max(s.microseconds for s in fresh)
                return round(sum(s.value for s in fresh) / len(fresh) / 100, 3)
        rates = Rates()
        if self.nvml.nvmlDeviceGetUtilizationRates(self.device, ctypes.byref(rates)) == 0:
            return rates.gpu / 100
        return None

    def stop(self):
        """[[monotonic ns at the end of a second, fraction of that second], …] or None."""
        self.ended.set()
        self.thread.join(2)
        return self.seconds or None


def check(code):
    if code != 0:
        raise OSError(f"NVML answered {code}")


def start():
    """A running sampler, or None without a GPU or NVML."""
    try:
        return GpuBusy()
    except OSError:
        return None
