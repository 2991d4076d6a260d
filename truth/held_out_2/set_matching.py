"""Object detection with a set loss: queries and objects are matched on the CPU, in Python, between forward and loss.

The matching is `host` and the bottleneck. Adam without foreach has two groups of weights, each with a schedule of its own.
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
CLASSES = 20


class Crowds(Dataset):
    """An image with some boxes."""

    def __init__(self, size, boxes):
        self.size, self.boxes = size, boxes

    def __len__(self):
        return 1 << 16

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(3, self.size, self.size, generator=generator)
        boxes = torch.rand(self.boxes, 4, generator=generator)
        return {"image": image, "boxes": boxes, "classes": torch.randint(CLASSES, (self.boxes,), generator=generator)}


class Detector(nn.Module):
    def __init__(self, width, queries):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, width, 7, 4, 3), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(),
                                      nn.Conv2d(width, width, 3, 2, 1), nn.ReLU())
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True), 3)
        self.box, self.kind = nn.Linear(width, 4), nn.Linear(width, CLASSES + 1)

    def forward(self, image):
        memory = self.backbone(image).flatten(2).transpose(1, 2)
        hidden = self.decoder(self.queries.expand(len(image), -1, -1), memory)
        return self.box(hidden).sigmoid(), self.kind(hidden)


def assign(costs):
    """The column of each row, with the least sum of costs; Hungarian method, for no more rows than columns."""
    rows, columns = len(costs), len(costs[0])
    of_row, of_column, owner, came_from = [0.0] * (rows + 1), [0.0] * (columns + 1), [0] * (columns + 1), [0] * (columns + 1)
    for row in range(1, rows + 1):
        owner[0], at = row, 0
        least, used = [float("inf")] * (columns + 1), [False] * (columns + 1)
        while owner[at]:
            used[at] = True
            delta, following, line = float("inf"), 0, costs[owner[at] - 1]
            for column in range(1, columns + 1):
                if used[column]:
                    continue
                reduced = line[column - 1] - of_row[owner[at]] - of_column[column]
                if reduced < least[column]:
                    least[column], came_from[column] = reduced, at
                if least[column] < delta:
                    delta, following = least[column], column
            for column in range(columns + 1):
                if used[column]:
                    of_row[owner[column]] += delta
                    of_column[column] -= delta
                else:
                    least[column] -= delta
            at = following
        while at:
            owner[at], at = owner[came_from[at]], came_from[at]
    found = {owner[column]: column - 1 for column in range(1, columns + 1) if owner[column]}
    return [found[row] for row in range(1, rows + 1)]


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    size, boxes, queries, rows = run.pick((96, 30, 100, 48), (32, 3, 6, 2))
    model = Detector(run.pick(128, 16), queries).to(run.device)
    backbone = list(model.backbone.parameters())
    rest = [weight for name, weight in model.named_parameters() if not name.startswith("backbone")]
    optimizer = torch.optim.Adam([{"params": backbone, "lr": 1e-5}, {"params": rest, "lr": 1e-4}], foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda step: min(1.0, step / 200), lambda step: 0.999 ** step])
    run.begin()
    source = feeding.loader(Crowds(size, boxes), batch_size=rows, shuffle=True, num_workers=3, drop_last=True)
    count = 0
    for batch in feeding.steps(source, run.running):
        image, wanted, classes = stamps.to_device([batch["image"], batch["boxes"], batch["classes"]], run.device)
        with stamps.forward:
            found, kinds = model(image)
            with torch.no_grad():
                costs = (wanted[:, :, None] - found[:, None]).abs().sum(-1)
                costs -= kinds.softmax(-1).transpose(1, 2).gather(1, classes[:, :, None].expand(-1, -1, queries))
        with stamps.gpu if run.device.type == "cuda" else stamps.host:
            costs = costs.cpu()
        with stamps.host:
            matched = torch.tensor([assign(table) for table in costs.tolist()])
        (matched,) = stamps.to_device([matched], run.device)
        with stamps.forward:
            close = found.gather(1, matched[:, :, None].expand(-1, -1, 4))
            labels = torch.full((rows, queries), CLASSES, device=run.device).scatter(1, matched, classes)
            loss = nn.functional.cross_entropy(kinds.flatten(0, 1), labels.flatten())
            loss = loss + 5 * nn.functional.l1_loss(close, wanted)
        with stamps.optimizer:
            optimizer.zero_grad()
        stamps.backward(loss)
        with stamps.optimizer:
            optimizer.step()
        with stamps.host:
            schedule.step()
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
