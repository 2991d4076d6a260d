"""A BERT classifier trained by transformers.Trainer in bf16, two micro-batches per step; the GPU is the bottleneck.

All is the Trainer's default where nothing is said here: it checks each loss for infinities, which waits for the GPU, clips
gradients and copies batches from pinned memory, which waits as well. Loss and norm are read every tenth step.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import tempfile

import feeding
import hooks
import job
import stamps
import torch

job.require("transformers", "accelerate")
os.environ["HF_HUB_OFFLINE"] = "1"

import transformers
from torch.utils.data import Dataset

KNOWN = {"verdict": "gpu", "absent": ["NcclCollective"]}


class Texts(Dataset):
    """Random texts with classes, ready in memory."""

    def __init__(self, words, length, classes):
        self.texts = torch.randint(words, (512, length))
        self.classes = classes

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        text = self.texts[index % 512]
        return {"input_ids": text, "attention_mask": torch.ones_like(text), "labels": index % self.classes}


class Trainer(transformers.Trainer):
    def __init__(self, run, **options):
        super().__init__(**options)
        self.truth, self.frame = run, hooks.Frame()
        self.model.zero_grad = hooks.labelled(self.model.zero_grad, stamps.optimizer)
        self.accelerator.clip_grad_norm_ = hooks.labelled(self.accelerator.clip_grad_norm_, stamps.optimizer)
        self.accelerator.backward = self.backward

    def get_train_dataloader(self):
        source = feeding.loader(
            self.train_dataset, self.truth.variant, self.truth.known, batch_size=self.args.train_batch_size, shuffle=True,
            num_workers=2, drop_last=True, collate_fn=self.data_collator, pin_memory=self.truth.pick(True, False))
        return self.accelerator.prepare(source)

    def get_batch_samples(self, *args, **options):
        self.frame.next()
        return super().get_batch_samples(*args, **options)

    def compute_loss(self, *args, **options):
        with stamps.forward:
            return super().compute_loss(*args, **options)

    def backward(self, loss, **options):
        with stamps.backward_of(loss):
            type(self.accelerator).backward(self.accelerator, loss, **options)


class Clock(transformers.TrainerCallback):
    """Begins and ends the run."""

    def __init__(self, run):
        self.run = run

    def on_train_begin(self, args, state, control, **_):
        self.run.begin()

    def on_step_end(self, args, state, control, **_):
        if not self.run.running():
            control.should_training_stop = True
        return control


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    words, length, width = run.pick((8192, 256, 1536), (64, 16, 32))
    model = transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=words, hidden_size=width, num_hidden_layers=run.pick(6, 2), num_attention_heads=run.pick(24, 2),
        intermediate_size=4 * width, max_position_embeddings=length, num_labels=8))
    optimizer = hooks.optimizer_class(torch.optim.AdamW)(model.parameters(), lr=2e-5, fused=run.on_gpu)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    hooks.label_loaders()
    hooks.label_gpu_waits()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=1_000_000, per_device_train_batch_size=run.pick(64, 4),
            gradient_accumulation_steps=2, bf16=run.on_gpu, use_cpu=not run.on_gpu, logging_steps=10, save_strategy="no",
            report_to="none", disable_tqdm=True)
        trainer = Trainer(run, model=model, args=arguments, train_dataset=Texts(words, length, 8),
                          data_collator=transformers.default_data_collator, optimizers=(optimizer, schedule),
                          callbacks=[Clock(run)])
        trainer.train()
    run.done(trainer.state.global_step)


if __name__ == "__main__":
    main()
