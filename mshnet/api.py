"""The functions behind the commands: check the request, open data and device, run, report.

They raise :class:`~tpuscope.errors.RequestError` before any work if a request is wrong.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tpuscope.engine import replicas
from tpuscope.engine.processes import Processes, joined
from tpuscope.errors import RequestError
from tpuscope.files import require_writable
from tpuscope.progress import hide_progress

from . import plots
from .data import source
from .data.augment import resize
from .data.layout import DataFolder
from .data.loader import EvaluationSet, evaluation_loader
from .data.sample_cache import SampleCache
from .data.stage import stage
from .metrics import DetectionMetrics
from .model import MSHNet
from .predict import Detection, check_images, find_images, predict
from .training import backend as backends
from .training import checkpoint, run_dir
from .training.backup import Backup
from .training.config import Config, default_batch_size
from .training.devices import resolve_device
from .training.evaluation import evaluate, protocol, result_line
from .training.preemption import Session, signals
from .training.resume import AUTO, settings
from .training.step import Normalize
from .training.trainer import Trainer, TrainingDiverged, bytes_of_a_run
from .training.training_state import recorded_config

Log = Callable[[str], None]


@dataclass(frozen=True)
class _Run:
    """A training run whose request has been checked; it is pickled for replicas."""

    config: Config
    folder: Path
    data: Path
    resume: Path | None  # the checkpoint to continue from


def train(overrides: dict, resume: str | None = None, log: Log = print) -> dict:
    """Train, then draw curves and examples.

    Args:
        overrides: settings by the field names of :class:`~mshnet.training.config.Config`.
        resume: a run to continue, see :func:`mshnet.training.resume.settings`; its settings apply
            unless overridden.
        log: receives messages for people; a module's function, so that replicas can unpickle it.

    Returns:
        The best epoch's line of ``metrics.jsonl``, with ``run`` naming the folder and ``stopped``
        the reason why training ended early, or None.

    Raises:
        RequestError: the request cannot be fulfilled; nothing has been trained then.
        TrainingDiverged: the loss or the weights are no longer finite.
        ReplicaFailed: a replica of ``strategy="launch"`` failed; all have been ended.
    """
    started = time.monotonic()
    with joined() as group:
        log = _log_of(group, log)
        with signals(log) as stop_requested:
            return _train_together(group, overrides, resume, started, stop_requested, log)


def _train_together(
    group: Processes,
    overrides: dict,
    resume: str | None,
    started: float,
    stop_requested: Callable[[], str | None],
    log: Log,
) -> dict:
    """Run :func:`train` in one process of a group, which may be the only one.

    Only the main process reads and writes the run's folder. What can fail before training is done
    in turns that end together, so that no process waits for one that has refused the request.
    """
    _require_same_request(group, overrides, resume)
    config, checkpoint_path, state = group.from_main(lambda: settings(overrides, resume, log))

    def check() -> tuple[Config, str]:
        # Cheap checks first, so that a typing error is reported before a device is opened.
        place = resolve_device(config.device, config.num_cores, config.strategy, config.engine)
        checked = config
        if state is None:
            checked = _with_batch_size(config, overrides, log, *_sharers(config, group))
        checked.require_even_shares(*_sharers(config, group))
        return checked, place

    config, place = group.together(check)
    data_folder = group.first_on_each_machine(lambda: _data_folder(config, ("train", "test"), log))
    _require_same_data(group, place, data_folder)
    if config.weight_path:
        group.together(lambda: _model(config, config.weight_path or ""))
    size = bytes_of_a_run(config.widths, config.depths)
    run_folder, created = group.from_main(
        lambda: run_dir.claim(
            config.save_dir, size, resuming=state is not None, auto=resume == AUTO
        )
    )
    config = dataclasses.replace(config, save_dir=str(run_folder))
    run = _Run(_with_absolute_paths(config), run_folder, data_folder, checkpoint_path)
    try:
        if checkpoint_path:
            epochs, steps = checkpoint.position(state or {})
            where = f"epoch {epochs}" + (f" and {steps} steps" if steps else "")
            log(f"resuming {run_folder} after {where}, from {checkpoint_path}")
        if config.num_cores > 1 and config.strategy == "launch":
            return _launch_replicas(run, place, started, stop_requested, log)
        run = _sharing_a_machine(run, group.local_count)
        stores = group.first_on_each_machine(lambda: _open_splits(run, log))
        session = Session(config.save_minutes, config.max_minutes, stop_requested, started)
        return _train(run, stores, _backend(config, log), state, session, log)
    finally:
        if group.is_main:
            run_dir.release(run_folder, created)


def _log_of(group: Processes, log: Log) -> Log:
    """Return where a process's messages go: the main process reports for all."""
    if group.is_main:
        return log
    hide_progress()
    return _silent


