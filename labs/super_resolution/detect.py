"""Does upscaling help MSHNet find small targets?

One experiment, the same for every seed. Frames of size × size stand for the scene. A coarser sensor
sees them shrunk by the scale (:func:`.frames.shrink`), and a detector is given, in turn,

========= ====================================================================================
full      the frames themselves: what the finer sensor would give, and no method reaches
low       the shrunk frames as they are; its *logits* are enlarged, by bicubic interpolation
nearest   the shrunk frames, each pixel repeated
bicubic   the shrunk frames, interpolated
content   enlarged by the generator after its first phase, pixels alone
srgan     enlarged by the generator after the GAN
========= ====================================================================================

All are scored on the full-size masks, so that 3 pixels mean the same for all. A detector is
trained on *full* and then shown the enlarged frames, which is what one has who buys a coarser
camera and keeps the weights; and detectors are trained on *low*, *bicubic* and *srgan* frames,
which is the case of a retrained detector. Same network, augmentation and number of steps. Only
the first head is trained (the official recipe's warm-up), and the scores are means over the last
:data:`SCORED` epochs: no epoch is chosen on the test split.

Enlarging adds no measurement: what a generator knows beyond the pixels comes from its training
frames. So it can only help the detector use what is there already.

**Measured**, real SIRST (341 frames to train, 86 to test), eager CPU, November 2026::

    python -m labs.super_resolution detect --dataset-dir datasets/SIRST --size 96 --crop 48 \\
        --width 16 --blocks 4 --discriminator-width 16 --content-steps 600 --steps 900 \\
        --epochs 40 --detector-batch-size 8 --train-on low,bicubic,srgan --seeds 3 --device cpu

Seed 1, where the detectors learned to detect:

==================== ======== ======= =======
trained, shown       IoU %    Pd %    Fa 1e-6
==================== ======== ======= =======
full, full           54.5     98.5    162
full, nearest        31.4     90.8    349
full, bicubic        43.6     90.0    137
full, content        42.7     93.2    207
full, srgan          43.2     93.8    220
low, low             37.4     86.6    356
bicubic, bicubic     43.3     93.8    184
srgan, srgan         40.9     95.3    306
==================== ======== ======= =======

Seeds 0 and 2 give no answer: 40 epochs of this recipe ended at an IoU of 1.5 and 10.2 on full
frames (false alarms on 5 and 8 % of all pixels), and at 0.9 for *low* with seed 2; their other
detectors were not trained. So this is one seed, and a difference of a few points may be its own.

What it says: the resolution matters most, 11 points of IoU between full frames and the best of the
enlarged ones. A detector that was trained on full frames finds some more targets in the generator's
frames than in bicubic ones (94 against 90 %), with half as many false alarms again and the same
IoU: a shift along its curve rather than a gain. Retrained on bicubic frames, a detector finds as
many, with fewer false alarms; retrained on SRGAN frames it finds 1.5 points more (1.6 targets
of 106, in the mean), with more false alarms and less IoU. The generators were 1.1 dB better than
bicubic in PSNR (46.4 to 47.5 dB, two seeds), so a better PSNR is no such answer.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Adagrad

from mshnet import MSHNet, SLSIoULoss
from mshnet.data.loader import EvaluationSet, TrainingSet, evaluation_loader, training_loader
from mshnet.training.backend import Backend
from mshnet.training.evaluation import evaluate
from mshnet.training.step import Normalize, summed_step
from tpuscope.errors import RequestError
from tpuscope.progress import progress, without_progress

from . import frames as data
from .networks import Bicubic
from .quality import compare
from .tiles import Upscaler
from .training import CONTENT, GENERATOR, Run, Settings, load_generator

WAYS = ("full", "low", "nearest", "bicubic", "content", "srgan")
TRAINED_ON = ("full", "low", "bicubic", "srgan")
RESULTS = "detect.jsonl"
SCORED = 5  # the last epochs, averaged: from one to the next IoU moves by several points


@dataclass(frozen=True)
class Experiment:
    """What is trained and compared.

    Attributes:
        sr: the generators' training; also frames, scale and device.
        trained_on: ways that a detector of its own is trained on; ``full`` is always one.
        epochs: of each detector.
        batch_size: of the detectors.
        lr: Adagrad's.
        widths: of the detectors' five levels; one block on each.
        train, test: frames at most; None: all (built-in: 200 and 50).
    """

    sr: Settings
    trained_on: Sequence[str] = TRAINED_ON
    epochs: int = 20
    batch_size: int = 4
    lr: float = 0.05
    widths: tuple[int, ...] = (8, 8, 16, 16, 32)
    train: int | None = None
    test: int | None = None

    def __post_init__(self):
        for way in self.trained_on:
            if way not in WAYS:
                raise RequestError(f"--train-on {way}: must be one of {', '.join(WAYS)}")
        for flag, value in (("epochs", self.epochs), ("detector-batch-size", self.batch_size)):
            if value < 1:
                raise RequestError(f"--{flag} {value}: must be at least 1")
        least = 16 * self.sr.scale  # MSHNet halves four times
        if self.sr.size % least:
            near = max(least, self.sr.size // least * least)
            raise RequestError(f"--size {self.sr.size}: must be a multiple of {least}; use {near}")


class Seen(nn.Module):
    """Preprocessing of full frames: shrunk, enlarged in some way, normalised.

    Args:
        way: one of :data:`WAYS`.
        scale: of the sensor.
        generator: of ``content`` and ``srgan``.
    """

    def __init__(self, way: str, scale: int, generator: nn.Module | None = None):
        super().__init__()
        self.way, self.scale = way, scale
        learned = {"content": generator, "srgan": generator}
        fixed = {"bicubic": Bicubic(scale), "nearest": nn.Upsample(scale_factor=scale)}
        self.enlarge = (learned | fixed).get(way)
        self.normalize = Normalize()
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, frames: Tensor) -> Tensor:
        """uint8 (B, 1, H, W) → float32 (B, 3, H, W), or (B, 3, H/s, W/s) for ``low``."""
        if self.way == "full":
            return self.normalize(frames)
        seen = data.shrink(frames.float() / 255, self.scale)
        if self.enlarge is not None:
            seen = self.enlarge(seen).clamp(0, 1)
        return self.normalize(torch.round(seen * 255))


class Enlarged(nn.Module):
    """A detector on low-resolution frames whose logits are enlarged to the masks' size."""

    def __init__(self, detector: MSHNet, scale: int):
        super().__init__()
        self.detector = detector
        self.bicubic = Bicubic(scale)

    def forward(self, frames: Tensor, full: bool) -> tuple[list[Tensor], Tensor]:
        """Return the same as MSHNet, with the finest head only."""
        scales, fused = self.detector(frames, full)
        return [self.bicubic(logits) for logits in scales[:1]], self.bicubic(fused)


