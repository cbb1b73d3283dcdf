"""The watch report on two implementations of the same training step: the official one, and ours.

    PJRT_DEVICE=CPU python benchmarks/report_official.py

Both train the same network on the same scenes with the same optimizer, for one epoch whose last
batch is not full. The official implementation (benchmarks/official.py) is GPU code, moved to XLA
by its device alone, and gets a ``torch_xla.sync()`` after each step. Ours is
``mshnet.training.step``, whose loader drops the last images that do not fill a batch. Each report
ends with what to change. Nothing is timed against the other: seconds are those of this machine.

Needs the package with its tools: ``pip install -e .``
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence

import torch
from official import OfficialMSHNet, official_step  # beside this file
from torch.optim import Adagrad
from torch.utils.data import DataLoader

from mshnet import MSHNet, RequestError, SLSIoULoss
from mshnet.data.layout import DataFolder
from mshnet.data.loader import TrainingSet, training_loader
from mshnet.data.sample_cache import SampleCache
from mshnet.data.scenes import write_scenes
from mshnet.training import backend as backends
from mshnet.training.step import DEVIATION, MEAN, Normalize, train_step
from tpuscope import watch
from tpuscope.monitor.watch import Report

WARM_EPOCH = 0  # epoch 0 trains one head with the plain IoU loss, later ones all heads


def main(argv: list[str] | None = None) -> int:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--size", type=int, default=64, help="side of the images, pixels")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument(
        "--epoch", type=int, default=1, help="0: the warm-up, one head; 1: all heads, the full loss"
    )
    parser.add_argument("--scenes", type=int, default=18, help="training images, default 18")
    parser.add_argument(
        "--widths", type=int, nargs=5, default=(2, 4, 4, 8, 8), help="channels of the five levels"
    )
    args = parser.parse_args(argv)
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    try:
        official, ours = reports(**vars(args))
    except RequestError as error:
        print(f"report_official: {error}", file=sys.stderr)
        return 2
    print("the official implementation\n", official, "\nours\n", ours, sep="\n")
    return 0


def reports(
    size: int = 64,
    batch_size: int = 4,
    scenes: int = 18,
    widths: Sequence[int] = (2, 4, 4, 8, 8),
    epoch: int = 1,
) -> tuple[Report, Report]:
    """Return the reports of the official implementation and ours, of one epoch each.

    Args:
        size: side of the images, pixels, a multiple of 16.
        scenes: training images that are drawn.
        widths: channels of the five levels; one block in each.
        epoch: 0 for the warm-up, 1 for the full loss.
    """
    if size % 16:
        raise RequestError(f"--size {size}: must be a multiple of 16, for example 64")
    backend = backends.make_backend("tpu")
    network = {"widths": tuple(widths), "depths": (1, 1, 1, 1, 1)}
    with tempfile.TemporaryDirectory() as folder:
        write_scenes(folder, train=scenes, test=1, size=size, progress=False)
        data = TrainingSet(SampleCache(DataFolder(folder).samples("train")), size, size, seed=0)
        torch.manual_seed(0)
        official = _official(data, batch_size, backend, OfficialMSHNet(3, **network), epoch)
        torch.manual_seed(0)
        ours = _ours(data, batch_size, backend, MSHNet(3, **network), epoch)
    return official, ours


def _official(
    data: TrainingSet,
    batch_size: int,
    backend: backends.Backend,
    model: OfficialMSHNet,
    epoch: int,
) -> Report:
    model.to(backend.device)
    optimizer = Adagrad(model.parameters(), lr=0.05)
    mean, deviation = (torch.tensor(x).view(1, 3, 1, 1) for x in (MEAN, DEVIATION))
    samples = [data[epoch, i] for i in range(len(data))]
    with watch() as w:
        for images, masks in DataLoader(samples, batch_size):
            images = (images.expand(-1, 3, -1, -1) / 255 - mean) / deviation
            images, masks = images.to(backend.device), masks.float().to(backend.device)
            official_step(model, optimizer, images, masks, WARM_EPOCH, epoch)
            backend.sync()
    return w.report()


def _ours(
    data: TrainingSet, batch_size: int, backend: backends.Backend, model: MSHNet, epoch: int
) -> Report:
    optimizer = backend.prepare(model, lambda m: Adagrad(m.parameters(), lr=0.05), None)
    normalize, criterion = Normalize().to(backend.device), SLSIoULoss()
    loader = training_loader(data, batch_size, workers=0)
    with watch() as w:
        total = backend.to_device(torch.zeros(1))
        for batch in backend.device_batches(loader):
            total = total + train_step(
                model, normalize, criterion, optimizer, backend, *batch, WARM_EPOCH, epoch
            )
            backend.sync()
        total.item()  # the mean loss, once an epoch
    return w.report()


if __name__ == "__main__":
    sys.exit(main())