def _sharers(config: Config, group: Processes) -> tuple[int, str]:
    """Return how many share the global batch, and what they are."""
    return (config.num_cores, "cores") if group.count == 1 else (group.count, "processes")


def _require_same_request(group: Processes, overrides: dict, resume: str | None = None) -> None:
    """Require that all processes were started with the same flags.

    Raises:
        RequestError: names what differs.
    """
    own = {**overrides, "resume": resume}
    main = group.from_main(lambda: own)

    def compare() -> None:
        for name in sorted(own.keys() | main.keys()):
            if repr(own.get(name)) != repr(main.get(name)):  # NaN is not equal to itself
                raise RequestError(
                    f"--{name.replace('_', '-')} is {own.get(name)} here and {main.get(name)} in "
                    "process 0; start torchrun with the same command on every machine",
                    "different-requests",
                )

    group.together(compare)


def _require_same_data(
    group: Processes, place: str, folder: Path, splits: Sequence[str] = ("train", "test")
) -> None:
    """Require one kind of device, and a data set of the same samples, in all processes.

    Raises:
        RequestError: they differ; the processes would take different numbers of steps.
    """
    if group.count == 1:
        return
    data = DataFolder(folder)
    own = place, *([sample.name for sample in data.samples(split)] for split in splits)
    main = group.from_main(lambda: own)

    def compare() -> None:
        if own[0] != main[0]:
            raise RequestError(
                f"--device: this machine would train on {place} and the first one on {main[0]}; "
                "name one that all have, such as --device cpu",
                "different-devices",
            )
        if own != main:
            raise RequestError(
                f"{folder} on this machine holds other samples than on the first one; copy the "
                "same data set to every machine",
                "different-data",
            )

    group.together(compare)


def _launch_replicas(
    run: _Run, place: str, started: float, stop_requested: Callable[[], str | None], log: Log
) -> dict:
    """Train on several cores with a process for each."""
    config = run.config
    run = _sharing_a_machine(run, config.num_cores)
    _open_splits(run, log)  # damaged files are found here, and decoded once for all
    platform = place.removeprefix("xla:")
    work = (run, started, log)
    try:
        result = replicas.launch(
            _replica, work, config.num_cores, platform, stop_requested, backends.TPU_FLAGS
        )
    except replicas.ReplicaFailed:
        if config.backup:  # the main process may have been ended in a copy
            Backup(run.folder, Path(config.backup), log).close()
        raise
    if isinstance(result, TrainingDiverged):
        raise result
    return result


def _replica(
    replica: replicas.Replicas, run: _Run, started: float, log: Log
) -> dict | TrainingDiverged:
    """Run one replica's share of :func:`train`.

    Returns:
        The result, or the exception of a run that diverged: all replicas see it in the same step
        and end by themselves.
    """
    if replica.ordinal > 0:  # the first one reports for all
        log = _silent
        hide_progress()
    config = run.config
    state = checkpoint.load(run.resume) if run.resume else None
    session = Session(config.save_minutes, config.max_minutes, replica.stop_requested, started)
    backend = _backend(config, log, replica)
    try:
        return _train(run, _open_splits(run, _silent), backend, state, session, log)
    except TrainingDiverged as error:
        return error


def _with_batch_size(config: Config, overrides: dict, log: Log, cores: int, noun: str) -> Config:
    """Choose a global batch that the cores share, unless the request names one."""
    if "batch_size" in overrides:
        return config
    size = default_batch_size(cores, config.batch_size)
    if size != config.batch_size:
        log(
            f"--batch-size {size}: chosen for {cores} {noun}, as none was named (it is the "
            f"smallest multiple of {cores} from the default {config.batch_size} on)"
        )
    return dataclasses.replace(config, batch_size=size)


def _sharing_a_machine(run: _Run, processes: int) -> _Run:
    """Return the run with memory and loader processes divided among a machine's processes.

    Each of them would hold all decoded images; the disk cache's file, mapped into memory, is there
    once for all.
    """
    if processes == 1:
        return run
    cache = "disk" if run.config.cache == "ram" else run.config.cache
    workers = run.config.workers // processes
    return dataclasses.replace(
        run, config=dataclasses.replace(run.config, cache=cache, workers=workers)
    )


def _silent(text: str) -> None:
    """Discard a message: the first replica reports for all."""


