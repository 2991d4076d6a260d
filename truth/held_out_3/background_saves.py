"""A vision transformer in bf16 with mixup on the GPU, saved by a thread while training goes on; the GPU is the bottleneck.

For each save the training thread copies the weights to pinned memory: that is `checkpoint`, and its wait for the copy is
`gpu`. Then a thread writes the file, which is `checkpoint` of that thread. The images stay on the device.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import tempfile
import threading

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "gpu", "absent": ["DataLoading", "NcclCollective"]}
CLASSES = 200
EVERY = 16


class VisionTransformer(nn.Module):
    def __init__(self, width, depth, heads, size, patch):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.place = nn.Parameter(torch.randn(1, (size // patch) ** 2, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
            for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images):
        hidden = self.patches(images).flatten(2).transpose(1, 2) + self.place
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.mean(1))


class Saver:
    """Saves a model in a thread. A save is left out while the last one still runs."""

    def __init__(self, model, device, path):
        self.weights, self.device, self.path = model.state_dict(), device, path
        self.copies = {name: torch.empty_like(weight, device="cpu", pin_memory=device.type == "cuda")
                       for name, weight in self.weights.items()}
        self.thread = None

    def write(self):
        with stamps.checkpoint:
            torch.save(self.copies, self.path + ".part")
            os.replace(self.path + ".part", self.path)

    def save(self):
        """Copy the weights and start to write them."""
        if self.thread is not None and self.thread.is_alive():
            return
        with stamps.checkpoint:
            for name, weight in self.weights.items():
                self.copies[name].copy_(weight, non_blocking=True)
            stamps.synchronize(self.device)
            self.thread = threading.Thread(target=self.write, name="saver")
            self.thread.start()

    def finish(self):
        if self.thread is not None:
            self.thread.join()


def mix(images, classes):
    """Blend each image with another one. Returns the images and the share of each class in them."""
    share = torch.rand(len(images), device=images.device).mul_(0.5).add_(0.5)
    blended = torch.lerp(images.flip(0), images, share[:, None, None, None])
    wanted = (classes[:, None] == torch.arange(CLASSES, device=images.device)).float()
    return blended, torch.lerp(wanted.flip(0), wanted, share[:, None])


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    size, patch, rows, stored = run.pick((224, 16, 384, 2048), (16, 8, 4, 32))
    model = VisionTransformer(run.pick(768, 16), run.pick(8, 2), run.pick(12, 2), size, patch).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05, fused=run.device.type == "cuda")
    images = torch.randint(256, (stored, 3, size, size), dtype=torch.uint8, device=run.device)
    classes = torch.randint(CLASSES, (stored,), device=run.device)
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(model, run.device, folder + "/weights.pt")
        run.begin()
        while run.running():
            with stamps.step:
                picked = torch.randint(stored, (rows,), device=run.device)
                batch, wanted = mix(images[picked].float().div_(255), classes[picked])
                with stamps.forward:
                    with job.autocast(run.device):
                        guess = model(batch)
                    loss = nn.functional.cross_entropy(guess.float(), wanted)
                stamps.backward(loss)
                with stamps.optimizer:
                    optimizer.step()
                    optimizer.zero_grad()
                stamps.item(loss.detach())
            count += 1
            if count % EVERY == 0:
                saver.save()
        run.done(count)
        saver.finish()


if __name__ == "__main__":
    main()
