"""The training step on XLA, on a narrow network: tracing, compilation and results."""

import pytest
import torch
import torch_xla.core.xla_model as xm
from torch.optim import Adagrad

from mshnet import MSHNet, SLSIoULoss
from mshnet.data.bitmask import pack
from mshnet.model import ResidualBlock
from mshnet.training import backend as backends
from mshnet.training.step import Normalize, evaluation_step, train_step
from tpuscope import aot
from tpuscope.engine import torch_xla as runtime

SIZE = 32
WARM_EPOCH = 0


class Run:
    """Model, optimizer and steps on one backend."""

    def __init__(self, backend, fold=0):
        torch.manual_seed(0)
        self.backend = backend
        self.model = MSHNet(widths=(2, 4, 4, 4, 4), depths=(1, 1, 1, 1, 1))
        self.model.fold = fold
        self.optimizer = backend.prepare(
            self.model, lambda m: Adagrad(m.parameters(), lr=0.05), None
        )
        self.normalize = Normalize().to(backend.device)
        self.criterion = SLSIoULoss()

    def trace(self, epoch, batch):
        images, masks = batch
        return train_step(
            self.model,
            self.normalize,
            self.criterion,
            self.optimizer,
            self.backend,
            self.backend.to_device(images),
            self.backend.to_device(masks),
            WARM_EPOCH,
            epoch,
        )

    def step(self, epoch, batch):
        loss = self.trace(epoch, batch)
        self.backend.sync()
        return loss

    def evaluate(self, images, full):
        self.model.eval()
        logits = evaluation_step(
            self.model,
            self.normalize,
            self.backend,
            self.backend.to_device(images),
            self.backend.to_device(torch.tensor([full])),
        )
        self.backend.sync()
        self.model.train()
        return logits.cpu()


def batch(seed, size=2):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (size, 1, SIZE, SIZE), dtype=torch.uint8, generator=generator)
    masks = torch.zeros(size, 1, SIZE, SIZE, dtype=torch.uint8)
    masks[..., 10:13, 5 + seed : 8 + seed] = 1
    return images, pack(masks)


@pytest.fixture(scope="module")
def histories(xla):
    """The same nine steps and evaluations on XLA and on the eager CPU."""
    before = runtime.counters()
    result = {}
    for backend in (xla, backends.make_backend("cpu")):
        run = Run(backend)
        losses, logits = [], []
        for epoch in (0, 1, 2):
            losses += [run.step(epoch, batch(seed)) for seed in range(3)]
            logits.append(run.evaluate(batch(9)[0], full=epoch > WARM_EPOCH))
        if backend is xla:
            result["counted"] = runtime.counters() - before
        name = "xla" if backend is xla else "cpu"
        result[name] = ([loss.item() for loss in losses], logits)
    return result


def test_a_whole_run_compiles_three_graphs_and_none_falls_back(histories):
    print(histories["counted"])
    assert histories["counted"].compilations == 3  # warm-up, full phase, evaluation
    assert histories["counted"].fallbacks == 0
    assert histories["counted"].host_reads == 3  # the logits of each evaluation; no step reads


def test_xla_and_eager_give_the_same_losses_and_logits(histories):
    # Later steps drift: Adagrad scales rounding noise up (see test_golden.py).
    xla_losses, xla_logits = histories["xla"]
    cpu_losses, cpu_logits = histories["cpu"]
    assert xla_losses[:2] == pytest.approx(cpu_losses[:2], rel=1e-4)
    assert xla_losses == pytest.approx(cpu_losses, rel=5e-2)
    assert all(torch.isfinite(x).all() for x in (*xla_logits, *cpu_logits))


def graph_size(run, size):
    """Operations in the HLO of a full-phase step."""
    loss = run.trace(1, batch(0, size))
    text = xm.get_stablehlo([loss])

    return text.count(" = stablehlo.")


def test_the_traced_graph_does_not_grow_with_the_batch(xla):
    small, large = graph_size(Run(xla), 2), graph_size(Run(xla), 16)
    print(small, large)
    assert 0 < small == large


@pytest.mark.parametrize("fold", [0, 8])
def test_bfloat16_trains_without_fallback(fold):
    backend = backends.make_backend("tpu", precision="bf16")
    before = runtime.counters()
    run = Run(backend, fold)
    losses = [run.step(1, batch(seed)).item() for seed in range(3)]
    counted = runtime.counters() - before
    assert all(torch.isfinite(torch.tensor(losses)))
    assert counted.fallbacks == 0
    assert counted.compilations == 1
    assert all(p.dtype == torch.float32 for p in run.model.parameters())


def test_on_a_tpu_a_folded_block_moves_a_fraction_of_the_bytes(xla):
    """By the account of the TPU's compiler: what all this is for."""
    moved = {}
    for f in (0, 1, 8):
        block = ResidualBlock(16, 16).to(xla.device)
        block.fold = f
        columns = max(1, f)
        x = torch.zeros(8, 16 * columns, 128, 128 // columns, dtype=torch.bfloat16)

        def step(x, block=block):
            with torch.autocast("xla", dtype=torch.bfloat16):
                loss = block(x.requires_grad_()).float().square().mean()
            return torch.autograd.grad(loss, [x, *block.parameters()])

        moved[f] = aot.compile(step, [x]).bytes_accessed
    assert moved[8] < moved[0] / 2


def test_under_xla_the_lanes_have_the_textbook_s_gradients(xla):
    """A maximum has its gradient also where the compiler computes its map a second time."""
    images = torch.rand(4, 3, 32, 32)  # fewer values a map make batch norm chaotic
    gradients = {}
    for fold in (0, 1, 8):
        run = Run(xla, fold)
        scales, fused = run.model(xla.to_device(images), True)
        (fused.square().mean() + sum(x.square().mean() for x in scales)).backward()
        xla.sync()
        gradients[fold] = {
            name: p.grad.cpu() for name, p in run.model.named_parameters() if ".bias" not in name
        }
    for fold in (1, 8):
        for name, expected in gradients[0].items():
            off = (gradients[fold][name] - expected).norm()
            assert off <= 1e-2 * expected.norm() + 1e-6, (fold, name)
