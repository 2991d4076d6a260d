"""A classifier of pictures trained by Lightning: two loaders inflate large pictures, so the GPU waits for input.

Lightning runs forward, backward and zero_grad in a closure inside optimizer.step. What the closure does besides is `host`.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import tempfile
import zlib

import feeding
import hooks
import job
import stamps
import torch

job.require("pytorch_lightning")

import pytorch_lightning
from models import ConvNet
from torch.utils.data import Dataset

KNOWN = {"verdict": "input", "absent": ["NcclCollective"]}


class Pictures(Dataset):
    """Compressed pictures, about 20 ms each to inflate. Every fourth pixel is used."""

    def __init__(self, size):
        self.size = size
        self.packed = [zlib.compress(torch.randint(32, (size, size, 3), dtype=torch.uint8).numpy().tobytes(), 1)
                       for _ in range(8)]

    def __len__(self):
        return 1 << 16

    def __getitem__(self, index):
        pixels = torch.frombuffer(bytearray(zlib.decompress(self.packed[index % 8])), dtype=torch.uint8)
        picture = pixels.view(self.size, self.size, 3)[::4, ::4]
        return picture.permute(2, 0, 1).float() / 32, index % 100


class Classifier(pytorch_lightning.LightningModule):
    def __init__(self, run, network):
        super().__init__()
        self.run, self.network, self.frame, self.steps = run, network, hooks.Frame(), 0

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def training_step(self, batch, _index):
        pictures, targets = batch
        with stamps.forward:
            loss = torch.nn.functional.cross_entropy(self.network(pictures), targets)
        self.log("loss", loss)
        return loss

    def backward(self, loss):
        stamps.backward(loss)

    def optimizer_step(self, epoch, index, optimizer, closure=None):
        with stamps.optimizer:
            optimizer.step(closure=hooks.labelled(closure, stamps.host))

    def optimizer_zero_grad(self, epoch, index, optimizer):
        with stamps.optimizer:
            optimizer.zero_grad()

    def on_train_start(self):
        self.run.begin()
        self.frame.next()

    def on_train_batch_end(self, *_):
        self.steps += 1
        if not self.run.running():
            self.trainer.should_stop = True
        self.frame.next()


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    model = Classifier(run, ConvNet(run.pick(64, 8), run.pick(4, 1)))
    source = feeding.loader(Pictures(run.pick(1024, 512)), run.variant, KNOWN, batch_size=8, num_workers=2, drop_last=True)
    hooks.label_loaders()
    hooks.label_gpu_waits()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pytorch_lightning.Trainer(
            accelerator=run.pick("gpu", "cpu"), devices=1, max_epochs=-1, precision=run.pick("bf16-mixed", "32-true"),
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder)
        trainer.fit(model, source)
    run.done(model.steps)


if __name__ == "__main__":
    main()
