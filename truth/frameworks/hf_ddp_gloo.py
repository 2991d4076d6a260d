"""A BERT classifier on two ranks of accelerate over gloo: the gradients' way through host memory is the bottleneck."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import feeding
import hooks
import job
import stamps
import torch

job.require("transformers", "accelerate")
os.environ["HF_HUB_OFFLINE"] = "1"

import accelerate
import transformers
from models import Tokens

KNOWN = {"verdict": "communication", "absent": []}


def main():
    args = job.arguments(__doc__).parse_args()
    job.run_ranks(2)
    run = job.Job(args, KNOWN)
    run.join_ranks("gloo")
    os.environ.update(LOCAL_WORLD_SIZE=str(run.world), MASTER_ADDR="127.0.0.1")
    accelerator = accelerate.Accelerator(
        cpu=not run.on_gpu, kwargs_handlers=[accelerate.InitProcessGroupKwargs(backend="gloo")])
    length, words, width = run.pick((128, 30_000, 1024), (16, 2000, 64))
    model = transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=words, hidden_size=width, num_hidden_layers=run.pick(4, 1), num_attention_heads=run.pick(16, 2),
        intermediate_size=4 * width, max_position_embeddings=length, num_labels=8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    source = feeding.loader(Tokens(length, words, 1 << 16), run.variant, KNOWN, batch_size=run.pick(8, 4), num_workers=1,
                            drop_last=True)
    model, optimizer, source = accelerator.prepare(model, optimizer, source)
    # Before each pass the ranks agree on the buffers of the model.
    model._sync_buffers = hooks.labelled(model._sync_buffers, stamps.peer)
    hooks.label_loaders()
    hooks.label_gpu_waits()
    run.begin()
    supply = iter(source)
    count = 0
    going = True
    while going:
        with stamps.step:
            tokens, following = next(supply)
            with stamps.forward:
                loss = model(input_ids=tokens, labels=following[:, -1] % 8).loss
            with stamps.backward_of(loss, peers=True):
                accelerator.backward(loss)
            with stamps.optimizer:
                optimizer.step()
                optimizer.zero_grad()
            stamps.item(loss.detach())
            count += 1
            going = run.agree_to_run(count, every=4)
    supply.close()
    run.done(count)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