def _train(
    run: _Run,
    stores: list[SampleCache],
    backend: backends.Backend,
    state: dict | None,
    session: Session,
    log: Log,
) -> dict:
    """Train and report, in the process that has the device."""
    config = run.config
    backup = None
    if config.backup and backend.is_main_process:
        backup = Backup(run.folder, Path(config.backup), log)
    try:
        saved = backup.request if backup else lambda: None
        trainer = Trainer(config, backend, stores[0], stores[1], run.folder, state, session, saved)
        log(f"run folder: {run.folder}")
        conditions = protocol(config, len(stores[1]), "corrected", "each epoch")
        log(f"tested after each epoch [{conditions}]")
        best = trainer.fit(log)
        if backend.is_main_process and trainer.records:
            plots.curves(trainer.records, run.folder / "curves.png")
        if trainer.stopped:
            log(
                f"stopped by {trainer.stopped} after epoch {trainer.epoch} and {trainer.step} of "
                f"{trainer.steps} steps; continue with --resume {run.folder}"
            )
        else:
            _show(run, trainer, stores[1], log)
    except (KeyboardInterrupt, SystemExit):
        raise  # a second signal ends at once, also where Drive hangs
    except BaseException:
        if backup:
            backup.close()
        raise
    if backup:
        backup.close()
    return {**(best or {}), "run": str(run.folder), "stopped": trainer.stopped}


def _show(run: _Run, trainer: Trainer, store: SampleCache, log: Log) -> None:
    """Report results and pictures of the best weights."""
    config, weights, best = run.config, run.folder / checkpoint.WEIGHTS, trainer.best
    assert best is not None, "a finished run has trained an epoch"
    # A new network: weights loaded into the old one would be another graph.
    model = MSHNet(widths=config.widths, depths=config.depths)
    checkpoint.fill(model, trainer.best_weights, weights)
    trainer.backend.move(model)
    full = best["phase"] == "full"
    metrics, shown = _evaluate(config, model, trainer.backend, store, full)
    if trainer.backend.is_main_process:
        _draw_examples(store, shown, config.base_size, run.folder / "examples.png")
    choice = f"epoch {best['epoch'] + 1} of {config.epochs}, the best IoU on test"
    _results(metrics, config, choice, log)
    log(f"weights:  {weights}")
    log(f"log:      {run.folder / run_dir.LOG}")
    log(f"pictures: {run.folder / 'curves.png'} and examples.png beside it")


def test(overrides: dict, log: Log = print) -> dict:
    """Evaluate a weight file on the test split.

    Args:
        overrides: settings by the field names of :class:`~mshnet.training.config.Config`.
        log: receives messages for people.

    Returns:
        For each definition the results of ``DetectionMetrics.compute`` and their ``protocol``.

    Raises:
        RequestError: the request cannot be fulfilled.
    """
    with joined() as group:
        return _test_together(group, overrides, _log_of(group, log))


def _test_together(group: Processes, overrides: dict, log: Log) -> dict:
    """Run :func:`test` in one process of a group, which may be the only one."""
    _require_same_request(group, overrides)

    def check() -> tuple[Config, str, MSHNet, bool]:
        config = _for_weights(overrides, "the weights to evaluate")
        place = resolve_device(config.device, config.num_cores, engine=config.engine)
        config = _with_batch_size(config, overrides, log, *_sharers(config, group))
        config.require_even_shares(*_sharers(config, group))
        return config, place, *_model(config, overrides["weight_path"])

    config, place, model, full = group.together(check)
    data_folder = group.first_on_each_machine(lambda: _data_folder(config, ("test",), log))
    _require_same_data(group, place, data_folder, ("test",))
    store = group.together(lambda: _open(data_folder, "test", config, log))
    # A larger batch would only be padding.
    sharers, _ = _sharers(config, group)
    size = min(config.batch_size, default_batch_size(sharers, len(store)))
    config = dataclasses.replace(config, batch_size=size)
    backend = _backend(config, log)
    backend.move(model)
    metrics, _ = _evaluate(config, model, backend, store, full)
    return _results(metrics, config, f"weights {config.weight_path}", log)


def predict_files(
    overrides: dict, inputs: Sequence[str], out: Path, log: Log = print
) -> list[Detection]:
    """Detect targets in image files; see :func:`mshnet.predict.predict`.

    Args:
        overrides: settings by the field names of :class:`~mshnet.training.config.Config`.
        inputs: files, folders and glob patterns.
        out: folder of the results.
        log: receives messages for people.

    Returns:
        One row for each detection.

    Raises:
        RequestError: the request cannot be fulfilled.
    """
    with joined() as group:
        group.together(lambda: _require_one_process(group))
    config = _for_weights(overrides, "trained weights, such as weight/MSHNet-…/weight.pkl")
    paths = find_images(inputs)
    if (out / "images").exists():
        raise RequestError(
            f"--out {out} is a data set (it has images/), whose masks would be overwritten; "
            "choose another folder",
            "overwrites-data",
        )
    check_images(paths, out)
    require_writable("--out", out)
    model, full = _model(config, overrides["weight_path"])
    backend = _backend(config, log)
    model.fold = backend.default_fold(config)
    backend.move(model)
    batch_size = min(config.batch_size, len(paths))
    rows = predict(model, backend, paths, out, config.base_size, config.channels, full, batch_size)
    log(f"{len(rows)} detections in {len(paths)} images: {out / 'detections.csv'}")
    log(f"pictures: {out / 'overlays'}, masks: {out / 'masks'}")
    return rows


