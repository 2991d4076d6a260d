"""DataLoaders whose workers stamp `feed` and `feed_idle`, and iterators that stamp `data`."""

import atexit
from multiprocessing import queues

import stamps
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import pin_memory
from torch.utils.data._utils.collate import default_collate, default_convert

# A loader process enters `feed` with the first sample of a batch and leaves it when the batch is collated.
_is_worker = False
_at_work = False


def _work():
    global _at_work
    if _is_worker and not _at_work:
        _at_work = True
        stamps.stamp("-")
        stamps.stamp("+feed")


def _rest():
    global _at_work
    if _at_work:
        _at_work = False
        stamps.stamp("-")
        stamps.stamp("+feed_idle")


class StampedDataset(Dataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        _work()
        return self.dataset[index]


class StampedStream(IterableDataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        samples = iter(self.dataset)
        while True:
            _work()
            try:
                sample = next(samples)
            except StopIteration:
                return
            yield sample


class StampedCollate:
    def __init__(self, collate):
        self.collate = collate

    def __call__(self, samples):
        _work()
        batch = self.collate(samples)
        _rest()
        return batch


class StartWorker:
    """Runs first in every loader process."""

    def __init__(self, variant, known, then):
        self.variant, self.known, self.then = variant, known, then

    def __call__(self, worker):
        global _is_worker
        _is_worker = True
        stamps.begin_loader(self.variant, self.known)
        stamps.stamp("+feed_idle")
        queues._ForkingPickler = StampedPickler
        if self.then:
            self.then(worker)


class StampedPickler(queues._ForkingPickler):
    """A loader's queue thread moves each batch into shared memory here: work for the loop as well."""

    @classmethod
    def dumps(cls, obj, protocol=None):
        with stamps.feed:
            return _original_pickler.dumps(obj, protocol)


_original_pickler = queues._ForkingPickler
_original_pin = pin_memory.pin_memory


def _pin(*args, **kwargs):
    """Pinning runs in a thread of the training process."""
    with stamps.feed:
        return _original_pin(*args, **kwargs)


def loader(dataset, variant=None, known=None, **options):
    """A DataLoader, with stamps if they are on. Takes the options of torch.utils.data.DataLoader."""
    if not stamps.ON:
        return DataLoader(dataset, **options)
    collates = options.get("batch_size", 1) is not None or "batch_sampler" in options
    collate = options.pop("collate_fn", None) or (default_collate if collates else default_convert)
    stamped = StampedStream if isinstance(dataset, IterableDataset) else StampedDataset
    if options.get("num_workers"):
        then = options.pop("worker_init_fn", None)
        options["worker_init_fn"] = StartWorker(variant or stamps.log.variant, known or stamps.log.known, then)
    if options.get("pin_memory") and pin_memory.pin_memory is _original_pin:
        pin_memory.pin_memory = _pin
    return DataLoader(stamped(dataset), collate_fn=StampedCollate(collate), **options)


def batches(source):
    """Iterate over a loader once. Everything between asking it and having a batch is `data`."""
    with stamps.data:
        iterator = iter(source)
    try:
        while True:
            with stamps.data:
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch
    finally:
        close(source, iterator)


def close(source, iterator):
    """End the loader processes now, or at exit where the next epoch uses them again, so that they write their stamps."""
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if not shut_down or not stamps.ON:
        return
    if getattr(source, "persistent_workers", False):
        atexit.register(shut_down)
    else:
        shut_down()


def endless(source, running):
    """Iterate over epoch after epoch while `running()`."""
    while running():
        for batch in batches(source):
            yield batch
            if not running():
                return


def steps_of_epoch(source):
    """Iterate over one epoch, with every batch and what the loop does with it in one step."""
    supply = batches(source)
    try:
        while True:
            with stamps.step:
                batch = next(supply, None)
                if batch is None:
                    return
                yield batch
    finally:
        supply.close()


def steps(source, running):
    """Like `endless`, with every batch and what the loop does with it in one step."""
    supply = endless(source, running)
    try:
        while running():
            with stamps.step:
                batch = next(supply, None)
                if batch is None:
                    return
                yield batch
    finally:
        supply.close()
