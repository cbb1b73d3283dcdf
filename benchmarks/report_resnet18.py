"""The watch report on a foreign model: a training step of torchvision's ResNet-18.

    PJRT_DEVICE=CPU python benchmarks/report_resnet18.py

Random images; the step is written as in any tutorial. Needs torchvision, in the version that
belongs to the installed torch (0.24.0 for torch 2.9.0).
"""

import argparse
import os
import sys

import torch
from torch.nn import functional as F

from tpuscope import watch
from tpuscope.engine import torch_xla as runtime
from tpuscope.monitor.watch import Report


def main(argv: list[str] | None = None) -> int:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--size", type=int, default=64, help="side of the images, pixels")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args(argv)
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    print(report(args.size, args.batch_size, args.steps))
    return 0


def report(size: int, batch_size: int, steps: int) -> Report:
    """Return the report on the first ``steps`` steps."""
    import torchvision

    device = runtime.device()
    model = torchvision.models.resnet18(num_classes=10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with watch() as w:
        for _ in range(steps):
            images = torch.rand(batch_size, 3, size, size).to(device)
            labels = torch.randint(10, (batch_size,)).to(device)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            runtime.sync()
    return w.report()


if __name__ == "__main__":
    sys.exit(main())