def _require_one_process(group: Processes) -> None:
    if group.count > 1:
        raise RequestError(
            "predict works in one process, and torchrun has started "
            f"{group.count}; start it without torchrun",
            "torchrun-predict",
        )


def _for_weights(overrides: dict, purpose: str) -> Config:
    """Return settings for using weights: image size and network are those of their training."""
    if not overrides.get("weight_path"):
        raise RequestError(f"--weight-path is missing: name {purpose}", "no-weights")
    path = overrides["weight_path"]
    recorded = recorded_config(checkpoint.load(path), path)
    names = ("base_size", "channels", "widths", "depths")
    return Config.from_dict({k: recorded[k] for k in names if k in recorded} | overrides)


def _with_absolute_paths(config: Config) -> Config:
    """Return the settings with absolute paths: the run can be resumed from another folder."""
    names = ("dataset_dir", "weight_path", "compile_cache", "backup", "save_dir")
    paths = {name: path for name in names if (path := getattr(config, name))}
    absolute = {name: str(Path(path).resolve()) for name, path in paths.items()}
    return dataclasses.replace(config, **absolute)


def _data_folder(config: Config, splits: Sequence[str], log: Log) -> Path:
    """Return the data set's folder, with its lists and files checked."""
    if config.dataset_dir is None:
        log("no --dataset-dir: using built-in synthetic scenes")
        path = source.built_in_scenes(config.base_size)
    elif config.stage:
        path = stage(config.dataset_dir)
        log(f"{config.dataset_dir} is staged in {path}")
    else:
        path = Path(config.dataset_dir)
    data = DataFolder(path)
    for split in splits:
        count = len(data.samples(split))
        if split == "train" and config.batch_size > count:
            raise RequestError(
                f"--batch-size {config.batch_size} is larger than the training split of {path} "
                f"({count} images); use at most {count}",
                "batch-too-large",
            )
    return path


def _open(path: Path, split: str, config: Config, log: Log) -> SampleCache:
    store = source.open_split(path, split, config.channels, config.cache)
    log(f"{path} {source.describe(store, split)}")
    return store


def _open_splits(run: _Run, log: Log) -> list[SampleCache]:
    return [_open(run.data, split, run.config, log) for split in ("train", "test")]


def _backend(
    config: Config, log: Log, replica: replicas.Replicas | None = None
) -> backends.Backend:
    backend = backends.make_backend(
        config.device,
        config.num_cores,
        config.precision,
        config.compile_cache,
        replica,
        config.engine,
    )
    config.require_even_shares(backend.cores)  # with several hosts, more than num_cores
    log(f"device: {backend.label}, {config.precision}")
    return backend


def _model(config: Config, weights: str | Path) -> tuple[MSHNet, bool]:
    """Return the network with weights, on the host, and whether its fused head is trained."""
    model = MSHNet(widths=config.widths, depths=config.depths)
    return model, checkpoint.load_weights(model, weights)


def _evaluate(
    config: Config, model: MSHNet, backend: backends.Backend, store: SampleCache, full: bool
) -> tuple[DetectionMetrics, dict[int, torch.Tensor]]:
    """Return metrics of a split, and logits of its first images by index, for a picture."""
    model.fold = backend.default_fold(config)
    dataset = EvaluationSet(store, config.base_size)
    loader = evaluation_loader(dataset, config.batch_size, 0, backend.input_shard)
    normalize = Normalize()
    backend.move(normalize)
    shown: dict[int, torch.Tensor] = {}

    def look(first: int, logits: torch.Tensor) -> None:
        room = plots.SHOWN - len(shown)
        shown.update({first + i: row for i, row in enumerate(logits[:room])})

    return evaluate(model, normalize, backend, loader, full, look), shown


def _draw_examples(
    store: SampleCache, logits: dict[int, torch.Tensor], size: int, path: Path
) -> None:
    pairs = [resize(*store[i], size) for i in logits]
    plots.examples(
        images=[image for image, _ in pairs],
        masks=[mask != 0 for _, mask in pairs],
        predictions=[(x[0] > 0).numpy() for x in logits.values()],
        names=[store.samples[i].name for i in logits],
        path=path,
    )


def _results(metrics: DetectionMetrics, config: Config, choice: str, log: Log) -> dict:
    """Log and return the results by both definitions, each with its protocol."""
    results = {}
    for definition in ("corrected", "official"):
        conditions = protocol(config, metrics.images, definition, choice)
        log(result_line(metrics, definition, conditions))
        results[definition] = metrics.compute(definition) | {"protocol": conditions}
    return results
