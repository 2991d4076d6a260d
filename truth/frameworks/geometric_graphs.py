"""A graph attention network of PyTorch Geometric on small molecules: many short kernels, so the host is the bottleneck.

Each batch is many small graphs in one large one, put together by PyTorch Geometric's loader in two processes.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import feeding
import hooks
import job
import stamps
import torch

job.require("torch_geometric")

from torch import nn
from torch.utils.data import Dataset
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, global_mean_pool

KNOWN = {"verdict": "host", "absent": ["NcclCollective"]}


class Molecules(Dataset):
    """Random graphs of 10 to 30 nodes with one number each to learn."""

    def __init__(self, features):
        generator = torch.Generator().manual_seed(1)
        self.graphs = [self.graph(int(torch.randint(10, 31, (1,), generator=generator)), features) for _ in range(512)]

    def graph(self, nodes, features):
        loops = torch.arange(nodes).repeat(2, 1)
        bonds = torch.randint(nodes, (2, 2 * nodes))
        return Data(x=torch.randn(nodes, features), edge_index=torch.cat([loops, bonds, bonds.flip(0)], 1), y=torch.randn(1))

    def __len__(self):
        return 1 << 18

    def __getitem__(self, index):
        return self.graphs[index % 512]


class Network(nn.Module):
    def __init__(self, features, width, depth):
        super().__init__()
        self.enter = nn.Linear(features, width)
        # The graphs have their loops already: adding them would wait for the GPU inside an operator.
        self.layers = nn.ModuleList(GATConv(width, width // 4, heads=4, add_self_loops=False) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.leave = nn.Linear(width, 1)

    def forward(self, batch):
        hidden = self.enter(batch.x)
        for layer, norm in zip(self.layers, self.norms):
            hidden = hidden + torch.relu(layer(norm(hidden), batch.edge_index))
        return self.leave(global_mean_pool(hidden, batch.batch, batch.num_graphs)).flatten()


def loader(run, dataset):
    """PyTorch Geometric's loader sets its own collate function, so stamps are put around that one afterwards."""
    source = DataLoader(feeding.StampedDataset(dataset), batch_size=run.pick(32, 4), shuffle=True, num_workers=2,
                        worker_init_fn=feeding.StartWorker(run.variant, run.known, None) if stamps.ON else None)
    source.collate_fn = feeding.StampedCollate(source.collate_fn)
    return source


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    model = Network(16, run.pick(64, 16), run.pick(10, 2)).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    hooks.label_gpu_waits()
    source = loader(run, Molecules(16))
    run.begin()
    count = 0
    for batch in feeding.steps(source, run.running):
        batch = batch.to(run.device)
        with stamps.optimizer:
            optimizer.zero_grad()
        with stamps.forward:
            loss = nn.functional.mse_loss(model(batch), batch.y)
        stamps.backward(loss)
        with stamps.optimizer:
            optimizer.step()
        stamps.item(loss.detach())
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
