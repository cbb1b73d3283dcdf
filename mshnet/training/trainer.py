"""The training run, top to bottom, the same for every device."""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Adagrad

from tpuscope.errors import RequestError
from tpuscope.progress import progress

from ..data.loader import EvaluationSet, TrainingSet, evaluation_loader, training_loader
from ..data.sample_cache import SampleCache
from ..loss import SLSIoULoss
from ..model import MSHNet
from . import checkpoint, run_dir
from .backend import Backend
from .config import Config
from .evaluation import evaluate, repeated_evaluation
from .preemption import GO_ON, STOP, Session
from .step import Normalize, summed_step

LOG_EVERY = 10  # steps between two looks at the loss


class Trainer:
    """Trains an MSHNet and leaves config, log, checkpoints and best weights in one folder.

    Its whole state is the weights, the optimizer's state, the random states and a position: epochs
    finished, steps of the next one. Samples and their augmentation follow from seed, epoch and
    index, so neither sampler nor workers have a state of their own.

    Args:
        config: the settings.
        backend: the device.
        train: decoded training split.
        test: decoded test split.
        run_folder: where everything is written.
        resume: content of a checkpoint to continue from.
        session: says when to save and when to stop.
        saved: called after files of the folder have changed.

    Attributes:
        best: the best epoch's record, or None before the first.
        best_weights: its weights, on the host; in memory because only the writer has the file.
        stopped: why training ended before the last epoch, or None.

    Raises:
        RequestError: the weights to start from do not fit.
    """

    def __init__(
        self,
        config: Config,
        backend: Backend,
        train: SampleCache,
        test: SampleCache,
        run_folder: Path,
        resume: dict | None = None,
        session: Session | None = None,
        saved: Callable[[], None] = lambda: None,
    ):
        self.config = config
        self.backend = backend
        self.folder = run_folder
        self.session = session or Session(config.save_minutes, config.max_minutes)
        self.saved = saved
        self.stopped: str | None = None
        self.epoch, self.step = checkpoint.position(resume or {})
        self.best: dict | None = None
        self.best_weights: dict[str, Tensor] = {}
        self.records: list[dict] = []
        self._total = torch.zeros(1)  # of the losses of this epoch's steps
        self._seconds = 0.0  # spent on this epoch by sessions before this one
        self._evaluation_seconds = 0.0  # the last one's

        torch.manual_seed(config.seed)
        self.model = MSHNet(widths=config.widths, depths=config.depths)
        self.model.fold = backend.default_fold(config)
        if resume:
            checkpoint.fill(self.model, resume["net"], run_folder / checkpoint.CHECKPOINT)
            self.best = resume["best"]
            if self.best:
                path = run_folder / checkpoint.WEIGHTS
                self.best_weights = checkpoint.weights_of(checkpoint.load(path), path)
            self.records = run_dir.read_log(run_folder, before=self.epoch)
            self._total = resume.get("loss_sum", self._total)
            self._seconds = resume.get("seconds", 0.0)
        elif config.weight_path:
            checkpoint.load_weights(self.model, config.weight_path)
        self.optimizer = backend.prepare(
            self.model,
            lambda model: Adagrad(model.parameters(), lr=config.lr),
            _optimizer_state(resume, config.lr),
        )
        self.normalize = Normalize()
        backend.move(self.normalize)
        self.criterion = SLSIoULoss()
        parts = self.model, self.normalize, self.criterion, self.optimizer, backend
        last = config.warm_epoch  # of the warm-up
        self._steps = {
            full: backend.compile_step(*summed_step(*parts, last, last + full))
            for full in (False, True)
        }
        self._evaluation = repeated_evaluation(self.model, self.normalize, backend)
        if resume:
            backend.set_replica_state(self.model, resume.get("replica_state"))
            torch.set_rng_state(resume.get("rng", {}).get("host", torch.get_rng_state()))
            backend.set_rng_state(resume.get("rng", {}).get("device"))
        self._require_one_position()

        train_set = TrainingSet(train, config.base_size, config.crop_size, config.seed)
        self.train_loader = training_loader(
            train_set, config.batch_size, config.workers, backend.input_shard
        )
        self.steps = len(self.train_loader)  # of a whole epoch
        if self.step > self.steps:
            raise RequestError(
                f"{run_folder}: its checkpoint is {self.step} steps into an epoch, which has "
                f"{self.steps} with this data set; name the --dataset-dir it began with",
                code="other-data",
            )
        test_set = EvaluationSet(test, config.base_size)
        # Resizing is a small part of evaluation: workers of its own would only take memory.
        self.test_loader = evaluation_loader(test_set, config.batch_size, 0, backend.input_shard)
        if backend.is_main_process:
            run_dir.write_config(run_folder, config)
            run_dir.rewrite_log(run_folder, self.records)

    def fit(self, log: Callable[[str], None] = print) -> dict | None:
        """Train the epochs that are left, or until the session ends.

        Args:
            log: takes a line for people after each epoch.

        Returns:
            The best epoch's record, its line of ``metrics.jsonl``; None before the first.
        """
        while self.epoch < self.config.epochs and not self.stopped:
            record = self._epoch()
            if record is None:
                break
            self.records.append(record)
            self._save_epoch(record)
            log(_epoch_line(record, self.config.epochs))
            if self.epoch < self.config.epochs and self._ask() == STOP:
                self.stopped = self.session.reason()
        return self.best

    def _epoch(self) -> dict | None:
        """One epoch from where it stands; its record, or None if the session ended in it."""
        before, start = self.backend.counters(), time.perf_counter()
        done = self.step
        self._train(start)
        if not self.stopped and self._ask(self._evaluation_seconds) == STOP:
            self._stop(start)
        if self.stopped:
            return None
        loss = float(self._total.item() / self.steps)  # XLA: waits for the steps to be done
        trained = time.perf_counter() - start
        images = (self.steps - done) * self.config.batch_size
        self.backend.end_epoch(self.model)
        full = self.epoch > self.config.warm_epoch
        evaluated = self.model, self.normalize, self.backend, self.test_loader
        metrics = evaluate(*evaluated, full, step=self._evaluation)
        self._evaluation_seconds = time.perf_counter() - start - trained
        corrected, official = metrics.compute("corrected"), metrics.compute("official")
        counted = self.backend.counters() - before
        parts = self.backend.output_shard.count
        return {
            "epoch": self.epoch,
            "phase": "full" if full else "warm-up",
            "loss": self.backend.sum_over_processes(
                torch.tensor([loss], dtype=torch.float64)
            ).item()
            / parts,
            **{key: corrected[key] for key in ("iou", "niou", "pixel_accuracy", "pd", "fa")},
            "fa_official": official["fa"],
            "seconds": round(self._seconds + time.perf_counter() - start, 3),
            "images_per_second": round(images / trained, 2),
            "compilations": counted.compilations,
            "fallbacks": counted.fallbacks,
            "host_reads": counted.host_reads,
        }

    def _train(self, start: float) -> None:
        """The steps that are left of this epoch."""
        self.model.train()
        batches = self.train_loader.batch_sampler
        batches.epoch, batches.start = self.epoch, self.step
        total = seen = self.backend.to_device(self._total)
        seen_at = first = self.step
        bar = progress(
            self.backend.device_batches(self.train_loader),
            f"epoch {self.epoch + 1}/{self.config.epochs}",
            self.steps,
            initial=first,
        )
        step = self._steps[self.epoch > self.config.warm_epoch]
        for images, masks in bar:
            [total] = step(images, masks, total)
            self.step += 1
            # Reading a value waits for the device, so the bar shows the mean of ten steps ago,
            # which has been computed by now.
            if self.step % LOG_EVERY == 0 and not bar.disable:
                if seen_at > first:
                    bar.set_postfix(loss=f"{seen.item() / seen_at:.4f}")
                seen, seen_at = total, self.step
            if self.step % self.backend.agreement_interval == 0 and self.step < self.steps:
                wanted = self._ask()
                if wanted != GO_ON:
                    self._total = total
                    self._save_position(start)
                if wanted == STOP:
                    self.stopped = self.session.reason()
                    return
        if self.step != self.steps:
            raise RuntimeError(f"the loader gave {self.step} of {self.steps} batches")
        self._total = total

    def _ask(self, next_seconds: float = 0.0) -> int:
        """What the session wants, the same answer in every process."""
        return self.backend.max_over_processes(self.session.due(next_seconds))

    def _stop(self, start: float) -> None:
        self._save_position(start)
        self.stopped = self.session.reason()

    def _save_position(self, start: float) -> None:
        """A checkpoint within an epoch."""
        began = time.perf_counter()
        replica_state = self.backend.replica_state(self.model)
        host = checkpoint.to_host(self.model.state_dict())
        host |= self.backend.mean_statistics(self.model, replica_state)
        losses = (
            self.backend.sum_over_processes(self._total.cpu().double())
            / self.backend.output_shard.count
        )
        self._write(
            host,
            full=self.epoch > self.config.warm_epoch,
            epoch=self.epoch - 1,  # the last one that is finished
            step=self.step,
            loss_sum=losses.float(),
            seconds=self._seconds + began - start,
            replica_state=replica_state,
        )
        self.session.saved(time.perf_counter() - began)

    def _save_epoch(self, record: dict) -> None:
        """Log, checkpoint and best weights after an epoch, and on to the next."""
        began = time.perf_counter()
        host = checkpoint.to_host(self.model.state_dict())
        digest = _digest(host)
        self.backend.check_same(digest)
        record["weights"] = digest.hex()[:16]
        if self.backend.is_main_process:
            run_dir.append_log(self.folder, record)
        about = {"full": record["phase"] == "full", "epoch": self.epoch, "iou": record["iou"]}
        if self.best is None or not self.best["iou"] >= record["iou"]:  # NaN: never kept
            self.best = record
            self.best_weights = {name: value.clone() for name, value in host.items()}
            if self.backend.is_main_process:
                # Weights first: a checkpoint never speaks of a best that is not on disk.
                content = {"state_dict": host, **about, "config": self.config.as_dict()}
                checkpoint.save(content, self.folder / checkpoint.WEIGHTS)
        self._write(host, **about)
        self.epoch, self.step, self._total, self._seconds = self.epoch + 1, 0, torch.zeros(1), 0.0
        self.session.saved(time.perf_counter() - began)

    def _write(self, host: dict[str, Tensor], **about) -> None:
        # By all, like the weights before: a copy runs what is pending, which all may take part in.
        optimizer = checkpoint.to_host(self.optimizer.state_dict())
        if not self.backend.is_main_process:
            return
        rng = {"host": torch.get_rng_state(), "device": self.backend.rng_state()}
        content = {"net": host, "optimizer": optimizer, "best": self.best, "rng": rng, **about}
        checkpoint.save_newest({**content, "config": self.config.as_dict()}, self.folder)
        self.saved()

    def _require_one_position(self) -> None:
        """With several processes: all continue from the same checkpoint.

        Raises:
            RuntimeError: they do not; each would wait for the others for ever.
        """
        # The largest of each, and with the sign the smallest. All are asked before one is compared:
        # who raised in between would leave the others waiting.
        mine = [self.epoch, self.step, -self.epoch, -self.step]
        if [self.backend.max_over_processes(number) for number in mine] != mine:
            raise RuntimeError(
                f"the hosts resume from different checkpoints (this one from epoch {self.epoch}, "
                f"step {self.step}): copy the first host's run folder to --backup, which all see"
            )


def bytes_of_a_run(widths: tuple[int, ...], depths: tuple[int, ...]) -> int:
    """Disk space for a run: checkpoints (weights and Adagrad's sums), best weights, plots.

    Two checkpoints are kept, and a file is replaced only when its successor is complete.
    """
    with torch.device("meta"):
        model: nn.Module = MSHNet(widths=widths, depths=depths)
    weights = sum(value.nbytes for value in model.state_dict().values())
    return 3 * (2 * weights) + 2 * weights + 5_000_000


def _digest(state: dict[str, Tensor]) -> bytes:
    """SHA-256 of a state_dict's values."""
    hashed = hashlib.sha256()
    for value in state.values():
        hashed.update(value.contiguous().numpy())
    return hashed.digest()


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
