"""PyTorch without machine learning: a radar finds things that move in its echoes, with Fourier transforms on the GPU.

A step is one sweep: echoes are imitated on the device, compressed, sorted by speed and compared with their surroundings. What
stands out is read back, and Python follows it from sweep to sweep. There is no model and no gradient.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import math

import job
import stamps
import torch

KNOWN = {"verdict": "none", "absent": ["DataLoading", "NcclCollective", "OptimizerStep"]}
PULSE, GUARD, AROUND = 64, 2, 8


class Target:
    """Something that moves. Its distance is in cells, its speed in cells per sweep."""

    def __init__(self, distance, speed, turn):
        self.distance, self.speed, self.turn = distance, speed, turn

    def move(self, cells):
        self.distance += self.speed
        if not 2 * PULSE < self.distance < cells - 2 * PULSE:
            self.speed = -self.speed


class Radar:
    def __init__(self, antennas, pulses, cells, device):
        self.shape, self.device = (antennas, pulses, cells), device
        time = torch.arange(PULSE, device=device) / PULSE
        self.chirp = torch.polar(torch.ones_like(time), math.pi * PULSE * 0.5 * (time - 0.5).square())
        self.matched = torch.fft.fft(self.chirp, cells).conj()
        self.taper = torch.hann_window(pulses, device=device)[None, :, None]

    def listen(self, targets):
        """Echoes [antenna, pulse, cell]: noise and the chirps that come back."""
        antennas, pulses, cells = self.shape
        echoes = torch.randn(self.shape, dtype=torch.complex64, device=self.device)
        steps = torch.arange(pulses, device=self.device, dtype=torch.float32)
        for target in targets:
            phase = torch.polar(torch.ones_like(steps), 2 * math.pi * target.turn * steps)
            begin = int(target.distance)
            echoes[:, :, begin:begin + PULSE] += 1.5 * phase[:, None] * self.chirp
        return echoes

    def power(self, echoes):
        """Power [speed, cell] of all antennas together."""
        spectrum = torch.fft.fft(echoes, dim=2)
        spectrum *= self.matched
        compressed = torch.fft.ifft(spectrum, dim=2)
        compressed *= self.taper
        speeds = torch.view_as_real(torch.fft.fft(compressed, dim=1))
        return speeds.square().sum((0, 3))

    def find(self, power):
        """Cells that are far above the mean of those around them and above their neighbours: [speed, cell]."""
        wide, narrow = 2 * (AROUND + GUARD) + 1, 2 * GUARD + 1
        totals = torch.nn.functional.pad(power.cumsum(1), (1, 0))
        around = torch.full_like(power, float("inf"))
        far, near = AROUND + GUARD, GUARD
        middle = slice(far, power.shape[1] - far)
        outer = totals[:, wide:] - totals[:, :-wide]
        inner = (totals[:, narrow:] - totals[:, :-narrow])[:, far - near:power.shape[1] - far - near]
        around[:, middle] = (outer - inner) / (wide - narrow)
        highest = torch.nn.functional.max_pool2d(power[None, None], 5, stride=1, padding=2)[0, 0]
        return ((power > 12 * around) & (power == highest)).nonzero()


class Tracks:
    """Follows what was found: [distance, speed, times seen, times missed]."""

    def __init__(self):
        self.tracks = []

    def follow(self, found):
        free = sorted(found)
        for track in self.tracks:
            guess = track[0] + track[1]
            best = min(free, key=lambda place: abs(place - guess), default=None)
            if best is not None and abs(best - guess) < 12:
                free.remove(best)
                track[1] += 0.2 * (best - guess)
                track[0] = guess + 0.6 * (best - guess)
                track[2], track[3] = track[2] + 1, 0
            else:
                track[0], track[3] = guess, track[3] + 1
        self.tracks = [track for track in self.tracks if track[3] < 5]
        self.tracks += [[place, 0.0, 1, 0] for place in free]


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    antennas, pulses, cells = run.pick((8, 512, 8192), (2, 32, 1024))
    radar, tracks = Radar(antennas, pulses, cells, run.device), Tracks()
    targets = [Target(cells * share, speed, turn)
               for share, speed, turn in ((0.25, 2.0, 0.21), (0.45, -3.0, -0.17), (0.6, 1.0, 0.38), (0.8, -1.5, -0.32))]
    run.begin()
    count, most = 0, 0
    while run.running():
        with stamps.step:
            found = radar.find(radar.power(radar.listen(targets)))
            with stamps.gpu if found.is_cuda else stamps.host:
                found = found.tolist()
            tracks.follow([float(cell) for _, cell in found])
            most = max(most, sum(track[2] > 3 for track in tracks.tracks))
            for target in targets:
                target.move(cells)
        count += 1
    run.done(count)
    if count > 10 and most < 2:
        sys.exit("radar_sweeps: nothing found")


if __name__ == "__main__":
    main()
