"""A model in two stages, one per process: activations go forward and their gradients come back, over gloo, by send and recv.

A step has four micro-batches. The stages are small and the activations large, so communication is the bottleneck. Gloo
sends from host memory: the copy to pinned memory is waited for, which is `gpu`. Sending and receiving are `peer`.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import feeding
import job
import stamps
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

KNOWN = {"verdict": "communication", "absent": []}
MICRO_BATCHES = 4
SIGNS = 256


class Texts(Dataset):
    """Both stages read the same texts in the same order. Only the first uses the signs, only the last what follows."""

    def __init__(self, length, following):
        self.length, self.following = length, following

    def __len__(self):
        return 1 << 18

    def __getitem__(self, index):
        return (torch.arange(self.length) * (index % 31 + 1) + self.following) % SIGNS


class Mix(nn.Module):
    """Mixes neighbours, then channels."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, hidden):
        normal = self.norm(hidden)
        return hidden + nn.functional.silu(self.mix(normal + normal.roll(1, 1)))


class Link:
    """Moves tensors of one shape between this stage and the other one, through pinned buffers."""

    def __init__(self, run, shape):
        self.run, self.other, self.pending = run, 1 - run.rank, []
        buffers = 2 * MICRO_BATCHES
        self.buffers = [torch.empty(shape, pin_memory=run.device.type == "cuda") for _ in range(buffers)]

    def send(self, number, tensor):
        """Start to send a tensor. `finish` waits for it."""
        buffer = self.buffers[number]
        buffer.copy_(tensor, non_blocking=True)
        stamps.synchronize(self.run.device)
        with stamps.peer:
            self.pending.append(dist.isend(buffer, self.other))

    def receive(self, number):
        buffer = self.buffers[MICRO_BATCHES + number]
        with stamps.peer:
            dist.recv(buffer, self.other)
        return buffer.to(self.run.device, non_blocking=True)

    def finish(self):
        with stamps.peer:
            while self.pending:
                self.pending.pop(0).wait()


def train_first(stage, link, batches):
    """Run all micro-batches forward, then take their gradients in the same order."""
    outputs = []
    for number, batch in enumerate(batches):
        with stamps.forward:
            outputs.append(stage(batch))
        link.send(number, outputs[-1].detach())
    for number, output in enumerate(outputs):
        gradient = link.receive(number)
        stamps.backward(output, gradient=gradient)
    link.finish()


def train_last(stage, link, batches):
    """Run each micro-batch forward and backward and send the gradient of its input."""
    for number, following in enumerate(batches):
        hidden = link.receive(number).clone().requires_grad_()
        with stamps.forward:
            loss = nn.functional.cross_entropy(stage(hidden).flatten(0, 1), following.flatten()) / MICRO_BATCHES
        stamps.backward(loss)
        link.send(number, hidden.grad)
    link.finish()


def main():
    args = job.arguments(__doc__).parse_args()
    job.run_ranks(2)
    run = job.Job(args, KNOWN)
    run.join_ranks("gloo")
    torch.backends.cuda.matmul.allow_tf32 = True
    width, length, rows = run.pick((1024, 256, 32), (64, 512, 8))
    first = run.rank == 0
    layers = [Mix(width) for _ in range(run.pick(2, 1))]
    layers = [nn.Embedding(SIGNS, width), *layers] if first else [*layers, nn.Linear(width, SIGNS)]
    stage = nn.Sequential(*layers).to(run.device)
    train = train_first if first else train_last
    optimizer = torch.optim.SGD(stage.parameters(), lr=1e-3, momentum=0.9)
    link = Link(run, (rows, length, width))
    run.begin()
    source = feeding.loader(Texts(length, 0 if first else 1), batch_size=rows, num_workers=1, drop_last=True)
    supply = feeding.endless(source, lambda: True)
    count = 0
    going = True
    while going:
        with stamps.step:
            batches = [stamps.to_device([next(supply)], run.device)[0] for _ in range(MICRO_BATCHES)]
            train(stage, link, batches)
            with stamps.optimizer:
                optimizer.step()
                optimizer.zero_grad()
            count += 1
            going = run.agree_to_run(count, every=4)
    supply.close()
    run.done(count)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
