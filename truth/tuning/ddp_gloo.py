"""DistributedDataParallel over gloo, ranks on one device: the all-reduce through host memory is the bottleneck."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import feeding
import job
import stamps
import torch
from models import Mlp, Vectors

KNOWN = {"verdict": "communication", "absent": []}


def main():
    parser = job.arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="processes [2]")
    args = parser.parse_args()
    job.run_ranks(args.ranks)
    run = job.Job(args, KNOWN)
    run.join_ranks("gloo")
    width = run.pick(2048, 256)
    model = torch.nn.parallel.DistributedDataParallel(Mlp(width, run.pick(8, 4)).to(run.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.begin()
    source = feeding.loader(Vectors(width), batch_size=32, num_workers=1, drop_last=True)
    supply = feeding.endless(source, lambda: True)
    count = 0
    going = True
    while going:
        with stamps.step:
            inputs, targets = stamps.to_device(next(supply), run.device)
            with stamps.forward:
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            stamps.backward(loss, peers=True)
            with stamps.optimizer:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            stamps.item(loss.detach())
            count += 1
            going = run.agree_to_run(count)
    supply.close()
    run.done(count)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
