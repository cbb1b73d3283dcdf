"""The training run, top to bottom, the same for every device."""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Adagrad

from tpuscope.errors import Failed, RequestError
from tpuscope.progress import progress

from ..data.loader import (
    EpochBatches,
    EvaluationSet,
    TrainingSet,
    evaluation_loader,
    training_loader,
)
from ..data.sample_cache import SampleCache
from ..loss import SLSIoULoss
from ..model import MSHNet
from . import checkpoint, run_dir
from .backend import Backend
from .config import Config
from .evaluation import compiled_evaluation, evaluate
from .preemption import GO_ON, STOP, Session
from .step import Normalize, summed_step

LOG_EVERY = 10  # steps between two values of the loss in the progress bar


class TrainingDiverged(Failed):
    """The loss or the weights are no longer finite; nothing has been saved since they were."""

    def __init__(self, message: str, code: str = "diverged"):
        super().__init__(message, code)


class Trainer:
    """Trains an MSHNet and writes config, log, checkpoints and best weights to one folder.

    Its whole state is the weights, the optimizer's state and a position: epochs finished, steps of
    the next one. Order and augmentation of the samples, and dropout masks, follow from the seed
    and the position, so neither loader nor device has a random state to save.

    Args:
        config: the settings.
        backend: the device.
        train: decoded training split.
        test: decoded test split.
        run_folder: folder of all files of the run.
        resume: content of a checkpoint to continue from.
        session: decides when to save and when to stop.
        saved: called after files of the folder have changed.

    Attributes:
        best: the best epoch's record, or None before the first.
        best_weights: its weights, on the host; in memory because only the main process has the
            file.
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
        self._seconds = 0.0  # spent on this epoch by earlier sessions
        self._evaluation_seconds = 0.0  # of the last evaluation
        self._checkpoint_reads = 0  # host reads of checkpoints within this epoch

        torch.manual_seed(config.seed)
        self.model = MSHNet(widths=config.widths, depths=config.depths)
        self.model.fold = backend.default_fold(config)
        if resume:
            checkpoint.fill(self.model, resume["net"], run_folder / checkpoint.CHECKPOINT)
            self.best = resume["best"]
            if self.best:
                path = run_folder / checkpoint.WEIGHTS
                self.best_weights = backend.from_main_process(
                    lambda: checkpoint.weights_of(checkpoint.load(path), path)
                )
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
            full: backend.compile_step(*summed_step(*parts, last, last + full), [self.optimizer])
            for full in (False, True)
        }
        self._evaluation = compiled_evaluation(self.model, self.normalize, backend)
        if resume:
            backend.set_replica_state(self.model, resume.get("replica_state"))
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
        # Resizing is a small part of evaluation: separate workers would only take memory.
        self.test_loader = evaluation_loader(test_set, config.batch_size, 0, backend.input_shard)
        if backend.is_main_process:
            run_dir.write_config(run_folder, config)
            run_dir.rewrite_log(run_folder, self.records)

    def fit(self, log: Callable[[str], None] = print) -> dict | None:
        """Train the remaining epochs, or until the session ends.

        Args:
            log: receives a line for people after each epoch.

        Returns:
            The best epoch's record, its line of ``metrics.jsonl``; None before the first.

        Raises:
            TrainingDiverged: the loss or the weights are not finite; the files are those of the
                last checkpoint before that.
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
        """Train and evaluate one epoch from the present position.

        Returns:
            Its record, or None if the session ended before the evaluation. ``host_reads`` counts
            the values and tensors that the training steps read, the mean loss included and
            checkpoints within the epoch not; ``evaluation_reads`` those of the evaluation.
        """
        before, start = self.backend.counters(), time.perf_counter()
        done = self.step
        self._checkpoint_reads = 0
        self._train(start)
        if not self.stopped and self._ask(self._evaluation_seconds) == STOP:
            self._stop(start)
        if self.stopped:
            return None
        loss = self._total.item() / self.steps  # XLA: waits until the steps have been computed
        trained, steps_counted = time.perf_counter() - start, self.backend.counters() - before
        loss = self._mean_over_processes(torch.tensor([loss], dtype=torch.float64)).item()
        if not math.isfinite(loss):
            raise self._diverged(f"the mean loss is {loss}")
        images = (self.steps - done) * self.config.batch_size
        self.backend.end_epoch(self.model)
        full = self.epoch > self.config.warm_epoch
        evaluated = self.model, self.normalize, self.backend, self.test_loader
        metrics = evaluate(*evaluated, full, step=self._evaluation)
        self._evaluation_seconds = time.perf_counter() - start - trained
        corrected, official = metrics.compute("corrected"), metrics.compute("official")
        counted = self.backend.counters() - before
        return {
            "epoch": self.epoch,
            "phase": "full" if full else "warm-up",
            "loss": loss,
            **{key: corrected[key] for key in ("iou", "niou", "pixel_accuracy", "pd", "fa")},
            "fa_official": official["fa"],
            "seconds": round(self._seconds + time.perf_counter() - start, 3),
            "images_per_second": round(images / trained, 2),
            "compilations": counted.compilations,
            "fallbacks": counted.fallbacks,
            "host_reads": steps_counted.host_reads - self._checkpoint_reads,
            "evaluation_reads": counted.host_reads - steps_counted.host_reads,
        }

    def _train(self, start: float) -> None:
        """Run the remaining steps of this epoch."""
        self.model.train()
        batches = self.train_loader.batch_sampler
        assert isinstance(batches, EpochBatches)
        batches.epoch, batches.start = self.epoch, self.step
        total = seen = self.backend.to_device(self._total)
        seen_at = first = self.step
        bar = progress(
            _require_loaders(self.backend.device_batches(self.train_loader)),
            f"epoch {self.epoch + 1}/{self.config.epochs}",
            self.steps,
            initial=first,
        )
        step = self._steps[self.epoch > self.config.warm_epoch]
        for images, masks in bar:
            # From the position, and not once a session: on XLA every sync(), the loader's too,
            # advances the device's seed.
            self.backend.seed(_step_seed(self.config.seed, self.epoch, self.step))
            [total] = step(images, masks, total)
            self.step += 1
            # Reading a value waits for the device, so the bar shows the mean of ten steps ago,
            # which has been computed by now.
            if self.step % LOG_EVERY == 0 and not bar.disable:
                if seen_at > first:
                    bar.set_postfix(loss=f"{seen.item() / seen_at:.4f}")
                seen, seen_at = total, self.step
            if self.step % self.backend.agreement_interval == 0 and self.step < self.steps:
                due = self._ask()
                if due != GO_ON:
                    self._total = total
                    self._save_position(start)
                if due == STOP:
                    self.stopped = self.session.reason()
                    return
        if self.step != self.steps:
            raise RuntimeError(f"the loader gave {self.step} of {self.steps} batches")
        self._total = total

    def _ask(self, next_seconds: float = 0.0) -> int:
        """Return the session's decision, the same one in every process."""
        return self.backend.max_over_processes(self.session.due(next_seconds))

    def _stop(self, start: float) -> None:
        self._save_position(start)
        self.stopped = self.session.reason()

    def _save_position(self, start: float) -> None:
        """Write a checkpoint within an epoch."""
        began, reads = time.perf_counter(), self.backend.counters().host_reads
        replica_state = self.backend.replica_state(self.model)
        host = checkpoint.to_host(self.model.state_dict())
        if replica_state is not None:
            host |= self.backend.mean_statistics(self.model, replica_state)
        losses = self._mean_over_processes(self._total.cpu().double())
        self._require_finite({**host, "the sum of the losses": losses})
        self._write(
            host,
            full=self.epoch > self.config.warm_epoch,
            epoch=self.epoch - 1,  # the last one that is finished
            step=self.step,
            loss_sum=losses.float(),
            seconds=self._seconds + began - start,
            replica_state=replica_state,
        )
        self._checkpoint_reads += self.backend.counters().host_reads - reads
        self.session.saved(time.perf_counter() - began)

    def _save_epoch(self, record: dict) -> None:
        """Write log, checkpoint and best weights of an epoch; move to the next one."""
        began = time.perf_counter()
        host = checkpoint.to_host(self.model.state_dict())
        self._require_finite(host)
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
                # Weights first: a checkpoint never names best weights that are not on disk.
                content = {"state_dict": host, **about, "config": self.config.as_dict()}
                checkpoint.save(content, self.folder / checkpoint.WEIGHTS)
        self._write(host, **about)
        self.epoch, self.step, self._total, self._seconds = self.epoch + 1, 0, torch.zeros(1), 0.0
        self.session.saved(time.perf_counter() - began)

    def _write(self, host: dict[str, Tensor], **about) -> None:
        # In every process, like the weights: a copy runs what is pending, which may involve all.
        optimizer = checkpoint.to_host(self.optimizer.state_dict())
        if not self.backend.is_main_process:
            return
        content = {"net": host, "optimizer": optimizer, "best": self.best, **about}
        checkpoint.save_newest({**content, "config": self.config.as_dict()}, self.folder)
        self.saved()

    def _require_one_position(self) -> None:
        """With several processes: require that all continue from the same checkpoint.

        Raises:
            RuntimeError: they do not; they would deadlock in a collective.
        """
        # The largest of each, and with the sign the smallest. All numbers are exchanged before one
        # is compared: a process that raised in between would leave the others waiting.
        mine = [self.epoch, self.step, -self.epoch, -self.step]
        if [self.backend.max_over_processes(number) for number in mine] != mine:
            raise RuntimeError(
                f"the hosts resume from different checkpoints (this one from epoch {self.epoch}, "
                f"step {self.step}): copy the first host's run folder to --backup, which all see"
            )

    def _mean_over_processes(self, value: Tensor) -> Tensor:
        """Return the mean of a host vector (N,) of all processes that hold a shard."""
        return self.backend.sum_over_processes(value) / self.backend.output_shard.count

    def _require_finite(self, host: dict[str, Tensor]) -> None:
        """Check what is about to be saved; all processes see the same values.

        Raises:
            TrainingDiverged: names the first tensor that holds NaN or infinity.
        """
        for name, value in host.items():
            if value.is_floating_point() and not value.isfinite().all():
                raise self._diverged(f"{name} is not finite")

    def _diverged(self, what: str) -> TrainingDiverged:
        lr = self.config.lr
        if (self.folder / checkpoint.CHECKPOINT).exists():
            fix = f"continue from the last checkpoint with --resume {self.folder} --lr {lr / 10:g}"
        else:
            fix = f"start again with a smaller one, such as --lr {lr / 10:g}"
        return TrainingDiverged(
            f"training has diverged: {what} in epoch {self.epoch + 1}, with --lr {lr:g}; nothing "
            f"of it was saved: {fix}"
        )


