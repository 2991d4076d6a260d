"""A Trainer-style loop: a class with callbacks owns the loop, logs every 10 steps, evaluates and saves now and then.

Graph of the loop: fit -> epoch -> training_step; the learning rate is scheduled, the loss is read only when it is logged.
A small 1-D conv net: host-bound.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import io

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.data import Dataset

KNOWN = {"verdict": "host", "absent": ["NcclCollective"]}


class Waves(Dataset):
    def __init__(self, count):
        self.count = count
        self.time = torch.linspace(0, 6, 128)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"wave": torch.sin(self.time * (1 + index % 7)).unsqueeze(0), "label": index % 7}


class Callback:
    def on_step_end(self, trainer):
        pass

    def on_epoch_end(self, trainer):
        pass


class Logger(Callback):
    def on_step_end(self, trainer):
        if trainer.global_step % 10 == 0:
            trainer.history.append(stamps.item(trainer.loss))


class Evaluate(Callback):
    def on_epoch_end(self, trainer):
        with stamps.evaluation, torch.no_grad():
            trainer.model.eval()
            right = 0
            for batch in feeding.batches(trainer.validation):
                wave, target = stamps.to_device([batch["wave"], batch["label"]], trainer.run.device)
                with stamps.forward:
                    right = right + (trainer.model(wave).argmax(1) == target).sum()
            stamps.item(right)
            trainer.model.train()


class Save(Callback):
    def on_epoch_end(self, trainer):
        with stamps.checkpoint:
            torch.save(trainer.model.state_dict(), io.BytesIO())


class Trainer:
    def __init__(self, run, model, callbacks):
        self.run, self.model, self.callbacks = run, model, callbacks
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)
        self.global_step, self.history, self.loss = 0, [], None

    def training_step(self, batch):
        wave, target = stamps.to_device([batch["wave"], batch["label"]], self.run.device)
        with stamps.forward:
            return nn.functional.cross_entropy(self.model(wave), target)

    def optimize(self):
        with stamps.optimizer:
            nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        with stamps.host:
            self.scheduler.step()

    def call(self, name):
        for callback in self.callbacks:
            getattr(callback, name)(self)

    def epoch(self):
        for batch in feeding.steps_of_epoch(self.training):
            loss = self.training_step(batch)
            stamps.backward(loss)
            self.loss = loss.detach()
            self.optimize()
            self.global_step += 1
            self.call("on_step_end")
            if not self.run.running():
                return

    def fit(self):
        self.training = feeding.loader(Waves(6400), batch_size=32, shuffle=True, num_workers=2, persistent_workers=True)
        self.validation = feeding.loader(Waves(320), batch_size=64)
        while self.run.running():
            self.epoch()
            self.call("on_epoch_end")


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    channels = run.pick(64, 8)
    layers = [nn.Conv1d(1, channels, 5, padding=2)]
    for _ in range(run.pick(16, 2)):
        layers += [nn.Conv1d(channels, channels, 5, padding=2), nn.GroupNorm(4, channels), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(channels, 7)).to(run.device)
    trainer = Trainer(run, model, [Logger(), Evaluate(), Save()])
    run.begin()
    trainer.fit()
    run.done(trainer.global_step)


if __name__ == "__main__":
    main()
