"""Speech recognition on clips of very different length: a sampler makes batches of clips of like length; input-bound.

The dataset gets the numbers of a whole batch at once, so the loader collates nothing. Three persistent processes unpack the
clips, change their speed, add an echo and compute spectra: a tenth of a second and more per batch. Batches have an equal number
of samples, not of clips. The model trains with a loss over all alignments, in half precision with a scaler.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import random
import zlib

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

KNOWN = {"verdict": "input", "absent": ["NcclCollective"]}
RATE, BANDS, LETTERS = 16_000, 80, 29


class Clips(Dataset):
    """Packed sounds with their texts. A batch is one element."""

    def __init__(self, lengths):
        draw = torch.Generator().manual_seed(5)
        self.lengths = lengths
        noise = torch.randint(-90, 90, (max(lengths),), generator=draw).cumsum(0) % 4000
        sound = noise.to(torch.int16).numpy().tobytes()
        # Clips of equal length share their bytes.
        self.packed = {length: zlib.compress(sound[:2 * length], 6) for length in set(lengths)}
        self.texts = [torch.randint(1, LETTERS, (max(2, length // 3200),), generator=draw) for length in lengths]
        self.window = torch.hann_window(400)
        self.echo = torch.randn(RATE // 2, generator=draw) * torch.linspace(1, 0, RATE // 2).pow(8)
        self.bands = torch.rand(BANDS, 201, generator=draw).softmax(1)

    def __len__(self):
        return len(self.lengths)

    def features(self, place):
        sound = torch.frombuffer(bytearray(zlib.decompress(self.packed[self.lengths[place]])), dtype=torch.int16)
        speed = 0.9 + 0.1 * (place % 3)
        sound = nn.functional.interpolate(sound[None, None].float(), scale_factor=speed, mode="linear")[0, 0]
        size = len(sound) + len(self.echo)
        sound = torch.fft.irfft(torch.fft.rfft(sound, size) * torch.fft.rfft(self.echo, size), size)[:len(sound)]
        spectrum = torch.stft(sound, 400, 160, window=self.window, return_complex=True).abs().square()
        return torch.log1p(self.bands @ spectrum).T

    def __getitem__(self, places):
        features = [self.features(place) for place in places]
        frames = torch.tensor([len(rows) for rows in features])
        texts = [self.texts[place] for place in places]
        return (nn.utils.rnn.pad_sequence(features, batch_first=True), frames,
                nn.utils.rnn.pad_sequence(texts, batch_first=True), torch.tensor([len(text) for text in texts]))


class LengthSampler(Sampler):
    """Lists of clips of like length that have at most so many samples with their padding."""

    def __init__(self, lengths, samples):
        self.lengths, self.samples = lengths, samples
        self.draw = random.Random(7)
        self.count = len(self.lists())

    def lists(self):
        order = sorted(range(len(self.lengths)), key=lambda place: self.lengths[place] + self.draw.random() * RATE / 4)
        lists, longest = [[]], 0
        for place in order:
            longest = max(longest, self.lengths[place])
            if lists[-1] and longest * (len(lists[-1]) + 1) > self.samples:
                lists.append([])
                longest = self.lengths[place]
            lists[-1].append(place)
        self.draw.shuffle(lists)
        return lists

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(self.lists()[:self.count])


class Mixer(nn.Module):
    """Half a transformer layer, half a convolution along time."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2, self.norm_3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.split, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.spread, self.along = nn.Linear(width, 2 * width), nn.Conv1d(width, width, 15, padding=7, groups=width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, hidden, there):
        query, key, value = self.split(self.norm_1(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=there[:, None, None])
        hidden = hidden + self.join(mixed.transpose(1, 2).flatten(2))
        gated = nn.functional.glu(self.spread(self.norm_2(hidden)), -1) * there[..., None]
        hidden = hidden + nn.functional.silu(self.along(gated.transpose(1, 2)).transpose(1, 2))
        return hidden + self.wide(self.norm_3(hidden))


class Listener(nn.Module):
    def __init__(self, width, depth, heads):
        super().__init__()
        self.shorten = nn.Sequential(nn.Conv1d(BANDS, width, 5, stride=2, padding=2), nn.GELU(),
                                     nn.Conv1d(width, width, 5, stride=2, padding=2), nn.GELU())
        self.layers = nn.ModuleList(Mixer(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, LETTERS)

    def forward(self, features, frames):
        """Scores [time, clip, letter]. A quarter of the frames are left."""
        hidden = self.shorten(features.transpose(1, 2)).transpose(1, 2)
        there = torch.arange(hidden.shape[1], device=hidden.device) < frames[:, None]
        for layer in self.layers:
            hidden = layer(hidden, there)
        return self.head(hidden).float().log_softmax(-1).transpose(0, 1)


class StampedScaler(torch.amp.GradScaler):
    """Looking at the infinities waits for the GPU."""

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        found = sum(stamps.item(value) for value in optimizer_state["found_inf_per_device"].values())
        return None if found else optimizer.step(*args, **kwargs)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    draw = random.Random(3)
    shortest, longest, samples = run.pick((2 * RATE, 12 * RATE, 320 * RATE), (RATE, 3 * RATE, 24 * RATE))
    lengths = [draw.randint(shortest // 4000, longest // 4000) * 4000 for _ in range(run.pick(1600, 160))]
    model = Listener(run.pick(256, 8), run.pick(4, 1), run.pick(4, 2)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    scaler = StampedScaler(run.device.type)
    run.begin()
    source = feeding.loader(Clips(lengths), batch_size=None, sampler=LengthSampler(lengths, samples), num_workers=run.pick(3, 1),
                            persistent_workers=True, pin_memory=run.pick(True, False))
    count = 0
    for features, frames, texts, letters in feeding.steps(source, run.running):
        shortened = (frames + 3) // 4
        features, texts, places = stamps.to_device([features, texts, frames], run.device)
        places = (places + 3) // 4
        with stamps.forward:
            with torch.autocast(run.device.type, torch.float16, enabled=run.pick(True, False)):
                scores = model(features, places)
            loss = nn.functional.ctc_loss(scores, texts, shortened, letters, zero_infinity=True)
        stamps.backward(scaler.scale(loss))
        with stamps.optimizer:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
