"""Draw docs/detections.jpg: a narrow MSHNet, trained on built-in scenes for a few minutes."""

from pathlib import Path

from matplotlib.figure import Figure

from mshnet import MSHNet, api, plots
from mshnet.data.layout import DataFolder
from mshnet.data.loader import EvaluationSet, evaluation_loader
from mshnet.data.sample_cache import SampleCache
from mshnet.data.scenes import write_scenes
from mshnet.training import backend as backends
from mshnet.training.checkpoint import load_weights
from mshnet.training.evaluation import evaluate
from mshnet.training.step import Normalize

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "picture"
SIZE, EPOCHS, BATCH = 96, 40, 8
NETWORK = {"widths": (16, 16, 32, 32, 32), "depths": (1, 1, 1, 1, 1)}
SHOWN = 6  # the first of the test split, as they come


def train(data: Path) -> None:
    """The warm-up phase only, which in so few epochs learns sooner."""
    sizes = {"base_size": SIZE, "crop_size": SIZE, "batch_size": BATCH}
    phase = {"epochs": EPOCHS, "warm_epoch": EPOCHS}
    where = {"dataset_dir": str(data), "save_dir": str(WORK / "run"), "device": "cpu"}
    api.train(NETWORK | sizes | phase | where | {"workers": 0})


def main() -> None:
    data = write_scenes(WORK / "scenes", train=240, test=40, size=SIZE)
    weights = WORK / "run" / "weight.pkl"
    if not weights.exists():
        train(data)
    model, normalize, backend = MSHNet(**NETWORK), Normalize(), backends.make_backend("cpu")
    full = load_weights(model, weights)
    scenes = EvaluationSet(SampleCache(DataFolder(data).samples("test")), SIZE)
    loader, logits = evaluation_loader(scenes, BATCH, workers=0), []
    evaluate(model, normalize, backend, loader, full, look=lambda first, rows: logits.extend(rows))
    figure = Figure(figsize=(12, 2.1), layout="constrained")
    for number, axis in enumerate(figure.subplots(1, SHOWN)):
        image, mask = scenes[number]
        axis.imshow(image[0], cmap="gray")
        plots.mark(axis, mask[0].numpy() != 0, logits[number][0].numpy() > 0)
        axis.set(xticks=[], yticks=[])
    figure.savefig(ROOT / "docs" / "detections.jpg", dpi=110)


if __name__ == "__main__":
    main()
