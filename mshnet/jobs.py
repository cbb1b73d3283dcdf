"""The jobs behind the commands: check the request, open data and device, do it, say where it is."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import plots
from .data import source
from .data.augment import resize
from .data.decode import open_image
from .data.feed import EvaluationSet, evaluation_loader
from .data.layout import DataFolder
from .data.stage import stage
from .data.store import SampleStore
from .errors import RequestError
from .metrics import DEFINITIONS, DetectionMetrics
from .model import MSHNet
from .predict import Detection, find_images, predict
from .progress import hide_progress, progress
from .training import backend as backends
from .training import checkpoint, folder
from .training.backup import Backup
from .training.config import Config
from .training.evaluation import evaluate, protocol, result_line
from .training.resume import settings
from .training.session import Session, signals
from .training.step import Normalize
from .training.trainer import Trainer, bytes_of_a_run
from .xla import launch

Say = Callable[[str], None]


@dataclass(frozen=True)
class _Run:
    """A training run whose request has been checked; replicas receive it."""

    config: Config
    folder: Path
    data: Path
    resume: Path | None  # checkpoint


def train(given: dict, resume: str | None = None, say: Say = print) -> dict:
    """Train, then draw curves and examples.

    Args:
        given: settings by the field names of :class:`~mshnet.training.config.Config`.
        resume: a run to continue, see :func:`mshnet.training.resume.settings`; its settings hold
            unless given.
        say: takes messages for people; a module's function, so that replicas can have it.

    Returns:
        The best epoch's line of ``metrics.jsonl``, with ``run`` naming the folder and ``stopped``
        the reason why training ended early, or None.

    Raises:
        RequestError: the request cannot be fulfilled; nothing has been trained then.
        ReplicaFailed: a replica of ``strategy="launch"`` failed; all have been ended.
    """
    started = time.monotonic()
    with signals(say) as stop_requested:
        config, checkpoint_path, state = settings(given, resume, say)
        # Cheap checks first: nobody waits for a device to learn of a typing error.
        place = backends.locate(config.device, config.num_cores, config.strategy)
        require_shares(config, config.num_cores)
        data_folder = _data_folder(config, ("train", "test"), say)
        if config.weight_path:
            _model(config, config.weight_path)
        size = bytes_of_a_run(config.widths, config.depths)
        run_folder, created = folder.claim(config.save_dir, size, resuming=state is not None)
        run = _Run(_with_absolute_paths(config), run_folder, data_folder, checkpoint_path)
        try:
            if checkpoint_path:
                epochs, steps = checkpoint.position(state)
                where = f"epoch {epochs}" + (f" and {steps} steps" if steps else "")
                say(f"resuming {run_folder} after {where}, from {checkpoint_path}")
            if config.num_cores > 1 and config.strategy == "launch":
                run = _for_replicas(run)
                _open_splits(run, say)  # damaged files are found here, and decoded once for all
                platform = place.removeprefix("xla:")
                work = (run, started, say)
                try:
                    return launch.launch(_replica, work, config.num_cores, platform, stop_requested)
                except launch.ReplicaFailed:
                    if config.backup:  # the writer was ended in the middle of a copy, perhaps
                        Backup(run.folder, Path(config.backup), say).close()
                    raise
            stores = _open_splits(run, say)
            session = Session(config.save_minutes, config.max_minutes, stop_requested, started)
            return _train(run, stores, _backend(config, say), state, session, say)
        finally:
            if created:
                folder.release(run_folder)


def _replica(replicas: launch.Replicas, run: _Run, started: float, say: Say) -> dict:
    """One replica's share of :func:`train`."""
    if replicas.ordinal > 0:  # one speaks for all
        say = _silent
        hide_progress()
    config = run.config
    state = checkpoint.load(run.resume) if run.resume else None
    session = Session(config.save_minutes, config.max_minutes, replicas.stop_requested, started)
    backend = _backend(config, say, replicas)
    return _train(run, _open_splits(run, _silent), backend, state, session, say)


def _for_replicas(run: _Run) -> _Run:
    """Memory and loader processes are shared by the replicas.

    Each of them would hold all decoded images; in the disk cache's file, mapped into memory, they
    are there once.
    """
    cache = "disk" if run.config.cache == "ram" else run.config.cache
    workers = run.config.workers // run.config.num_cores
    return dataclasses.replace(
        run, config=dataclasses.replace(run.config, cache=cache, workers=workers)
    )