def bytes_of_a_run(widths: tuple[int, ...], depths: tuple[int, ...]) -> int:
    """Return the disk space of a run: checkpoints (weights, Adagrad's sums), best weights, plots.

    Two checkpoints are kept, and a file is replaced only when its successor is complete.
    """
    with torch.device("meta"):
        model: nn.Module = MSHNet(widths=widths, depths=depths)
    weights = sum(value.nbytes for value in model.state_dict().values())
    return 3 * (2 * weights) + 2 * weights + 5_000_000


def _digest(state: dict[str, Tensor]) -> bytes:
    """Return the SHA-256 of a state_dict's values."""
    hashed = hashlib.sha256()
    for value in state.values():
        hashed.update(value.contiguous().numpy().data)
    return hashed.digest()


def _require_loaders(batches: Iterable[list[Tensor]]) -> Iterator[list[Tensor]]:
    """Yield the batches.

    Raises:
        Failed: a loader process was killed.
    """
    try:
        yield from batches
    except (ConnectionError, EOFError, RuntimeError) as error:
        cause: Exception = error
        if not isinstance(error, RuntimeError):
            # The connection broke before the signal of the process's end has arrived. torch's
            # handler raises then: here, and not later in the middle of the message.
            try:
                time.sleep(1)
            except RuntimeError as signalled:
                cause = signalled
        elif "DataLoader worker (pid" not in str(error):
            raise
        reason = (str(cause).splitlines() or [type(cause).__name__])[0].strip(" .")
        raise Failed(
            f"a loader process was killed ({reason}): the machine may be out of memory; use fewer "
            "--workers or --cache disk, and continue with --resume",
            "loader-killed",
        ) from cause


def _step_seed(seed: int, epoch: int, step: int) -> int:
    """Return the seed of one step's random numbers (dropout), 2 to 2**32 + 1."""
    return 2 + int(np.random.SeedSequence([seed, epoch, step]).generate_state(1)[0])


def _optimizer_state(resume: dict | None, lr: float) -> dict | None:
    """Return the checkpoint's optimizer state, with the request's learning rate."""
    if not resume:
        return None
    try:
        state = resume["optimizer"]
        for group in state["param_groups"]:
            group["lr"] = lr
    except (KeyError, TypeError) as error:
        raise RequestError(
            f"{checkpoint.CHECKPOINT} is damaged: its optimizer state lacks {error}",
            "damaged-checkpoint",
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
