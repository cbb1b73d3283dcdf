"""Time MSHNet's convolutions on this machine: a lower bound for every implementation.

Each convolution of the network runs alone, forward, with the maps that it has in an evaluation: by
PyTorch's eager kernels (oneDNN; channels innermost, as our CPU backend has them, and outermost, as
the official code has them) and by XLA on the CPU. docs/performance.md uses the sums.

    python benchmarks/convolutions.py
    python benchmarks/convolutions.py --size 64 --batch-size 2
"""

import argparse
import os
import statistics
import sys
from collections import Counter
from collections.abc import Sequence

import torch
from measure import seconds
from torch import Tensor, nn

from mshnet import MSHNet
from tpuscope.engine import torch_xla as runtime
from tpuscope.progress import progress

Case = tuple[int, int, int, int]  # input channels, output channels, kernel, side of the map


def convolutions(size: int) -> Counter[Case]:
    """Return the convolutions of one forward pass whose maps are larger than a pixel."""
    found: Counter[Case] = Counter()

    def note(module: nn.Conv2d, inputs: tuple[Tensor], output: Tensor) -> None:
        if output.shape[-1] > 1:
            case = module.in_channels, module.out_channels, module.kernel_size[0], output.shape[-1]
            found[case] += 1

    with torch.device("meta"):
        model = MSHNet().eval()
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(note)
        model(torch.empty(1, 3, size, size), True)
    return found


def gigaflops(case: Case, batch_size: int) -> float:
    """Return a convolution's operations, multiplications and additions, in Gflop."""
    inputs, outputs, kernel, side = case
    return 2e-9 * batch_size * side * side * inputs * outputs * kernel * kernel


@torch.no_grad()
def time_of(case: Case, batch_size: int, way: str, rounds: int = 3) -> float:
    """Return the median seconds of one convolution.

    Args:
        case: of :func:`convolutions`.
        way: ``"innermost"`` or ``"outermost"`` channels of eager PyTorch, or ``"XLA"``.
    """
    inputs, outputs, kernel, side = case
    layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)
    images = torch.randn(batch_size, inputs, side, side)
    if way == "innermost":
        layer, images = (x.to(memory_format=torch.channels_last) for x in (layer, images))
    elif way == "XLA":
        layer, images = (x.to(runtime.device()) for x in (layer, images))

    def work() -> None:
        result = layer(images)
        if way == "XLA":
            runtime.sync()
            runtime.wait()
        del result

    work()
    return statistics.median(seconds(work) for _ in range(rounds))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=256, help="side of the images, pixels")
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args(argv)
    os.environ["PJRT_DEVICE"] = "CPU"
    found = sorted(convolutions(args.size).items(), key=lambda item: -item[0][3])
    size, batch = args.size, args.batch_size
    took = {  # XLA last: its threads are there from then on
        way: [time_of(case, batch, way) for case, _ in progress(found, way)]
        for way in ("innermost", "outermost", "XLA")
    }
    print(f"Gflop/s of each convolution, batch {batch}, {size}×{size}\n")
    print("| channels | kernel | map | times | Gflop |" + "".join(f" {way} |" for way in took))
    print("|---" * (5 + len(took)) + "|")
    for i, (case, times) in enumerate(found):
        inputs, outputs, kernel, side = case
        each = gigaflops(case, batch)
        rates = "".join(f" {each / values[i]:.0f} |" for values in took.values())
        print(f"| {inputs} → {outputs} | {kernel} | {side} | {times} | {each:.2f} |{rates}")
    work = sum(times * gigaflops(case, batch) for case, times in found)
    print(f"\nall of an image, {work / batch:.1f} Gflop:")
    for way, values in took.items():
        total = sum(times * value for (_, times), value in zip(found, values, strict=True))
        print(f"  {way:10} {1000 * total / batch:.0f} ms, {work / total:.0f} Gflop/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