def _silent(text: str) -> None:
    """Says nothing: one replica speaks for all."""


def _train(
    run: _Run,
    stores: list[SampleStore],
    backend: backends.Backend,
    state: dict | None,
    session: Session,
    say: Say,
) -> dict:
    """Train and show, in the process that has the device."""
    config = run.config
    backup = None
    if config.backup and backend.writer:
        backup = Backup(run.folder, Path(config.backup), say)
    try:
        saved = backup.request if backup else lambda: None
        trainer = Trainer(config, backend, *stores, run.folder, state, session, saved)
        say(f"run folder: {run.folder}")
        conditions = protocol(config, len(stores[1]), "corrected", "each epoch")
        say(f"tested after each epoch [{conditions}]")
        best = trainer.fit(say)
        if backend.writer and trainer.records:
            plots.curves(trainer.records, run.folder / "curves.png")
        if trainer.stopped:
            say(
                f"stopped by {trainer.stopped} after epoch {trainer.epoch} and {trainer.step} of "
                f"{trainer.steps} steps; go on with --resume {run.folder}"
            )
        else:
            _show(run, trainer, stores[1], best, say)
    except (KeyboardInterrupt, SystemExit):
        raise  # a second signal ends at once, also where Drive hangs
    except BaseException:
        if backup:
            backup.close()
        raise
    if backup:
        backup.close()
    return {**(best or {}), "run": str(run.folder), "stopped": trainer.stopped}


def _show(run: _Run, trainer: Trainer, store: SampleStore, best: dict, say: Say) -> None:
    """Numbers and pictures of the best weights."""
    config, weights = run.config, run.folder / checkpoint.WEIGHTS
    # A new one: loaded in place it would be another graph.
    model = MSHNet(widths=config.widths, depths=config.depths)
    checkpoint.fill(model, trainer.best_weights, weights)
    trainer.backend.move(model)
    full = best["phase"] == "full"
    metrics, shown = _evaluate(config, model, trainer.backend, store, full)
    if trainer.backend.writer:
        _draw_examples(store, shown, config.base_size, run.folder / "examples.png")
    choice = f"epoch {best['epoch'] + 1} of {config.epochs}, the best IoU on test"
    _results(metrics, config, choice, say)
    say(f"weights:  {weights}")
    say(f"log:      {run.folder / folder.LOG}")
    say(f"pictures: {run.folder / 'curves.png'} and examples.png beside it")


def test(given: dict, say: Say = print) -> dict:
    """Evaluate a weight file on the test split.

    Returns:
        For each definition the numbers of ``DetectionMetrics.compute`` and their ``protocol``.

    Raises:
        RequestError: the request cannot be fulfilled.
    """
    config = _for_weights(given, "the weights to evaluate")
    backends.locate(config.device, config.num_cores)
    require_shares(config, config.num_cores)
    model, full = _model(config, config.weight_path)
    store = _open(_data_folder(config, ("test",), say), "test", config, say)
    backend = _backend(config, say)
    backend.move(model)
    metrics, _ = _evaluate(config, model, backend, store, full)
    return _results(metrics, config, f"weights {config.weight_path}", say)


def predict_files(
    given: dict, inputs: Sequence[str], out: Path, say: Say = print
) -> list[Detection]:
    """Detect targets in image files; see :func:`mshnet.predict.predict`.

    Raises:
        RequestError: the request cannot be fulfilled.
    """
    config = _for_weights(given, "trained weights, such as weight/MSHNet-…/weight.pkl")
    paths = find_images(inputs)
    if (out / "images").exists():
        raise RequestError(
            f"--out {out} is a data set (it has images/), whose masks would be overwritten; "
            "choose another folder"
        )
    folder.require_writable("--out", out)
    for path in progress(paths, "check images"):
        open_image(path)
    model, full = _model(config, config.weight_path)
    backend = _backend(config, say)
    model.fold = backend.fold(config)
    backend.move(model)
    batch_size = min(config.batch_size, len(paths))
    rows = predict(model, backend, paths, out, config.base_size, config.channels, full, batch_size)
    say(f"{len(rows)} detections in {len(paths)} images: {out / 'detections.csv'}")
    say(f"pictures: {out / 'overlays'}, masks: {out / 'masks'}")
    return rows


