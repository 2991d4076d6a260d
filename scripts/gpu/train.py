"""A training loop to be observed: a 24-layer MLP in eager PyTorch, alone or under DDP with NCCL.

Writes one line of JSON per event to the file named by --log: the moment each step ended
(CLOCK_MONOTONIC, ns), and on request what PyTorch itself says of its memory.
"""

import argparse
import json
import os
import time

import torch


def build(layers, width):
    parts = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, width), torch.nn.LayerNorm(width), torch.nn.GELU()]
    return torch.nn.Sequential(*parts)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--log", required=True)
    arguments.add_argument("--seconds", type=float, default=30)
    arguments.add_argument("--ddp", action="store_true")
    arguments.add_argument("--layers", type=int, default=24)
    arguments.add_argument("--width", type=int, default=1024)
    arguments.add_argument("--batch", type=int, default=256)
    options = arguments.parse_args()

    torch.manual_seed(1)
    torch.cuda.set_device(0)
    model = build(options.layers, options.width).cuda()
    if options.ddp:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29511")
        torch.distributed.init_process_group("nccl", rank=0, world_size=1)
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=16)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    host = [torch.randn(options.batch, options.width) for _ in range(8)]

    with open(options.log, "w", buffering=1) as log:
        def write(**fields):
            log.write(json.dumps(fields) + "\n")

        end = time.monotonic() + options.seconds
        step = 0
        write(pid=os.getpid())
        while time.monotonic() < end:
            batch = host[step % len(host)].cuda()
            loss = model(batch).square().mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            loss.item()
            step += 1
            write(step=step, at=time.monotonic_ns())
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        write(reserved=torch.cuda.memory_reserved(), steps=step, device_used=total - free)
        time.sleep(4)
    if options.ddp:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
