"""The jobs behind the commands: check the request, open data and device, do it, say where it is."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from . import plots
from .data import source
from .data.augment import resize
from .data.decode import open_image
from .data.feed import EvaluationSet, evaluation_loader
from .data.layout import DataFolder
from .data.store import SampleStore
from .errors import RequestError
from .metrics import DEFINITIONS, DetectionMetrics
from .model import MSHNet
from .predict import Detection, find_images, predict
from .progress import progress
from .training import backend as backends
from .training import checkpoint, folder
from .training.config import Config
from .training.evaluation import evaluate, protocol, result_line
from .training.step import Normalize
from .training.trainer import Trainer, bytes_of_a_run

Say = Callable[[str], None]


def train(given: dict, resume: str | None = None, say: Say = print) -> dict:
    """Train, then draw curves and examples.

    Args:
        given: settings by the field names of :class:`~mshnet.training.config.Config`.
        resume: folder or checkpoint of a run to continue; its settings hold unless given.
        say: takes messages for people.

    Returns:
        The best epoch's line of ``metrics.jsonl``, with ``run`` naming the folder.

    Raises:
        RequestError: the request cannot be fulfilled; nothing has been trained then.
    """
    config, state = _settings(given, resume)
    # Cheap checks first: nobody waits for a device to learn of a typing error.
    data_folder = _data_folder(config, ("train", "test"), say)
    if config.weight_path:
        _model(config, config.weight_path)
    size = bytes_of_a_run(config.widths, config.depths)
    run_folder, created = folder.claim(config.save_dir, size, resuming=state is not None)
    try:
        stores = [_open(data_folder, split, config, say) for split in ("train", "test")]
        backend = _backend(config, say)
        trainer = Trainer(_with_absolute_paths(config), backend, *stores, run_folder, state)
    except BaseException:
        if created:
            folder.release(run_folder)
        raise

    if state:
        say(f"resuming {run_folder} after epoch {state['epoch'] + 1}")
    say(f"run folder: {run_folder}")
    conditions = protocol(config, len(stores[1]), "corrected", "each epoch")
    say(f"tested after each epoch [{conditions}]")
    best = trainer.fit(say)

    weights = run_folder / checkpoint.WEIGHTS
    full = checkpoint.load_weights(trainer.model, weights)
    plots.curves(trainer.records, run_folder / "curves.png")
    metrics, shown = _evaluate(config, trainer.model, backend, stores[1], full)
    _draw_examples(stores[1], shown, config.base_size, run_folder / "examples.png")
    choice = f"epoch {best['epoch'] + 1} of {config.epochs}, the best IoU on test"
    _results(metrics, config, choice, say)
    say(f"weights:  {weights}")
    say(f"log:      {run_folder / folder.LOG}")
    say(f"pictures: {run_folder / 'curves.png'} and examples.png beside it")
    return {**best, "run": str(run_folder)}


def test(given: dict, say: Say = print) -> dict:
    """Evaluate a weight file on the test split.

    Returns:
        For each definition the numbers of ``DetectionMetrics.compute`` and their ``protocol``.

    Raises:
        RequestError: the request cannot be fulfilled.
    """
    config = _for_weights(given, "the weights to evaluate")
    model, full = _model(config, config.weight_path)
    store = _open(_data_folder(config, ("test",), say), "test", config, say)
    backend = _backend(config, say)
    model.to(backend.device)
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
    model.to(backend.device)
    batch_size = min(config.batch_size, len(paths))
    rows = predict(model, backend, paths, out, config.base_size, config.channels, full, batch_size)
    say(f"{len(rows)} detections in {len(paths)} images: {out / 'detections.csv'}")
    say(f"pictures: {out / 'overlays'}, masks: {out / 'masks'}")
    return rows


def _settings(given: dict, resume: str | None) -> tuple[Config, dict | None]:
    """The settings of a run, and the checkpoint that it continues."""
    if resume is None:
        return Config(**given), None
    path = Path(resume)
    if path.is_dir():
        path = path / checkpoint.CHECKPOINT
    if not path.exists():
        raise RequestError(f"--resume {resume}: there is no {path}; name the folder of a run")
    state = checkpoint.load(path)
    if not {"net", "optimizer", "epoch", "best", "config"} <= state.keys():
        raise RequestError(
            f"--resume {resume}: {path} holds weights but no training state; start from them with "
            f"--weight-path {path}"
        )
    if not (path.parent / checkpoint.WEIGHTS).exists():
        raise RequestError(
            f"--resume {resume}: the run's best weights, {checkpoint.WEIGHTS}, are not beside "
            f"{path}; copy them there"
        )
    try:
        # The number of workers is the machine's affair, and this may be another machine.
        saved = {k: v for k, v in state["config"].items() if k not in ("workers", "weight_path")}
        config = Config.from_dict(saved | {"save_dir": str(path.parent)} | given)
        done = int(state["epoch"]) + 1
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"--resume {resume}: {path} is damaged ({error})") from error
    own = Config.from_dict(saved | {"save_dir": str(path.parent)}).as_dict()
    for name, value in given.items():
        same = value == own[name] or (
            name == "save_dir" and Path(value).resolve() == path.parent.resolve()
        )
        if not same and name not in _MAY_CHANGE:
            raise RequestError(
                f"--{name.replace('_', '-')} {value}: a resumed run keeps its own ({own[name]}); "
                "leave the flag out, or start a new run"
            )
    if config.epochs < done:
        raise RequestError(f"--epochs {config.epochs}: the run has trained {done} already")
    return config, state


# What a run may do differently after an interruption and still be the same run.
_MAY_CHANGE = (
    "dataset_dir",
    "epochs",
    "lr",
    "device",
    "num_cores",
    "cache",
    "workers",
    "compile_cache",
)


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
    names = ("dataset_dir", "weight_path", "compile_cache")
    given = {name: getattr(config, name) for name in names}
    paths = {name: str(Path(path).resolve()) for name, path in given.items() if path}
    return dataclasses.replace(config, **paths)


def _data_folder(config: Config, splits: Sequence[str], say: Say) -> Path:
    """The data set's folder; its lists and files are there."""
    if config.dataset_dir is None:
        say("no --dataset-dir: using built-in synthetic scenes")
        path = source.built_in_scenes(config.base_size)
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


