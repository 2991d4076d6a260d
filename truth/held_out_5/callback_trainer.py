"""Fine-tuning of a language model by a trainer with callbacks, on packed documents; the GPU is the bottleneck.

A step first takes all of its four micro-batches and counts their words, then trains on one after the other. Each loss is
checked for infinities, which waits for the GPU. The rate warms up. Loss and norm are read every fifth step. All in bf16.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import itertools

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.data import Dataset

KNOWN = {"verdict": "gpu", "absent": ["NcclCollective"]}
MICRO_BATCHES = 4
IGNORED = -100


class Documents(Dataset):
    """Documents of many lengths."""

    def __init__(self, words, longest):
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(longest // 8, longest, (512,), generator=generator).tolist()
        self.documents = [torch.randint(words, (length,), generator=generator) for length in lengths]

    def __len__(self):
        return 1 << 17

    def __getitem__(self, index):
        return self.documents[index % 512]


class Pack:
    """Collate function: one document after the other, cut into rows. Places restart with each document."""

    def __init__(self, rows, length):
        self.rows, self.length = rows, length

    def __call__(self, documents):
        size = self.rows * self.length
        words = torch.zeros(size, dtype=torch.long)
        places = torch.zeros(size, dtype=torch.long)
        labels = torch.full((size,), IGNORED)
        start = 0
        for document in documents:
            end = min(start + len(document), size)
            words[start:end] = document[:end - start]
            places[start:end] = torch.arange(end - start)
            # The first word of a document has nothing that it could be guessed from.
            labels[start + 1:end] = document[1:end - start]
            start = end
            if start == size:
                break
        return {name: tensor.view(self.rows, self.length)
                for name, tensor in (("words", words), ("places", places), ("labels", labels))}


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.split, self.join = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden):
        query, key, value = self.split(self.norm_1(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.join(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(nn.functional.silu(self.up(self.norm_2(hidden))))


class Language(nn.Module):
    def __init__(self, words, width, depth, heads, length):
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, words, places, labels, items):
        """The loss, as a share of the whole step's loss."""
        hidden = self.embed(words) + self.place(places)
        for layer in self.layers:
            hidden = layer(hidden)
        guess = self.head(hidden[:, :-1]).flatten(0, 1).float()
        return nn.functional.cross_entropy(guess, labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum") / items


class State:
    def __init__(self):
        self.step, self.log, self.should_log, self.should_evaluate = 0, [], False, False


class Flow:
    """Decides when to log and when to evaluate."""

    def on_step_end(self, trainer, state):
        state.should_log = state.step % 5 == 0
        state.should_evaluate = state.step % 25 == 0

    def on_log(self, trainer, state, values):
        pass


class Memory(Flow):
    """Keeps what was logged."""

    def on_step_end(self, trainer, state):
        pass

    def on_log(self, trainer, state, values):
        state.log.append(dict(values, step=state.step))


class Trainer:
    def __init__(self, run, model, held_back, callbacks):
        self.run, self.model, self.held_back, self.callbacks = run, model, held_back, callbacks
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=run.device.type == "cuda")
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 20) * max(0.0, 1 - step / 50_000))
        self.state, self.total, self.norm = State(), torch.zeros((), device=run.device), None

    def call(self, event, *values):
        for callback in self.callbacks:
            getattr(callback, event)(self, self.state, *values)

    def samples(self, supply):
        """The micro-batches of a step, and how many words they have to guess."""
        batches = list(itertools.islice(supply, MICRO_BATCHES))
        return batches, sum((batch["labels"][:, 1:] != IGNORED).sum().item() for batch in batches)

    def tensors(self, batch):
        return stamps.to_device([batch["words"], batch["places"], batch["labels"]], self.run.device)

    def train_on(self, batch, items):
        tensors = self.tensors(batch)
        with stamps.forward:
            loss = self.model(*tensors, items)
        stamps.backward(loss)
        loss = loss.detach()
        finite = torch.isfinite(loss)
        if stamps.item(finite):
            self.total += loss

    def update(self):
        with stamps.optimizer:
            self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        self.schedule.step()
        with stamps.optimizer:
            self.optimizer.zero_grad()

    def evaluate(self):
        with stamps.evaluation, torch.no_grad():
            self.model.eval()
            losses = []
            for batch in self.held_back:
                tensors = self.tensors(batch)
                with stamps.forward:
                    losses.append(self.model(*tensors, tensors[0].numel()))
            value = stamps.item(torch.stack(losses).mean())
            self.model.train()
        return value

    def after_step(self):
        self.state.step += 1
        self.call("on_step_end")
        if self.state.should_log:
            rate = self.schedule.get_last_lr()[0]
            self.call("on_log", {"loss": stamps.item(self.total), "norm": stamps.item(self.norm), "rate": rate})
            self.total.zero_()
        if self.state.should_evaluate:
            self.call("on_log", {"evaluation": self.evaluate()})

    def fit(self, source):
        supply = feeding.endless(source, self.run.running)
        while self.run.running():
            with stamps.step:
                batches, items = self.samples(supply)
                if len(batches) < MICRO_BATCHES:
                    break
                for batch in batches:
                    self.train_on(batch, items)
                self.update()
                self.after_step()
        supply.close()


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    words, rows, length = run.pick((16_000, 6, 1024), (100, 2, 32))
    model = Language(words, run.pick(2048, 16), run.pick(6, 1), run.pick(16, 2), length)
    model = model.to(run.device, dtype=run.pick(torch.bfloat16, torch.float32))
    documents, pack = Documents(words, length), Pack(rows, length)
    held_back = [pack([documents[row * 16 + index] for index in range(16)]) for row in range(2)]
    trainer = Trainer(run, model, held_back, [Flow(), Memory()])
    run.begin()
    source = feeding.loader(documents, batch_size=2 * rows, shuffle=True, num_workers=2, drop_last=True,
                            collate_fn=pack, pin_memory=run.pick(True, False))
    trainer.fit(source)
    run.done(trainer.state.step)


if __name__ == "__main__":
    main()
