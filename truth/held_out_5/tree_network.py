"""A network that follows the syntax tree of each sentence: Python walks the trees and computes node by node. Host-bound.

A node takes a dozen tiny kernels, and a step has some 300 nodes. A moving average of the weights is kept on the CPU: every tenth
step copies the weights there, which waits for the GPU, and blends them in, which is `host`.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import random

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "host", "absent": ["NcclCollective"]}
WORDS, FEELINGS, BLEND_EVERY = 3000, 5, 10


class Sentence:
    """Words, and a tree of pairs over their places."""

    def __init__(self, draw, longest):
        self.words = [draw.randrange(WORDS) for _ in range(draw.randint(longest // 2, longest))]
        self.tree = self.split(draw, 0, len(self.words))
        self.feelings = [draw.randrange(FEELINGS) for _ in range(2 * len(self.words) - 1)]

    def split(self, draw, begin, end):
        if end - begin == 1:
            return begin
        middle = draw.randint(begin + 1, end - 1)
        return self.split(draw, begin, middle), self.split(draw, middle, end)


class TreeNetwork(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.embed, self.leaf = nn.Embedding(WORDS, width), nn.Linear(width, 2 * width)
        self.join, self.feel = nn.Linear(2 * width, 5 * width), nn.Linear(width, FEELINGS)

    def read(self, tree, leaves, seen):
        """State and memory of a node. The states of all nodes are added to `seen`."""
        if isinstance(tree, int):
            memory, opened = leaves[tree]
            state = opened * torch.tanh(memory)
        else:
            (left, kept_left), (right, kept_right) = (self.read(branch, leaves, seen) for branch in tree)
            gates = self.join(torch.cat([left, right]))
            enter, keep_left, keep_right, leave = gates[:4 * self.width].sigmoid().split(self.width)
            memory = enter * gates[4 * self.width:].tanh() + keep_left * kept_left + keep_right * kept_right
            state = leave * torch.tanh(memory)
        seen.append(state)
        return state, memory

    def forward(self, trees, words):
        """What each node feels like. The words of all sentences are in one tensor."""
        memory, opened = self.leaf(self.embed(words)).chunk(2, 1)
        leaves = list(zip(memory.unbind(), opened.sigmoid().unbind()))
        seen, start = [], 0
        for tree, length in trees:
            self.read(tree, leaves[start:start + length], seen)
            start += length
        return self.feel(torch.stack(seen))


class Average:
    """A moving average of weights, on the CPU."""

    def __init__(self, model):
        self.weights = list(model.parameters())
        self.values = [weight.detach().cpu().clone() for weight in self.weights]

    def blend(self):
        with stamps.gpu if self.weights[0].is_cuda else stamps.host:
            latest = [weight.detach().cpu() for weight in self.weights]
        torch._foreach_lerp_(self.values, latest, 0.05)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    rows, longest = run.pick((8, 26), (2, 8))
    draw = random.Random(2)
    sentences = [Sentence(draw, longest) for _ in range(500)]
    model = TreeNetwork(run.pick(128, 8)).to(run.device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02, weight_decay=1e-5)
    average = Average(model)
    run.begin()
    count = 0
    while run.running():
        with stamps.step:
            with stamps.data:
                picked = draw.sample(sentences, rows)
                words = torch.tensor([word for sentence in picked for word in sentence.words])
                feelings = torch.tensor([feeling for sentence in picked for feeling in sentence.feelings])
            words, feelings = stamps.to_device([words, feelings], run.device)
            with stamps.optimizer:
                optimizer.zero_grad()
            with stamps.forward:
                guess = model([(sentence.tree, len(sentence.words)) for sentence in picked], words)
                loss = nn.functional.cross_entropy(guess, feelings)
            stamps.backward(loss)
            with stamps.optimizer:
                optimizer.step()
            stamps.item(loss.detach())
            count += 1
            if count % BLEND_EVERY == 0:
                average.blend()
    run.done(count)


if __name__ == "__main__":
    main()