def _backend(config: Config, say: Say) -> backends.Backend:
    backend = backends.choose(
        config.device, config.num_cores, config.precision, config.compile_cache
    )
    say(f"device: {backend.label}, {config.precision}")
    return backend


def _model(config: Config, weights: str | Path) -> tuple[MSHNet, bool]:
    """The network with weights, on the host, and whether its fused head is trained."""
    model = MSHNet(widths=config.widths, depths=config.depths)
    return model, checkpoint.load_weights(model, weights)


def _evaluate(
    config: Config, model: MSHNet, backend: backends.Backend, store: SampleStore, full: bool
) -> tuple[DetectionMetrics, list[torch.Tensor]]:
    """Metrics of a split, and the logits of its first images for a picture."""
    batch_size = min(config.batch_size, len(store))
    loader = evaluation_loader(EvaluationSet(store, config.base_size), batch_size, 0)
    shown: list[torch.Tensor] = []
    metrics = evaluate(
        model, Normalize().to(backend.device), backend, loader, full, look=shown.extend
    )
    return metrics, shown[: plots.SHOWN]


def _draw_examples(store: SampleStore, logits: list[torch.Tensor], size: int, path: Path) -> None:
    pairs = [resize(*store[i], size) for i in range(len(logits))]
    plots.examples(
        images=[image for image, _ in pairs],
        masks=[mask != 0 for _, mask in pairs],
        predictions=[(x[0] > 0).numpy() for x in logits],
        names=[sample.name for sample in store.samples[: len(logits)]],
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
