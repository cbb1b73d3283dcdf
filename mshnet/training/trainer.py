"""The training run, top to bottom, the same for every device."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.optim import Adagrad

from ..data.feed import EvaluationSet, TrainingSet, evaluation_loader, training_loader
from ..data.store import SampleStore
from ..errors import RequestError
from ..loss import SLSIoULoss
from ..model import MSHNet
from ..progress import progress
from . import checkpoint, folder
from .backend import Backend
from .config import Config
from .evaluation import evaluate
from .step import Normalize, train_step

LOG_EVERY = 10  # steps between two looks at the loss


class Trainer:
    """Trains an MSHNet and leaves config, log, checkpoint and best weights in one folder.

    Args:
        config: the settings.
        backend: the device.
        train: decoded training split.
        test: decoded test split.
        run_folder: where everything is written.
        resume: content of a checkpoint to continue from.

    Raises:
        RequestError: the weights to start from do not fit.
    """

    def __init__(
        self,
        config: Config,
        backend: Backend,
        train: SampleStore,
        test: SampleStore,
        run_folder: Path,
        resume: dict | None = None,
    ):
        self.config = config
        self.backend = backend
        self.folder = run_folder
        self.epoch = 0
        self.best: dict | None = None  # the best epoch's record
        self.records: list[dict] = []

        torch.manual_seed(config.seed)
        self.model = MSHNet(widths=config.widths, depths=config.depths)
        if resume:
            checkpoint.fill(self.model, resume["net"], run_folder / checkpoint.CHECKPOINT)
            self.epoch = resume["epoch"] + 1
            self.best = resume["best"]
            self.records = folder.read_log(run_folder, before=self.epoch)
        elif config.weight_path:
            checkpoint.load_weights(self.model, config.weight_path)
        self.optimizer = backend.place(
            self.model,
            lambda model: Adagrad(model.parameters(), lr=config.lr),
            _optimizer_state(resume, config.lr),
        )
        self.normalize = Normalize().to(backend.device)
        self.criterion = SLSIoULoss()

        train_set = TrainingSet(train, config.base_size, config.crop_size, config.seed)
        self.train_loader = training_loader(train_set, config.batch_size, config.workers)
        test_set = EvaluationSet(test, config.base_size)
        # Resizing is a small part of evaluation: workers of its own would only take memory.
        self.test_loader = evaluation_loader(test_set, config.batch_size, workers=0)
        folder.write_config(run_folder, config)
        folder.rewrite_log(run_folder, self.records)

    def fit(self, say: Callable[[str], None] = print) -> dict:
        """Train the epochs that are left.

        Args:
            say: takes a line for people after each epoch.

        Returns:
            The best epoch's record: its line of ``metrics.jsonl``.
        """
        while self.epoch < self.config.epochs:
            record = self._epoch()
            self.records.append(record)
            folder.append_log(self.folder, record)
            self._save(record)
            say(_epoch_line(record, self.config.epochs))
            self.epoch += 1
        return self.best

    def _epoch(self) -> dict:
        before, start = self.backend.counters(), time.perf_counter()
        loss = self._train_epoch()
        trained = time.perf_counter() - start
        full = self.epoch > self.config.warm_epoch
        metrics = evaluate(self.model, self.normalize, self.backend, self.test_loader, full)
        corrected, official = metrics.compute("corrected"), metrics.compute("official")
        counted = self.backend.counters() - before
        images = len(self.train_loader) * self.config.batch_size
        return {
            "epoch": self.epoch,
            "phase": "full" if full else "warm-up",
            "loss": loss,
            **{key: corrected[key] for key in ("iou", "niou", "pixel_accuracy", "pd", "fa")},
            "fa_official": official["fa"],
            "seconds": round(time.perf_counter() - start, 3),
            "images_per_second": round(images / trained, 2),
            "compilations": counted.compilations,
            "fallbacks": counted.fallbacks,
            "host_reads": counted.host_reads,
        }

    def _train_epoch(self) -> float:
        """One pass over the training split; the mean loss."""
        self.model.train()
        self.train_loader.sampler.epoch = self.epoch
        total = seen = self.backend.put(torch.zeros(1))
        steps = 0
        bar = progress(
            self.backend.feed(self.train_loader),
            f"epoch {self.epoch + 1}/{self.config.epochs}",
            len(self.train_loader),
        )
        for images, masks in bar:
            loss = train_step(
                self.model,
                self.normalize,
                self.criterion,
                self.optimizer,
                self.backend,
                images,
                masks,
                self.config.warm_epoch,
                self.epoch,
            )
            total = total + loss
            self.backend.end_step()
            steps += 1
            # Reading a value waits for the device, so the bar shows the mean of ten steps ago,
            # which has been computed by now.
            if steps % LOG_EVERY == 0 and not bar.disable:
                if steps > LOG_EVERY:
                    bar.set_postfix(loss=f"{seen.item() / (steps - LOG_EVERY):.4f}")
                seen = total
        if steps != len(self.train_loader):
            raise RuntimeError(f"the loader gave {steps} of {len(self.train_loader)} batches")
        return total.item() / steps

    def _save(self, record: dict) -> None:
        better = self.best is None or not self.best["iou"] >= record["iou"]  # NaN: never kept
        if better:
            self.best = record
        host = checkpoint.to_host(self.model.state_dict())
        about = {
            "full": record["phase"] == "full",
            "epoch": self.epoch,
            "iou": record["iou"],
            "config": self.config.as_dict(),
        }
        if better:
            # Weights first: a checkpoint never speaks of a best that is not on disk.
            checkpoint.save({"state_dict": host, **about}, self.folder / checkpoint.WEIGHTS)
        optimizer = self.optimizer.state_dict()
        content = {"net": host, "optimizer": optimizer, "best": self.best, **about}
        checkpoint.save(content, self.folder / checkpoint.CHECKPOINT)


def bytes_of_a_run(widths: tuple[int, ...], depths: tuple[int, ...]) -> int:
    """Disk space for a run: checkpoint (weights and Adagrad's sums) twice, weights twice, plots.

    Twice, because a file is replaced only when its successor is complete.
    """
    with torch.device("meta"):
        model: nn.Module = MSHNet(widths=widths, depths=depths)
    weights = sum(value.nbytes for value in model.state_dict().values())
    return 2 * (2 * weights) + 2 * weights + 5_000_000


def _optimizer_state(resume: dict | None, lr: float) -> dict | None:
    """The checkpoint's optimizer state; the learning rate is the request's."""
    if not resume:
        return None
    try:
        state = resume["optimizer"]
        for group in state["param_groups"]:
            group["lr"] = lr
    except (KeyError, TypeError) as error:
        raise RequestError(
            f"{checkpoint.CHECKPOINT} is damaged: its optimizer state lacks {error}"
        ) from error
    return state


def _epoch_line(record: dict, epochs: int) -> str:
    return (
        f"epoch {record['epoch'] + 1:>3}/{epochs} {record['phase']:<7} "
        f"loss {record['loss']:.4f}  IoU {100 * record['iou']:5.2f}  "
        f"nIoU {100 * record['niou']:5.2f}  Pd {100 * record['pd']:6.2f}  "
        f"Fa {1e6 * record['fa']:8.2f}e-6  {record['seconds']:.1f} s  "
        f"{record['images_per_second']:.1f} images/s"
    )
