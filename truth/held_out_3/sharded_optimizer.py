"""Three ranks with DistributedDataParallel and a ZeroRedundancyOptimizer: each rank updates a third of the weights.

Then each rank broadcasts its third, inside `optimizer.step()`. That wait is `peer`, and so is the all-reduce of the
gradients. Both go over gloo through host memory: communication is the bottleneck.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import feeding
import job
import stamps
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import Dataset

KNOWN = {"verdict": "communication", "absent": []}


class Cells(Dataset):
    """A vector of gene activity and its kind."""

    def __init__(self, genes):
        self.activity = torch.rand(256, genes)

    def __len__(self):
        return 1 << 18

    def __getitem__(self, index):
        return self.activity[index % 256], index % 12


class Sharded(ZeroRedundancyOptimizer):
    """Labels the broadcasts of a step."""

    def _sync_params(self):
        with stamps.peer:
            super()._sync_params()


def network(genes, width):
    layers = [nn.Linear(genes, width), nn.ELU(), nn.Linear(width, width), nn.ELU(), nn.Linear(width, width), nn.ELU()]
    return nn.Sequential(*layers, nn.Linear(width, 12))


def main():
    args = job.arguments(__doc__).parse_args()
    job.run_ranks(3)
    run = job.Job(args, KNOWN)
    run.join_ranks("gloo")
    genes, width = run.pick((2048, 2048), (128, 256))
    model = nn.parallel.DistributedDataParallel(network(genes, width).to(run.device), bucket_cap_mb=20)
    optimizer = Sharded(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-4)
    run.begin()
    source = feeding.loader(Cells(genes), batch_size=24, num_workers=1, drop_last=True)
    supply = feeding.endless(source, lambda: True)
    count = 0
    going = True
    while going:
        with stamps.step:
            activity, kinds = stamps.to_device(next(supply), run.device)
            with stamps.forward:
                loss = nn.functional.cross_entropy(model(activity), kinds)
            stamps.backward(loss, peers=True)
            with stamps.optimizer:
                optimizer.step()
                optimizer.zero_grad()
            count += 1
            going = run.agree_to_run(count, every=4)
    supply.close()
    run.done(count)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
