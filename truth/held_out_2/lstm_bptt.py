"""Word-level LSTM language model with truncated backpropagation through time: cells unrolled in Python, so host-bound.

The text stays on the device. The state is carried from step to step and cut off. The loss is read every ten steps.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "host", "absent": ["DataLoading", "NcclCollective"]}
VOCABULARY = 1000


class Writer(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, words, state):
        outputs, state = [], list(state)
        for hidden in self.embed(words).unbind(0):
            for index, cell in enumerate(self.cells):
                state[index] = cell(hidden, state[index])
                hidden = state[index][0]
            outputs.append(hidden)
        return self.head(torch.stack(outputs)), state


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    width, layers, rows, window = run.pick((128, 2, 16, 32), (16, 1, 4, 8))
    model = Writer(width, layers).to(run.device)
    text = torch.randint(VOCABULARY, (window * 400 + 1, rows), device=run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    zeros = torch.zeros(rows, width, device=run.device)
    state = [(zeros, zeros) for _ in range(layers)]
    total = torch.zeros((), device=run.device)
    best = float("inf")
    ahead = stamps.RunAhead(run.device)
    run.begin()
    count = 0
    while run.running():
        with stamps.step:
            at = count % 400 * window
            words, following = text[at:at + window], text[at + 1:at + 1 + window]
            state = [(hidden.detach(), cell.detach()) for hidden, cell in state]
            with stamps.optimizer:
                optimizer.zero_grad()
            with stamps.forward:
                guess, state = model(words, state)
                loss = nn.functional.cross_entropy(guess.flatten(0, 1), following.flatten())
            stamps.backward(loss)
            with stamps.optimizer:
                nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                optimizer.step()
            total += loss.detach()
            count += 1
            if count % 10 == 0:
                mean = stamps.item(total) / 10
                total.zero_()
                if mean > best:
                    optimizer.param_groups[0]["lr"] *= 0.99
                best = min(best, mean)
            ahead.step()
    run.done(count)


if __name__ == "__main__":
    main()
