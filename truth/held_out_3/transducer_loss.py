"""Speech recognition with a transducer loss in plain PyTorch: a sum over all alignments, diagonal by diagonal; host-bound.

Each diagonal takes a few tiny kernels, and so does its backward pass. A step has about 60 diagonals. Clips are padded to
equal length.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.data import Dataset

KNOWN = {"verdict": "host", "absent": ["NcclCollective"]}
BANDS, SIGNS = 40, 32
IMPOSSIBLE = -1e4


class Speech(Dataset):
    """Frames of a clip and the signs that were spoken."""

    def __init__(self, frames, signs):
        self.clips = torch.randn(128, frames, BANDS)
        self.texts = torch.randint(1, SIGNS, (128, signs))

    def __len__(self):
        return 1 << 16

    def __getitem__(self, index):
        frames = self.clips.shape[1] - index % 8
        return self.clips[index % 128, :frames], self.texts[index % 128]


def pad(rows):
    clips, texts = zip(*rows)
    return nn.utils.rnn.pad_sequence(clips, batch_first=True), torch.stack(texts)


class Transducer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.listen = nn.Sequential(nn.Conv1d(BANDS, width, 3, padding=1), nn.ReLU(), nn.Conv1d(width, width, 3, padding=1))
        self.embed = nn.Embedding(SIGNS, width)
        self.write = nn.GRU(width, width, batch_first=True)
        self.join = nn.Linear(width, SIGNS)

    def forward(self, clips, texts):
        """Log probabilities of the next sign, for each frame and each number of signs written before."""
        heard = self.listen(clips.transpose(1, 2)).transpose(1, 2)
        written, _ = self.write(self.embed(nn.functional.pad(texts, (1, 0))))
        return self.join(torch.tanh(heard[:, :, None] + written[:, None])).log_softmax(-1)


def transducer_loss(scores, texts):
    """Minus the log of the sum over all alignments. Sign 0 means: go to the next frame."""
    rows, frames, places, _ = scores.shape
    blank = scores[..., 0]
    emit = scores[:, :, :-1].gather(3, texts[:, None, :, None].expand(-1, frames, -1, 1)).squeeze(3)
    emit = nn.functional.pad(emit, (0, 1), value=IMPOSSIBLE)
    # Row d of a skewed table is a diagonal: frame d - u at place u.
    at = torch.arange(frames + places - 1, device=scores.device)[:, None] - torch.arange(places, device=scores.device)
    inside = (at >= 0) & (at < frames)
    at = at.clamp(0, frames - 1)[None].expand(rows, -1, -1)
    blank = blank.gather(1, at).masked_fill(~inside, IMPOSSIBLE)
    emit = emit.gather(1, at).masked_fill(~inside, IMPOSSIBLE)
    total = torch.full((rows, places), IMPOSSIBLE, device=scores.device)
    total[:, 0] = 0.0
    for stay, advance in zip(blank[:, :-1].unbind(1), emit[:, :-1].unbind(1)):
        arrived = nn.functional.pad((total + advance)[:, :-1], (1, 0), value=IMPOSSIBLE)
        total = torch.logaddexp(total + stay, arrived)
    return -(total[:, -1] + scores[:, -1, -1, 0]).mean()


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    model = Transducer(run.pick(96, 8)).to(run.device)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    run.begin()
    source = feeding.loader(Speech(*run.pick((48, 14), (10, 4))), batch_size=8, shuffle=True, num_workers=2, collate_fn=pad,
                            drop_last=True)
    ahead = stamps.RunAhead(run.device)
    count = 0
    for batch in feeding.steps(source, run.running):
        clips, texts = stamps.to_device(batch, run.device)
        with stamps.forward:
            loss = transducer_loss(model(clips, texts), texts)
        stamps.backward(loss)
        with stamps.optimizer:
            nn.utils.clip_grad_norm_(model.parameters(), 5.0, foreach=False)
            optimizer.step()
            optimizer.zero_grad()
        if count % 25 == 0:
            stamps.item(loss.detach())
        ahead.step()
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
