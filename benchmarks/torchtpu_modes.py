"""MSHNet's training step on TorchTPU in three ways, beside the CPU: losses, programs, time.

    PJRT_DEVICE=CPU python benchmarks/torchtpu_modes.py [--narrow]

in the environment of ``make test-torchtpu``. ``eager``: operation by operation. ``compiled``:
forward pass and loss by ``torch.compile``, which makes a forward and a backward program; the
optimizer is eager. ``one program``: tpuscope.FxStep. The seconds are those of XLA's CPU device, and
say nothing about a TPU.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tpuscope.engine import autoload

autoload.switch_off()  # before torch is imported

import torch  # noqa: E402

from mshnet.data.bitmask import unpack  # noqa: E402
from mshnet.loss import SLSIoULoss, multiscale_loss  # noqa: E402
from mshnet.model import MSHNet  # noqa: E402
from mshnet.training.backend import CpuBackend, TorchTpuBackend  # noqa: E402
from mshnet.training.step import Normalize, summed_step  # noqa: E402
from tpuscope.engine import torch_tpu  # noqa: E402
from tpuscope.tables import table  # noqa: E402

STEPS = 4
WAYS = ("cpu", "eager", "compiled", "one program")


def batches(size: int = 64, count: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = count, 1, size, size
    images = [torch.randint(0, 256, shape, generator=generator) for _ in range(STEPS)]
    masks = [torch.rand(count, 1, size // 8, size, generator=generator) < 0.02] * STEPS
    return [(x.to(torch.uint8), y.to(torch.uint8)) for x, y in zip(images, masks, strict=True)]


def run(way: str, narrow: bool) -> list[str]:
    """Train a few steps; return a row of the table."""
    backend = CpuBackend() if way == "cpu" else TorchTpuBackend()
    torch.manual_seed(0)
    sizes = {"widths": (2, 4, 4, 8, 8), "depths": (1, 1, 1, 1, 1)} if narrow else {}
    model = MSHNet(**sizes).train()
    model.fold = 1
    optimizer = backend.prepare(
        model, lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05), None
    )
    normalize = Normalize()
    backend.move(normalize)
    criterion = SLSIoULoss()
    step, state = summed_step(model, normalize, criterion, optimizer, backend, 0, 1)
    if way == "one program":
        step = backend.compile_step(step, state, [optimizer])
    elif way == "compiled":
        for layer in model.modules():  # the backend takes tensors of the device only
            if isinstance(layer, torch.nn.BatchNorm2d) and layer.num_batches_tracked is not None:
                layer.num_batches_tracked = layer.num_batches_tracked.to(backend.device)

        @torch.compile(backend="tpu")
        def loss_of(images, target):
            scales, fused = model(images, True)
            return multiscale_loss(criterion, scales, fused, target, 0, 1)

        def step(images, masks, total):
            loss = loss_of(normalize(images), unpack(masks).float())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return (total + loss.detach(),)

    total, losses, programs, calls, seconds = backend.to_device(torch.zeros(1)), [], [], [], []
    for images, masks in batches():
        batch = backend.to_device(images), backend.to_device(masks)
        compiled = backend.counters().compilations
        asked = torch_tpu.requests() if way != "cpu" else 0
        began = time.perf_counter()
        before = total
        [total] = step(*batch, total)
        wait = total.item()
        seconds.append(time.perf_counter() - began)
        programs.append(backend.counters().compilations - compiled)
        calls.append(torch_tpu.requests() - asked if way != "cpu" else 0)
        losses.append(wait - before.item())
    mean = model.state_dict()["decoder_0.0.bn2.running_mean"].cpu()
    return [
        way,
        " ".join(f"{loss:.6f}" for loss in losses),
        " ".join(map(str, programs)),
        str(calls[-1]),
        " ".join(f"{second:.2f}" for second in seconds),
        f"{mean[0]:.6f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--narrow", action="store_true", help="a network of 1,400 parameters")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="default: all")
    arguments = parser.parse_args()
    narrow = arguments.narrow
    torch_tpu.device()  # before the first backward pass of the process, on whatever device
    rows = [["way", "losses", "compiled", "eager calls", "seconds", "a running mean"]]
    for way in arguments.ways:
        rows.append(run(way, narrow))
        print(table(rows), flush=True)


if __name__ == "__main__":
    main()