def _for_weights(given: dict, wanted: str) -> Config:
    """Settings for using weights: image size and network are those they were trained with."""
    if not given.get("weight_path"):
        raise RequestError(f"--weight-path is missing: name {wanted}")
    recorded = checkpoint.load(given["weight_path"]).get("config")
    recorded = recorded if isinstance(recorded, dict) else {}
    names = ("base_size", "channels", "widths", "depths")
    return Config.from_dict({k: recorded[k] for k in names if k in recorded} | given)


def _with_absolute_paths(config: Config) -> Config:
    """So that a run can be resumed from another working folder."""
    names = ("dataset_dir", "weight_path", "compile_cache", "backup")
    given = {name: getattr(config, name) for name in names}
    paths = {name: str(Path(path).resolve()) for name, path in given.items() if path}
    return dataclasses.replace(config, **paths)


def _data_folder(config: Config, splits: Sequence[str], say: Say) -> Path:
    """The data set's folder; its lists and files are there."""
    if config.dataset_dir is None:
        say("no --dataset-dir: using built-in synthetic scenes")
        path = source.built_in_scenes(config.base_size)
    elif config.stage:
        path = stage(config.dataset_dir)
        say(f"{config.dataset_dir} is staged in {path}")
    else:
        path = Path(config.dataset_dir)
    data = DataFolder(path)
    for split in splits:
        count = len(data.samples(split))
        if split == "train" and config.batch_size > count:
            raise RequestError(
                f"--batch-size {config.batch_size} is larger than the training split of {path} "
                f"({count} images); use at most {count}"
            )
    return path


def _open(path: Path, split: str, config: Config, say: Say) -> SampleStore:
    store = source.open_split(path, split, config.channels, config.cache)
    say(f"{path} {source.describe(store, split)}")
    return store


def require_shares(config: Config, cores: int) -> None:
    """Every core gets the same number of images of a global batch.

    Raises:
        RequestError: they do not come out even.
    """
    if config.batch_size % cores:
        near = config.batch_size // cores * cores
        choices = " or ".join(str(n) for n in (near, near + cores) if n)
        raise RequestError(
            f"--batch-size {config.batch_size}: it is the global batch, shared by {cores} cores, "
            f"and must be a multiple of {cores}; use {choices}"
        )


def _open_splits(run: _Run, say: Say) -> list[SampleStore]:
    return [_open(run.data, split, run.config, say) for split in ("train", "test")]


def _backend(config: Config, say: Say, replicas: launch.Replicas | None = None) -> backends.Backend:
    backend = backends.choose(
        config.device, config.num_cores, config.precision, config.compile_cache, replicas
    )
    require_shares(config, backend.cores)  # with several hosts these are more than num_cores
    say(f"device: {backend.label}, {config.precision}")
    return backend


def _model(config: Config, weights: str | Path) -> tuple[MSHNet, bool]:
    """The network with weights, on the host, and whether its fused head is trained."""
    model = MSHNet(widths=config.widths, depths=config.depths)
    return model, checkpoint.load_weights(model, weights)


def _evaluate(
    config: Config, model: MSHNet, backend: backends.Backend, store: SampleStore, full: bool
) -> tuple[DetectionMetrics, dict[int, torch.Tensor]]:
    """Metrics of a split, and the logits of some of its first images, by index, for a picture."""
    model.fold = backend.fold(config)
    dataset = EvaluationSet(store, config.base_size)
    loader = evaluation_loader(dataset, config.batch_size, 0, backend.loads)
    normalize = Normalize()
    backend.move(normalize)
    shown: dict[int, torch.Tensor] = {}

    def look(first: int, logits: torch.Tensor) -> None:
        room = plots.SHOWN - len(shown)
        shown.update({first + i: row for i, row in enumerate(logits[:room])})

    return evaluate(model, normalize, backend, loader, full, look), shown


def _draw_examples(
    store: SampleStore, logits: dict[int, torch.Tensor], size: int, path: Path
) -> None:
    pairs = [resize(*store[i], size) for i in logits]
    plots.examples(
        images=[image for image, _ in pairs],
        masks=[mask != 0 for _, mask in pairs],
        predictions=[(x[0] > 0).numpy() for x in logits.values()],
        names=[store.samples[i].name for i in logits],
        path=path,
    )


def _results(metrics: DetectionMetrics, config: Config, choice: str, say: Say) -> dict:
    """Both definitions, said and returned, each with its protocol."""
    results = {}
    for definition in DEFINITIONS:
        conditions = protocol(config, metrics.images, definition, choice)
        say(result_line(metrics, definition, conditions))
        results[definition] = metrics.compute(definition) | {"protocol": conditions}
    return results
