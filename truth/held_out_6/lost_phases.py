"""PyTorch without machine learning: pictures are found again from the size of their spectrum alone, whose phases are lost.

Rounds of Fourier transforms go from a guess to its spectrum and back; between them, what contradicts the measurement is mended. A
step is 20 rounds of several guesses at once; then their errors are read back. The best guess of a picture goes to a thread, which
compares it with the picture on the CPU, packs it and writes it to a file. There is no model and no gradient.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import queue
import tempfile
import threading
import zlib

import job
import numpy
import stamps
import torch

KNOWN = {"verdict": "none", "absent": ["DataLoading", "NcclCollective", "OptimizerStep"]}
ROUNDS, STEPS = 20, 12


class Measurement:
    """A picture of some drops in the middle of a dark field, as the size of its spectrum."""

    def __init__(self, size, guesses, device):
        self.device, self.shape = device, (guesses, size, size)
        place = torch.arange(size, device=device) - size / 2
        self.support = (place[:, None].abs() < size / 5) & (place.abs() < size / 6)
        spots = (torch.rand(12, 3, device=device) - 0.5) * size / 4
        near = (place[:, None] - spots[:, :1, None]).square() + (place - spots[:, 1:2, None]).square()
        self.picture = torch.exp(-near / (2 + spots[:, 2:, None].square() / 40)).sum(0) * self.support
        self.size = torch.fft.fft2(self.picture).abs()

    def start(self):
        phase = torch.rand(self.shape, device=self.device) * 6.2832
        return torch.fft.ifft2(torch.polar(self.size.expand(self.shape), phase)).real

    def round(self, guess):
        """One round with feedback. Returns the next guess and the one that has the measured spectrum."""
        spectrum = torch.fft.fft2(guess)
        mended = torch.fft.ifft2(spectrum * (self.size / (spectrum.abs() + 1e-6))).real
        fits = self.support & (mended > 0)
        return torch.where(fits, mended, guess - 0.8 * mended), mended * fits

    def errors(self, guess):
        return (torch.fft.fft2(guess).abs() - self.size).square().mean((1, 2)).sqrt() / self.size.square().mean().sqrt()


class Archive:
    """A thread compares what was found with the picture and writes it to a file."""

    def __init__(self, file):
        self.file, self.found, self.likeness = file, queue.SimpleQueue(), []
        self.thread = threading.Thread(target=self.work, name="archive")
        self.thread.start()

    def work(self):
        while (pair := self.found.get()) is not None:
            with stamps.host:
                found, picture = (numpy.asarray(tensor, dtype=numpy.float64) for tensor in pair)
                # A shifted or mirrored guess fits as well as the picture itself.
                cross = [numpy.fft.ifft2(numpy.fft.fft2(turned) * numpy.fft.fft2(picture).conj()).real.max()
                         for turned in (found, found[::-1, ::-1])]
                self.likeness.append(max(cross) / (numpy.linalg.norm(found) * numpy.linalg.norm(picture) + 1e-12))
                self.file.write(zlib.compress((found * 200).clip(0, 255).astype(numpy.uint8).tobytes(), 6))

    def end(self):
        self.found.put(None)
        self.thread.join()


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    size, guesses = run.pick((768, 16), (64, 2))
    with tempfile.TemporaryFile(prefix="truth-phases-") as file, torch.no_grad():
        # The first transforms of a size are planned.
        warm = Measurement(size, guesses, run.device)
        warm.round(warm.start())
        stamps.synchronize(run.device)
        run.begin()
        archive = Archive(file)
        count = 0
        while run.running():
            with stamps.step:
                if count % STEPS == 0:
                    measured = Measurement(size, guesses, run.device)
                    guess = measured.start()
                for _ in range(ROUNDS):
                    guess, mended = measured.round(guess)
                errors = measured.errors(mended)
                with stamps.gpu if errors.is_cuda else stamps.host:
                    errors = errors.tolist()
                if count % STEPS == STEPS - 1:
                    best = errors.index(min(errors))
                    with stamps.gpu if mended.is_cuda else stamps.host:
                        pair = mended[best].cpu(), measured.picture.cpu()
                    archive.found.put(pair)
            count += 1
        run.done(count)
        archive.end()
    if count > 2 * STEPS and max(archive.likeness) < 0.7:
        sys.exit("lost_phases: nothing found")


if __name__ == "__main__":
    main()
