"""Inference: GPT-2 of transformers continues prompts with generate(). No training.

A step is one token: it begins where the model is called. generate() reads after each token whether it may stop.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import hooks
import job
import stamps
import torch

job.require("transformers")
os.environ["HF_HUB_OFFLINE"] = "1"

import transformers

KNOWN = {"verdict": "inference", "absent": ["DataLoading", "NcclCollective", "OptimizerStep"]}


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    width, tokens = run.pick((768, 48), (32, 8))
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=run.pick(8192, 64), n_positions=256, n_embd=width, n_layer=run.pick(12, 2), n_head=run.pick(12, 2),
        bos_token_id=None, eos_token_id=None))
    model = model.to(run.device, dtype=run.pick(torch.bfloat16, torch.float32)).eval()
    frame, count = hooks.Frame(), 0
    hooks.label_forward(model, before=frame.next)
    hooks.label_gpu_waits()
    run.begin()
    while run.running():
        prompts = torch.randint(64, (4, 32)).to(run.device)
        texts = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=tokens, do_sample=False,
                               use_cache=True, pad_token_id=0, eos_token_id=None)
        texts.tolist()
        count += tokens
    run.done(count)


if __name__ == "__main__":
    main()
