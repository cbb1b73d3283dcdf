"""Draw README's picture with what lesson 08 trained: run that lesson, then this."""

from pathlib import Path

from matplotlib.figure import Figure

from mshnet import MSHNet, plots
from mshnet.data.feed import EvaluationSet, evaluation_loader
from mshnet.data.layout import DataFolder
from mshnet.data.store import SampleStore
from mshnet.training import backend as backends
from mshnet.training.checkpoint import load, load_weights
from mshnet.training.evaluation import evaluate
from mshnet.training.step import Normalize

ROOT = Path(__file__).resolve().parent.parent
RUN, DATA = ROOT / "solved" / "run-08" / "weight.pkl", ROOT / "solved" / "scenes-08"
SHOWN = 6


def main() -> None:
    trained = load(RUN)["config"]
    model = MSHNet(widths=trained["widths"], depths=trained["depths"])
    full = load_weights(model, RUN)
    scenes = EvaluationSet(SampleStore(DataFolder(DATA).samples("test")), trained["base_size"])
    logits = []
    evaluate(
        model,
        Normalize(),
        backends.choose("cpu"),
        evaluation_loader(scenes, 8, workers=0),
        full,
        look=lambda first, rows: logits.extend(rows),
    )
    figure = Figure(figsize=(12, 2.1), layout="constrained")
    for number, axis in enumerate(figure.subplots(1, SHOWN)):
        image, mask = scenes[number]
        axis.imshow(image[0], cmap="gray")
        plots.mark(axis, mask[0].numpy() != 0, logits[number][0].numpy() > 0)
        axis.set(xticks=[], yticks=[])
    figure.savefig(ROOT / "docs" / "detections.jpg", dpi=110)


if __name__ == "__main__":
    main()