def train_detector(
    experiment: Experiment, seen: Seen, pairs: data.Pairs, backend: Backend, seed: int
) -> Iterator[nn.Module]:
    """Train a narrow MSHNet on preprocessed frames; yield it after each of the last epochs."""
    size, batch_size = experiment.sr.size, experiment.batch_size
    torch.manual_seed(seed)
    model: nn.Module = MSHNet(widths=experiment.widths, depths=(1, 1, 1, 1, 1))
    if seen.way == "low":
        model = Enlarged(model, seen.scale)
    optimizer = backend.prepare(model, lambda m: Adagrad(m.parameters(), lr=experiment.lr), None)
    backend.move(seen)
    last = experiment.epochs  # all of it is warm-up: one head, plain IoU
    parts = model, seen, SLSIoULoss(), optimizer, backend
    step = backend.compile_step(*summed_step(*parts, last, epoch=0))
    dataset = TrainingSet(pairs, size, size, seed)
    loader = training_loader(dataset, batch_size, workers=0, part=backend.input_shard)
    seen.eval()
    total = backend.to_device(torch.zeros(1))
    for epoch in progress(range(experiment.epochs), f"detector on {seen.way}"):
        loader.batch_sampler.epoch = epoch
        model.train()  # scoring ends it
        for frames, masks in backend.device_batches(loader):
            [total] = step(frames, masks, total)
        if epoch >= experiment.epochs - SCORED:
            yield model


def score(
    experiment: Experiment, model: nn.Module, seen: Seen, pairs: data.Pairs, backend: Backend
) -> dict[str, float]:
    """Return ``iou``, ``niou``, ``pd`` and ``fa`` on full-size masks, corrected definition."""
    backend.move(seen)
    seen.eval()
    dataset = EvaluationSet(pairs, experiment.sr.size)
    loader = evaluation_loader(dataset, experiment.batch_size, workers=0, part=backend.input_shard)
    with without_progress():  # the detector's own bar is there
        result = evaluate(model, seen, backend, loader, full=False).compute()
    return {name: result[name] for name in ("iou", "niou", "pd", "fa")}


