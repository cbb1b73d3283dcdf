"""One program on eight virtual cores: the numbers and the graphs of one core.

How many devices a process has is settled when it opens them, so each case is a process.
"""

import json
import os
import subprocess
import sys

import pytest

from tpuscope.engine import torch_xla as runtime

if not runtime.installed():
    pytest.skip("torch_xla is not installed on this system", allow_module_level=True)

STEPS = """
import json, sys
import torch
from mshnet import MSHNet, SLSIoULoss
from mshnet.data.bitmask import pack, unpack
from mshnet.training import backend as backends
from mshnet.training.step import Normalize, evaluation_step, train_step

cores, rate = int(sys.argv[1]), float(sys.argv[2])
torch.set_default_dtype(getattr(torch, sys.argv[3]))
backend = backends.make_backend("tpu", cores)
torch.manual_seed(0)
model = MSHNet(widths=(2, 2, 2, 2, 2), depths=(1, 1, 1, 1, 1))
model.fold = int(sys.argv[4])
normalize = Normalize()
optimizer = backend.prepare(model, lambda m: torch.optim.Adagrad(m.parameters(), lr=rate), None)
backend.move(normalize)


class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        rng = torch.Generator().manual_seed(i)
        image = torch.randint(0, 255, (1, 16, 16), generator=rng, dtype=torch.uint8)
        return image, (image > 200).to(torch.uint8)


def collate(samples):
    images, masks = torch.utils.data.default_collate(samples)
    return images, pack(masks)


loader = torch.utils.data.DataLoader(Batches(), 8, collate_fn=collate)
losses, compiled = [], []
total = backend.to_device(torch.zeros(1))
for images, masks in backend.device_batches(loader):
    before = backend.counters()
    loss = train_step(
        model, normalize, SLSIoULoss(), optimizer, backend, images, masks, 0, 1
    )
    total = total + loss
    backend.sync()
    compiled.append((backend.counters() - before).compilations)
    losses.append(loss.item())
phase = backend.to_device(torch.tensor([True]))
for images, masks in backend.device_batches(loader):
    logits = backend.replicate_output(evaluation_step(model, normalize, backend, images, phase))
    copy = backend.replicate_output(masks)
    backend.sync()
    before = backend.counters()
    read, expected = logits.cpu(), copy.cpu()
    compiled_by_reading = (backend.counters() - before).compilations
    break
import torch_xla
sharding = str(torch_xla._XLAC._get_xla_sharding_spec(images))
print(json.dumps({
    "losses": losses, "compiled": compiled, "total": total.item(),
    "by_reading": compiled_by_reading, "shape": list(read.shape),
    "masks_equal": bool((unpack(expected)[3] == Batches()[3][1]).all()),
    "fallbacks": backend.counters().fallbacks,
    "sharding": sharding, "label": backend.label,
    "agreed": backend.max_over_processes(7),
    "from_every_core": backend.mesh.from_every_core(7).tolist() if cores > 1 else None,
}))
"""


def one_and_eight(rate=0.01, dtype="float32", fold=0):
    """What the steps give on one core and on eight; the two run side by side."""
    environment = os.environ | {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", STEPS, str(cores), str(rate), dtype, str(fold)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for cores in (1, 8)
    ]
    printed = [process.communicate(timeout=600) for process in both]
    for process, (_, errors) in zip(both, printed):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in printed]


@pytest.mark.parametrize("fold", [0, 8])
def test_eight_cores_are_one_core_in_numbers_and_graphs(fold):
    one, eight = one_and_eight(fold=fold)
    assert eight["label"] == "XLA on CPU, 8 cores"
    assert "devices=[8,1,1,1]" in eight["sharding"], "the batch axis over the cores"
    assert eight["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert eight["total"] == pytest.approx(one["total"], rel=1e-5)
    assert eight["compiled"] == one["compiled"] == [1, 0, 0, 0, 0]
    assert eight["by_reading"] == 0, "results are whole on every core before they are read"
    assert eight["shape"] == [8, 1, 16, 16]
    assert eight["masks_equal"]
    assert eight["fallbacks"] == 0
    assert eight["agreed"] == 7
    assert eight["from_every_core"] == [7] * 8


@pytest.mark.parametrize("fold", [0, 8])
def test_what_differs_is_rounding(fold):
    """At the recipe's learning rate Adagrad's first steps blow rounding up; float64 has none."""
    one, eight = (run["losses"] for run in one_and_eight(0.05, "float64", fold))
    assert eight == pytest.approx(one, rel=1e-9)
