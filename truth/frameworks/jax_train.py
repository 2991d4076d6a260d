"""A wide network trained by JAX, one compiled function per step: its matrix products take longer than all else.

The optimizer is a part of that function, so there is no OptimizerStep. A batch is picked from memory with NumPy.
The call copies it to the GPU: that is `host`. Each step waits for its loss. The function is compiled before the run begins.
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

KNOWN = {"verdict": "gpu", "absent": ["NcclCollective", "OptimizerStep"]}


@functools.partial(jax.jit, static_argnums=0)
def weights(sizes):
    keys = jax.random.split(jax.random.PRNGKey(0), len(sizes) - 1)
    return [jax.random.normal(key, pair) / pair[0] ** 0.5 for key, pair in zip(keys, zip(sizes, sizes[1:]))]


def loss_of(layers, inputs, targets):
    hidden = inputs
    for layer in layers[:-1]:
        hidden = jax.nn.gelu(hidden @ layer)
    chances = jax.nn.log_softmax(hidden @ layers[-1])
    return -jnp.take_along_axis(chances, targets[:, None], 1).mean()


@functools.partial(jax.jit, donate_argnums=(0, 1, 2))
def train(layers, means, squares, inputs, targets):
    """One step of Adam, without the correction of its first steps."""
    loss, gradients = jax.value_and_grad(loss_of)(layers, inputs, targets)
    means = [0.9 * mean + 0.1 * gradient for mean, gradient in zip(means, gradients)]
    squares = [0.99 * square + 0.01 * gradient ** 2 for square, gradient in zip(squares, gradients)]
    layers = [layer - 1e-4 * mean / (jnp.sqrt(square) + 1e-8) for layer, mean, square in zip(layers, means, squares)]
    return layers, means, squares, loss


class Batches:
    def __init__(self, rows, width):
        self.random = numpy.random.default_rng(0)
        self.pool = self.random.standard_normal((4 * rows, width), dtype=numpy.float32)
        self.rows = rows

    def next(self):
        picked = self.random.integers(len(self.pool), size=self.rows)
        return self.pool[picked], (picked % 10).astype(numpy.int32)


def main():
    args = job.arguments(__doc__).parse_args()
    if args.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        job.skip(job.NO_DEVICE)
    run = job.Run(args, KNOWN)
    rows, narrow, wide = run.pick((4096, 256, 8192), (32, 16, 64))
    layers = weights((narrow, wide, wide, wide, wide, 10))
    state = (layers, [jnp.zeros_like(layer) for layer in layers], [jnp.zeros_like(layer) for layer in layers])
    batches = Batches(rows, narrow)
    *state, loss = train(*state, *batches.next())
    loss.block_until_ready()
    run.begin()
    count = 0
    while run.running():
        with stamps.step:
            with stamps.data:
                inputs, targets = batches.next()
            with stamps.host:
                *state, loss = train(*state, inputs, targets)
            with stamps.gpu:
                loss.block_until_ready()
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
