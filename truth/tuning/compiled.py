"""torch.compile. Cold: compiling is part of the run. Warm (--warm): the run starts after it."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import feeding
import job
import stamps
import torch
from models import Tokens, Transformer

COLD = {"verdict": "compile", "absent": ["NcclCollective"]}
WARM = {"verdict": "gpu", "absent": ["NcclCollective"]}


def main():
    parser = job.arguments(__doc__)
    parser.add_argument("--warm", action="store_true", help="compile before the run starts")
    parser.add_argument("--backend", default="inductor", help="the compiler [inductor]")
    args = parser.parse_args()
    run = job.Job(args, WARM if args.warm else COLD)
    length = run.pick(256, 32)
    model = Transformer(run.pick(1024, 64), run.pick(6, 2), run.pick(16, 2), length=length).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    compiled = torch.compile(model, backend=args.backend)
    dataset = Tokens(length)
    size = run.pick(64, 4)

    def train(batch):
        tokens, targets = stamps.to_device(batch, run.device)
        with stamps.forward, job.autocast(run.device):
            logits = compiled(tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        stamps.backward(loss)
        with stamps.optimizer:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        stamps.item(loss.detach())

    if args.warm:
        for _ in range(4):
            train([torch.stack(rows) for rows in zip(*(dataset[index] for index in range(size)))])
    run.begin()
    stamps.label_compilation()
    source = feeding.loader(dataset, batch_size=size, num_workers=2, pin_memory=run.pick(True, False), drop_last=True)
    count = 0
    for batch in feeding.steps(source, run.running):
        train(batch)
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
