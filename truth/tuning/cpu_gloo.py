"""CPU only: two ranks average their gradients over gloo with DistributedDataParallel; communication is the bottleneck."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import feeding
import job
import stamps
import torch
from models import Tokens, WordBags

KNOWN = {"verdict": "communication", "absent": []}


def main():
    parser = job.arguments(__doc__)
    parser.set_defaults(device="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="processes [2]")
    args = parser.parse_args()
    job.run_ranks(args.ranks)
    run = job.Job(args, KNOWN)
    run.join_ranks("gloo")
    model = torch.nn.parallel.DistributedDataParallel(WordBags(4096, 1024, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.begin()
    source = feeding.loader(Tokens(16, 4096, samples=1 << 20), batch_size=4, num_workers=1, drop_last=True)
    supply = feeding.endless(source, lambda: True)
    count = 0
    going = True
    while going:
        with stamps.step:
            words, following = next(supply)
            with stamps.forward:
                loss = torch.nn.functional.cross_entropy(model(words), following[:, 0] % 16)
            stamps.backward(loss, peers=True)
            with stamps.optimizer:
                optimizer.step()
                optimizer.zero_grad()
            count += 1
            going = run.agree_to_run(count)
    supply.close()
    run.done(count)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