def run_seed(
    experiment: Experiment, backend: Backend, folder: Path, seed: int, log=print
) -> list[dict]:
    """Run one seed: return a row for each detector and way, and one for each way's PSNR."""
    sr = replace(experiment.sr, seed=seed)
    train = data.pairs(sr.dataset_dir, "train", sr.size, experiment.train)
    test = data.pairs(sr.dataset_dir, "test", sr.size, experiment.test)
    generators = _generators(sr, folder / f"generator-{seed}", backend, train)
    ways = {way: Seen(way, sr.scale, generators.get(way)) for way in WAYS}

    upscalers = {name: Upscaler(one, backend) for name, one in generators.items()}
    quality = compare([frame for frame, _ in test], sr.scale, **upscalers)
    rows = [
        {"seed": seed, "shown": k, "psnr": v["psnr"], "ssim": v["ssim"]} for k, v in quality.items()
    ]
    for trained_on in dict.fromkeys(("full", *experiment.trained_on)):
        shown = [way for way in WAYS if way != "low"] if trained_on == "full" else [trained_on]
        scores: dict[str, list[dict[str, float]]] = {way: [] for way in shown}
        for model in train_detector(experiment, ways[trained_on], train, backend, seed):
            for way in shown:
                scores[way].append(score(experiment, model, ways[way], test, backend))
        for way, epochs in scores.items():
            means = {name: sum(one[name] for one in epochs) / len(epochs) for name in epochs[0]}
            rows.append({"seed": seed, "trained": trained_on, "shown": way, **means})
            log(line(rows[-1]))
    return rows


def _generators(
    sr: Settings, folder: Path, backend: Backend, train: data.Pairs
) -> dict[str, nn.Module]:
    """Return the generators after the first phase and after the GAN, on the host; train if missing.

    Raises:
        RequestError: the folder has some of other settings.
    """
    if not (folder / GENERATOR).exists():
        folder.mkdir(parents=True, exist_ok=True)
        Run(replace(sr, save_dir=str(folder)), backend, [frame for frame, _ in train]).fit()
    generators = {}
    for name, file in (("content", CONTENT), ("srgan", GENERATOR)):
        generators[name], found = load_generator(folder / file)
        if replace(found, save_dir=sr.save_dir, device=sr.device) != sr:
            raise RequestError(f"{folder} holds generators of other settings; name another folder")
    return generators


def run(
    experiment: Experiment, backend: Backend, folder: Path, seeds: int, log=print
) -> list[dict]:
    """Run ``seeds`` seeds from the settings' on; append each to ``detect.jsonl`` in the folder.

    Seeds that it holds are not repeated; all of its rows are returned.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder / "experiment.json", experiment)
    path = folder / RESULTS
    rows = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    for seed in range(experiment.sr.seed, experiment.sr.seed + seeds):
        if not any(row["seed"] == seed for row in rows):
            new = run_seed(experiment, backend, folder, seed, log)
            with open(path, "a") as file:
                file.writelines(f"{json.dumps(row)}\n" for row in new)
            rows += new
    return rows


def _claim(card: Path, experiment: Experiment) -> None:
    """Record the settings that the folder's results belong to.

    Raises:
        RequestError: it holds those of something else.
    """
    about = asdict(experiment)
    for name in ("seed", "device", "save_dir"):
        del about["sr"][name]
    text = json.dumps(about, indent=1)
    if card.exists() and card.read_text() != text:
        raise RequestError(
            f"--save-dir {card.parent} holds results of other settings (experiment.json); name "
            "another folder"
        )
    card.write_text(text)


def line(row: dict) -> str:
    """Return one row as text."""
    return (
        f"seed {row['seed']}  trained on {row['trained']:<8} shown {row['shown']:<8} "
        f"IoU {100 * row['iou']:5.2f}  Pd {100 * row['pd']:6.2f}  Fa {1e6 * row['fa']:7.1f}e-6"
    )


def table(rows: Sequence[dict]) -> str:
    """Return the means over the seeds, with the smallest and the largest value."""
    found = [row for row in rows if "iou" in row]
    psnr = {row["shown"]: [] for row in rows if "psnr" in row}
    for row in rows:
        if "psnr" in row:
            psnr[row["shown"]].append(row["psnr"])
    seeds = len({row["seed"] for row in rows})
    lines = [
        f"means over {seeds} seed{'s' * (seeds > 1)} (smallest … largest)",
        f"{'trained on':<11}{'shown':<9}{'PSNR dB':>8}{'IoU %':>23}{'Pd %':>25}{'Fa 1e-6':>24}",
    ]
    for pair in dict.fromkeys((row["trained"], row["shown"]) for row in found):
        same = [row for row in found if (row["trained"], row["shown"]) == pair]
        values = psnr.get(pair[1])
        quality = f"{sum(values) / len(values):8.2f}" if values else " " * 8
        lines.append(
            f"{pair[0]:<11}{pair[1]:<9}{quality}"
            + _spread([100 * row["iou"] for row in same])
            + _spread([100 * row["pd"] for row in same])
            + _spread([1e6 * row["fa"] for row in same])
        )
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{sum(values) / len(values):8.1f} ({min(values):5.1f} …{max(values):6.1f})"
