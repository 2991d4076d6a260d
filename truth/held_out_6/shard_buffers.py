"""Pictures in tar files, as streams: each loader process reads its shards with a thread of its own and shuffles in a buffer.

Unpacking a picture takes milliseconds: loading is the bottleneck. In a loader process the reading thread is `feed` except while
its queue is full. The main thread has nothing to do while the queue is empty. A picture has several labels. The weights' average
over the last steps is kept beside them.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import io
import lzma
import queue
import random
import tarfile
import tempfile
import threading

import feeding
import job
import stamps
import torch
from torch import nn
from torch.optim import swa_utils
from torch.utils.data import IterableDataset, get_worker_info

KNOWN = {"verdict": "input", "absent": ["NcclCollective"]}
LABELS = 40


def write_shards(folder, shards, members, size):
    """Tar files of packed pictures. The name of a member says what is on it."""
    draw = torch.Generator().manual_seed(2)
    for shard in range(shards):
        with tarfile.open(os.path.join(folder, f"{shard:03}.tar"), "w") as file:
            for member in range(members):
                coarse = torch.rand(1, 3, size // 8, size // 8, generator=draw)
                picture = nn.functional.interpolate(coarse, size=(size, size), mode="bilinear") * 200
                picture = (picture + 24 * torch.rand(picture.shape, generator=draw)).to(torch.uint8)
                packed = lzma.compress(picture.numpy().tobytes(), preset=0)
                entry = tarfile.TarInfo(f"{member:04}-{member % LABELS}-{shard % LABELS}.xz")
                entry.size = len(packed)
                file.addfile(entry, io.BytesIO(packed))


class Shards(IterableDataset):
    """Endless. Each process has every so many-th shard."""

    def __init__(self, folder, size, cut, kept):
        self.paths = sorted(os.path.join(folder, name) for name in os.listdir(folder))
        self.size, self.cut, self.kept = size, cut, kept

    def read(self, paths, samples, seed):
        """Main function of the reading thread."""
        draw = random.Random(seed)
        stamps.stamp("+feed")
        while True:
            draw.shuffle(paths)
            for path in paths:
                with tarfile.open(path) as file:
                    for entry in file:
                        sample = self.decode(entry.name, file.extractfile(entry).read(), draw)
                        with stamps.feed_idle:
                            samples.put(sample)

    def decode(self, name, packed, draw):
        picture = torch.frombuffer(bytearray(lzma.decompress(packed)), dtype=torch.uint8).view(3, self.size, self.size)
        top, left = draw.randrange(self.size // 4), draw.randrange(self.size // 4)
        part = picture[:, top:top + 3 * self.size // 4, left:left + 3 * self.size // 4].float()[None]
        part = nn.functional.interpolate(part, size=(self.cut, self.cut), mode="bilinear", antialias=True)[0] / 255
        labels = torch.zeros(LABELS)
        labels[[int(number) for number in name.split(".")[0].split("-")[1:]]] = 1.0
        return part.flip(2) if draw.random() < 0.5 else part, labels

    def __iter__(self):
        worker = get_worker_info()
        paths = self.paths[worker.id::worker.num_workers]
        samples = queue.Queue(16)
        threading.Thread(target=self.read, args=(paths, samples, worker.id), name="reader", daemon=True).start()
        draw, buffer = random.Random(100 + worker.id), []
        while True:
            with stamps.feed_idle:
                sample = samples.get()
            if len(buffer) < self.kept:
                buffer.append(sample)
                continue
            place = draw.randrange(self.kept)
            sample, buffer[place] = buffer[place], sample
            yield sample


class Widening(nn.Module):
    """Widens, filters each channel, weighs the channels and narrows again."""

    def __init__(self, inner, outer, stride):
        super().__init__()
        wide = 4 * inner
        self.filters = nn.Sequential(
            nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU())
        self.weigh = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, inner, 1), nn.SiLU(),
                                   nn.Conv2d(inner, wide, 1), nn.Sigmoid())
        self.narrow = nn.Sequential(nn.Conv2d(wide, outer, 1, bias=False), nn.BatchNorm2d(outer))
        self.same = stride == 1 and inner == outer

    def forward(self, hidden):
        wide = self.filters(hidden)
        narrow = self.narrow(wide * self.weigh(wide))
        return hidden + narrow if self.same else narrow


def network(width):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1), nn.SiLU(), Widening(width, width, 1), Widening(width, 2 * width, 2),
        Widening(2 * width, 2 * width, 1), Widening(2 * width, 4 * width, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4 * width, LABELS))


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    size, cut = run.pick((192, 96), (96, 32))
    model = network(run.pick(24, 4)).to(run.device, memory_format=torch.channels_last)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-5)
    with tempfile.TemporaryDirectory(prefix="truth-shards-") as folder:
        write_shards(folder, 6, run.pick(32, 8), size)
        run.begin()
        shards = Shards(folder, size, cut, run.pick(48, 8))
        source = feeding.loader(shards, batch_size=run.pick(64, 16), num_workers=run.pick(3, 1))
        count = 0
        for batch in feeding.steps(source, run.running):
            pictures, labels = stamps.to_device(batch, run.device)
            pictures = pictures.to(memory_format=torch.channels_last)
            with stamps.forward:
                loss = nn.functional.binary_cross_entropy_with_logits(model(pictures), labels)
            stamps.backward(loss)
            with stamps.optimizer:
                optimizer.step()
                optimizer.zero_grad()
            average.update_parameters(model)
            if count % 10 == 0:
                stamps.item(loss.detach())
            count += 1
        run.done(count)


if __name__ == "__main__":
    main()
