"""A classifier of sounds trained by JAX: the training thread makes the spectrograms with NumPy, and the GPU waits for it.

The optimizer is a part of the compiled step, so there is no OptimizerStep. The call copies the batch to the GPU: that is
`host`. Each step waits for its loss. The function is compiled before the run begins.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import job
import stamps

job.require("jax")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import functools

import jax
import jax.numpy as jnp
import numpy

KNOWN = {"verdict": "input", "absent": ["NcclCollective", "OptimizerStep"]}
SAMPLES, WINDOW, HOP = 16_000, 400, 160


class Sounds:
    """Seconds of sound. Each is shifted, played faster or slower, and becomes a spectrogram on a logarithmic scale."""

    def __init__(self, sounds):
        self.random = numpy.random.default_rng(0)
        self.waves = self.random.standard_normal((256, 2 * SAMPLES), dtype=numpy.float32)
        self.taper = numpy.hanning(WINDOW).astype(numpy.float32)
        self.sounds = sounds

    def next(self):
        picked = self.random.integers(256, size=self.sounds)
        return numpy.stack([self.spectrogram(self.waves[index]) for index in picked]), (picked % 10).astype(numpy.int32)

    def spectrogram(self, wave):
        places = self.random.integers(SAMPLES // 2) + numpy.arange(SAMPLES) * self.random.uniform(0.8, 1.2)
        played = numpy.interp(places, numpy.arange(2 * SAMPLES), wave)
        windows = numpy.lib.stride_tricks.sliding_window_view(played, WINDOW)[::HOP] * self.taper
        power = numpy.abs(numpy.fft.rfft(windows)) ** 2
        return numpy.log(power + 1e-6).astype(numpy.float32)


def loss_of(weights, spectrograms, targets):
    first, second, last = weights
    hidden = jax.nn.relu(spectrograms @ first)
    hidden = jax.nn.relu(hidden @ second).mean(1)
    chances = jax.nn.log_softmax(hidden @ last)
    return -jnp.take_along_axis(chances, targets[:, None], 1).mean()


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train(weights, speeds, spectrograms, targets):
    """One step of gradient descent with momentum."""
    loss, gradients = jax.value_and_grad(loss_of)(weights, spectrograms, targets)
    speeds = [0.9 * speed + gradient for speed, gradient in zip(speeds, gradients)]
    return [weight - 1e-3 * speed for weight, speed in zip(weights, speeds)], speeds, loss


def main():
    args = job.arguments(__doc__).parse_args()
    if args.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        job.skip(job.NO_DEVICE)
    run = job.Run(args, KNOWN)
    width = run.pick(512, 16)
    sounds = Sounds(run.pick(64, 8))
    random = numpy.random.default_rng(1)
    sizes = (WINDOW // 2 + 1, width, width, 10)
    weights = [jnp.asarray(random.standard_normal(pair) / pair[0] ** 0.5, jnp.float32) for pair in zip(sizes, sizes[1:])]
    state = (weights, [jnp.zeros_like(weight) for weight in weights])
    *state, loss = train(*state, *sounds.next())
    loss.block_until_ready()
    run.begin()
    count = 0
    while run.running():
        with stamps.step:
            with stamps.data:
                spectrograms, targets = sounds.next()
            with stamps.host:
                *state, loss = train(*state, spectrograms, targets)
            with stamps.gpu:
                loss.block_until_ready()
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
