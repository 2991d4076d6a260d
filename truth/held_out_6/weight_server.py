"""CPU only: a server keeps the weights, and three workers send it their gradients whenever they have one. Nobody waits for all.

The server receives from any worker, updates the weights and sends them back, over gloo. So a worker trains on weights that others
have changed meanwhile. It has no optimizer. Many weights and little work: communication is the bottleneck, for the
server as well. Sending and receiving are `peer`.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import job
import stamps
import torch
import torch.distributed as dist
from torch import nn

SERVER = {"verdict": "communication", "absent": ["DataLoading"]}
WORKER = {"verdict": "communication", "absent": ["OptimizerStep"]}
RANKS = 4
GRAMS, WIDTH, TONGUES = 50_000, 64, 30


class Tongue(nn.Module):
    """Guesses the language of a text from its groups of letters."""

    def __init__(self):
        super().__init__()
        self.grams = nn.EmbeddingBag(GRAMS, WIDTH, mode="mean")
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, TONGUES))

    def forward(self, grams):
        return self.head(self.grams(grams))


class Texts:
    """Texts as groups of letters, cut from one long random text."""

    def __init__(self, rank):
        generator = torch.Generator().manual_seed(rank)
        self.text = torch.randint(97, 123, (100_000,), generator=generator)

    def batch(self, rows, length):
        starts = torch.randint(len(self.text) - length - 3, (rows,))
        letters = self.text[starts[:, None] + torch.arange(length + 2)]
        grams = (letters[:, :-2] * 961 + letters[:, 1:-1] * 31 + letters[:, 2:]) % GRAMS
        return grams, starts % TONGUES


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


class Server:
    def __init__(self, weights):
        self.weights = nn.Parameter(weights)
        self.optimizer = torch.optim.SGD([self.weights], lr=0.02, momentum=0.9)

    def run(self, _):
        """Update the weights by every gradient that comes, until all workers have ended."""
        # The last number of a message tells whether the worker ends.
        message = torch.empty(self.weights.numel() + 1)
        workers, count = RANKS - 1, 0
        while workers:
            with stamps.step:
                with stamps.peer:
                    worker = dist.recv(message)
                if message[-1] > 0:
                    workers -= 1
                    continue
                self.weights.grad = message[:-1]
                with stamps.optimizer:
                    self.optimizer.step()
                with stamps.peer:
                    dist.send(self.weights.detach(), worker)
            count += 1
        return count


class Worker:
    def __init__(self, model, rank):
        self.model, self.texts = model, Texts(rank)
        self.weights = list(model.parameters())
        self.sizes = [weight.numel() for weight in self.weights]

    def run(self, run):
        message, received = torch.zeros(sum(self.sizes) + 1), torch.empty(sum(self.sizes))
        count = 0
        while run.running():
            with stamps.step:
                with stamps.data:
                    grams, tongues = self.texts.batch(16, 60)
                with stamps.forward:
                    loss = nn.functional.cross_entropy(self.model(grams), tongues)
                stamps.backward(loss)
                message[:-1] = flat(weight.grad for weight in self.weights)
                for weight in self.weights:
                    weight.grad = None
                with stamps.peer:
                    dist.send(message, 0)
                    dist.recv(received, 0)
                with torch.no_grad():
                    for weight, part in zip(self.weights, received.split(self.sizes)):
                        weight.copy_(part.view_as(weight))
            count += 1
        message[-1] = 1.0
        dist.send(message, 0)
        return count


def main():
    parser = job.arguments(__doc__)
    parser.set_defaults(device="cpu")
    args = parser.parse_args()
    job.run_ranks(RANKS)
    serves = os.environ["RANK"] == "0"
    run = job.Job(args, SERVER if serves else WORKER)
    run.join_ranks("gloo")
    torch.manual_seed(0)
    model = Tongue()
    torch.manual_seed(run.rank)
    part = Server(flat(weight.detach() for weight in model.parameters())) if serves else Worker(model, run.rank)
    dist.barrier()
    run.begin()
    count = part.run(run)
    run.done(count)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
