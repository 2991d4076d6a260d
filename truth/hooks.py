"""Stamps around what a framework does by itself, where PyTorch offers a place for them.

A script calls these before its run begins. Without ZERNEL_TRUTH they change nothing.
"""

import functools

import stamps


def labelled(function, label):
    """The function, with its calls labelled."""

    @functools.wraps(function)
    def call(*args, **options):
        with label:
            return function(*args, **options)

    return call if stamps.ON else function


class Frame:
    """Steps of a loop that a framework runs: each begins where the last one ends."""

    def __init__(self):
        self.open = False

    def next(self):
        if self.open:
            stamps.step.__exit__()
        stamps.step.__enter__()
        self.open = True


def label_forward(model, before=None):
    """Label each call of the model, from any caller. `before` runs first, outside the label."""

    def enter(*_):
        if before:
            before()
        stamps.stamp("+forward")

    if stamps.ON:
        model.register_forward_pre_hook(enter)
        model.register_forward_hook(lambda *_: stamps.stamp("-"))


def optimizer_class(base):
    """An optimizer whose `step` and `zero_grad` are labelled, from any caller."""

    class Labelled(base):
        def step(self, closure=None):
            with stamps.optimizer:
                return super().step(closure)

        def zero_grad(self, set_to_none=True):
            with stamps.optimizer:
                super().zero_grad(set_to_none=set_to_none)

    Labelled.__name__ = Labelled.__qualname__ = base.__name__
    return Labelled


def label_loaders():
    """Label every wait for a DataLoader and the start of its processes, also where a framework holds the loader."""
    from torch.utils.data import dataloader

    dataloader.DataLoader.__iter__ = labelled(dataloader.DataLoader.__iter__, stamps.data)
    dataloader._BaseDataLoaderIter.__next__ = labelled(dataloader._BaseDataLoaderIter.__next__, stamps.data)


def label_gpu_waits():
    """Label copies between the CPU and the GPU, and values that are read back, wherever a framework asks for them.

    Copies that need not wait, from pinned memory, are `host`. Waits inside PyTorch's operators are not seen.
    """
    import torch

    if not stamps.ON:
        return
    for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__"):
        setattr(torch.Tensor, name, _read(getattr(torch.Tensor, name)))
    torch.Tensor.to = _copy(torch, torch.Tensor.to)


def _read(original):
    @functools.wraps(original)
    def read(tensor, *args, **options):
        if not tensor.is_cuda:
            return original(tensor, *args, **options)
        with stamps.gpu:
            return original(tensor, *args, **options)

    return read


def _copy(torch, original):
    @functools.wraps(original)
    def to(tensor, *args, **options):
        target = options.get("device", args[0] if args else None)
        to_device = isinstance(target, (str, int, torch.device))
        if not to_device or tensor.is_cuda == (torch.device(target).type == "cuda"):
            return original(tensor, *args, **options)
        waits = tensor.is_cuda or not (options.get("non_blocking") and tensor.is_pinned())
        with stamps.gpu if waits else stamps.host:
            return original(tensor, *args, **options)

    return to
