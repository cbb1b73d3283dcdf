"""Lab 11: the networks, the GAN step on every path, runs that go on, tiles without seams."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional as F

from labs.super_resolution import benchmark, check, detect, frames, losses, pictures, quality
from labs.super_resolution.cli import main
from labs.super_resolution.networks import Bicubic, Discriminator, Generator
from labs.super_resolution.tiles import Tiling, Upscaler, upscale
from labs.super_resolution.training import (
    CONTENT,
    GENERATOR,
    LOSSES,
    Gan,
    Run,
    Settings,
    load_generator,
    open_backend,
    resumed,
    scaled_rate,
)
from mshnet.training import checkpoint
from mshnet.training.preemption import Session
from tpuscope.engine import torch_xla as runtime
from tpuscope.errors import RequestError

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "size": 32, "crop": 16, "batch_size": 2, "width": 4, "blocks": 1, "expansion": 2,
    "discriminator_width": 4, "content_steps": 2, "steps": 4, "log_every": 2, "device": "cpu",
}  # fmt: skip


def tiny(**changes) -> Settings:
    return Settings(**(TINY | changes))


def scenes(count: int = 4) -> list[np.ndarray]:
    return [frame for frame, _ in frames.pairs(None, "train", 32, count)]


def crops(seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (2, 1, 16, 16), generator=random, dtype=torch.uint8)


def steps(gan: Gan, count: int) -> list[list[float]]:
    """The losses of some GAN steps, read after the last."""
    _, step = gan.compiled_steps()
    results = []
    for seed in range(count):
        sums = gan.backend.to_device(torch.zeros(len(LOSSES)))
        results += step(gan.backend.to_device(crops(seed)), sums)
    return [row.cpu().tolist() for row in results]


# --- networks ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=20)
@given(st.sampled_from((2, 4)), st.integers(1, 12), st.integers(1, 12))
def test_bicubic_as_a_convolution_is_pytorchs_bicubic_at_borders_too(scale, height, width):
    low = torch.rand(1, 1, height, width)
    expected = F.interpolate(low, scale_factor=scale, mode="bicubic", align_corners=False)
    torch.testing.assert_close(Bicubic(scale)(low), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [2, 4])
def test_an_untrained_generator_is_bicubic_interpolation(scale):
    low = torch.rand(2, 1, 9, 12)
    with torch.no_grad():
        made = Generator(scale, width=4, blocks=2)(low)
    torch.testing.assert_close(made, Bicubic(scale)(low), rtol=0, atol=0)


def test_the_discriminator_judges_patches_of_frames_of_any_size():
    network = Discriminator(width=4)
    assert network(torch.rand(2, 1, 32, 48)).shape == (2, 1, 2, 3)
    widths = [m.out_channels for m in network.modules() if isinstance(m, torch.nn.Conv2d)]
    assert widths[:8] == [4, 4, 8, 8, 16, 16, 32, 32], "the paper's 64 to 512, narrower"


def test_the_generator_has_depthwise_convolutions_and_pixel_shuffles():
    layers = list(Generator(4, width=4, blocks=2).modules())
    depthwise = [m for m in layers if isinstance(m, torch.nn.Conv2d) and m.groups > 1]
    assert [m.groups for m in depthwise] == [16, 16]
    assert sum(isinstance(m, torch.nn.PixelShuffle) for m in layers) == 2


# --- losses --------------------------------------------------------------------------------------


def test_the_fixed_features_are_the_same_whatever_was_drawn_before():
    torch.manual_seed(1)
    first = losses.FixedFeatures()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = losses.FixedFeatures()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b) and not a.requires_grad
    assert torch.equal(torch.get_rng_state(), state), "others' random numbers stay as they were"


def test_the_perceptual_loss_is_0_for_the_same_frame_and_grows_with_blur():
    network = losses.FixedFeatures()
    frame = torch.from_numpy(scenes(1)[0])[None, None] / 255
    blurred = [F.avg_pool2d(F.pad(frame, (k,) * 4, mode="replicate"), 2 * k + 1, 1) for k in (1, 2)]
    values = [float(losses.perceptual_loss(network, made, frame)) for made in (frame, *blurred)]
    assert values[0] == 0 < values[1] < values[2]


def test_vggs_weights_come_from_a_file_and_another_file_is_refused(tmp_path):
    vgg = pytest.importorskip("torchvision.models.vgg", reason="torchvision is not installed")
    layers = vgg.make_layers(vgg.cfgs["E"])
    torch.nn.init.constant_(layers[0].bias, 0.5)
    path = tmp_path / "vgg19.pth"
    torch.save({f"features.{name}": value for name, value in layers.state_dict().items()}, path)
    network = losses.features(path)
    assert float(network.layers[0].bias[0]) == 0.5
    [maps] = network(torch.rand(1, 1, 32, 32))
    assert maps.shape == (1, 512, 2, 2)

    torch.save(Generator(2, 4, 1).state_dict(), tmp_path / "other.pth")
    with pytest.raises(RequestError, match=r"other.pth is no state_dict of torchvision's vgg19"):
        losses.features(tmp_path / "other.pth")


def test_both_players_losses_are_those_of_the_paper():
    real, made = torch.tensor([2.0, -1.0]), torch.tensor([0.5, -3.0])
    p_real, p_made = torch.sigmoid(real), torch.sigmoid(made)
    torch.testing.assert_close(losses.adversarial_loss(made), -torch.log(p_made).mean())
    expected = -torch.log(p_real).mean() - torch.log(1 - p_made).mean()
    torch.testing.assert_close(losses.discriminator_loss(real, made), expected)


# --- frames --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [2, 4])
def test_the_device_shrinks_frames_as_the_host_does(scale):
    frame = scenes(1)[0]
    on_host = frames.shrunk(frame, scale)
    shrunk = frames.shrink(torch.from_numpy(frame)[None, None].float() / 255, scale)
    assert np.array_equal(on_host, (shrunk[0, 0] * 255).round().numpy().astype(np.uint8))


def test_the_parts_of_several_hosts_make_up_the_batch_of_one():
    samples = frames.Crops(scenes(), 16, seed=0)
    [[whole]] = frames.crop_loader(samples, 3, 4, batch_size=4)
    halves = [frames.crop_loader(samples, 3, 4, 4, frames.DataShard(i, 2)) for i in range(2)]
    assert torch.equal(whole, torch.cat([batch for half in halves for [batch] in half]))


# --- the step ------------------------------------------------------------------------------------


def test_the_learning_rate_grows_in_proportion_to_the_batch():
    assert scaled_rate(1e-4, 128) == pytest.approx(8e-4)
    assert Gan(tiny(batch_size=32, lr=1e-3), open_backend("cpu")).rate == pytest.approx(2e-3)


def test_a_gan_step_is_the_discriminators_step_and_then_the_generators():
    backend = open_backend("cpu")
    together, apart = (Gan(tiny(), backend) for _ in range(2))
    step, high = together.compiled_steps()[1], crops(0)
    step(high, torch.zeros(len(LOSSES)))

    real = high.float() / 255
    made = apart.generator(frames.shrink(real, 2))
    d, g = (apart.optimizers[name] for name in ("discriminator", "generator"))
    judged = apart.discriminator(real), apart.discriminator(made.detach())
    losses.discriminator_loss(*judged).backward()
    d.step()
    total = F.l1_loss(made, real) + 0.1 * losses.perceptual_loss(apart.features, made, real)
    total = total + 1e-3 * losses.adversarial_loss(apart.discriminator(made))
    parameters = list(apart.generator.parameters())
    for p, gradient in zip(parameters, torch.autograd.grad(total, parameters), strict=True):
        p.grad = gradient
    g.step()
    for name in ("generator", "discriminator"):
        pairs = zip(
            together.networks[name].parameters(), apart.networks[name].parameters(), strict=True
        )
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


needs_xla = pytest.mark.skipif(not runtime.installed(), reason="torch_xla exists for Linux only")


@needs_xla
def test_two_optimizers_in_one_xla_program_that_is_compiled_once_and_computes_as_eager_does():
    from tpuscope.monitor.watch import Budget, watch

    gan = Gan(tiny(device="tpu"), open_backend("tpu"))
    with watch(budget=Budget(compilations=1, fallbacks=0, host_reads=0)) as w:
        _, step = gan.compiled_steps()
        results = []
        for seed in range(4):
            sums = gan.backend.to_device(torch.zeros(len(LOSSES)))
            results += step(gan.backend.to_device(crops(seed)), sums)
    assert [s.programs for s in w.steps] == [1, 1, 1, 1]
    assert w.report().compilations == 1
    eager = steps(Gan(tiny(), open_backend("cpu")), 4)
    on_xla = [row.cpu().tolist() for row in results]
    np.testing.assert_allclose(on_xla, eager, rtol=2e-3, atol=1e-4)


# --- runs ----------------------------------------------------------------------------------------


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path):
    backend = open_backend("cpu")
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = Run(tiny(save_dir=str(tmp_path / "whole"), steps=6), backend, scenes())
    whole.fit()

    asked = iter([None, None, "SIGTERM"])  # it stops after the third step, between two records
    session = Session(stop_requested=lambda: next(asked, "SIGTERM"))
    cut = Run(tiny(save_dir=str(tmp_path / "cut"), steps=6), backend, scenes(), session=session)
    cut.fit()
    assert cut.stopped == "SIGTERM" and cut.step == 3

    settings_, state = resumed({}, tmp_path / "cut")
    rest = Run(settings_, backend, scenes(), state)
    rest.fit()
    files = [checkpoint.load(tmp_path / name / GENERATOR)["generator"] for name in ("whole", "cut")]
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])
    assert [r["pixel"] for r in rest.records] == [r["pixel"] for r in whole.records]
    log = (tmp_path / "cut" / "losses.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in log] == [2, 4, 6]
    with pytest.raises(RequestError, match="its 6 steps are done"):
        resumed({}, str(tmp_path / "cut"))


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path):
    run = Run(tiny(save_dir=str(tmp_path), save_minutes=1e-9), open_backend("cpu"), scenes())
    run.fit()
    newest = tmp_path / checkpoint.CHECKPOINT
    newest.write_bytes(newest.read_bytes()[:-1000])
    _, state = resumed({}, str(tmp_path))
    assert state["step"] == 3


def test_only_the_writer_writes_and_the_files_are_whole(tmp_path):
    backend = open_backend("cpu")
    backend.is_main_process = False
    Run(tiny(save_dir=str(tmp_path)), backend, scenes()).fit()
    assert list(tmp_path.iterdir()) == []
    backend.is_main_process = True
    Run(tiny(save_dir=str(tmp_path)), backend, scenes()).fit()
    assert {GENERATOR, CONTENT, checkpoint.CHECKPOINT} <= {p.name for p in tmp_path.iterdir()}
    assert not list(tmp_path.glob(".*.part"))
    generator, settings_ = load_generator(tmp_path)
    assert settings_.width == 4 and not generator.training


WITHOUT_XLA = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch_xla":
            raise ImportError("no torch_xla here")

sys.meta_path.insert(0, Absent())
from labs.super_resolution.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_training_works_where_torch_xla_cannot_be_imported(tmp_path):
    flags = {k: v for k, v in TINY.items() if k != "device"} | {"steps": 2, "content_steps": 1}
    command = [sys.executable, "-c", WITHOUT_XLA, "train", "--save-dir", str(tmp_path / "run")]
    command += [f"--{k.replace('_', '-')}={v}" for k, v in flags.items()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "device: cpu" in done.stdout
    assert len((tmp_path / "run" / "losses.jsonl").read_text().splitlines()) == 2


CORES = """
import json, sys
import torch
from labs.super_resolution.training import LOSSES, Gan, Settings, open_backend

cores, given = int(sys.argv[1]), json.loads(sys.argv[2])
backend = open_backend("tpu", cores)
gan = Gan(Settings.from_dict(given | {"device": "tpu", "tpu_cores": cores}), backend)
random = torch.Generator().manual_seed(0)
batches = [[torch.randint(0, 256, (2, 1, 16, 16), generator=random, dtype=torch.uint8)]
           for _ in range(3)]
_, step = gan.compiled_steps()
rows = []
for [high] in backend.device_batches(batches):
    rows += step(high, backend.to_device(torch.zeros(len(LOSSES))))
print(json.dumps({
    "losses": [row.cpu().tolist() for row in rows],
    "label": backend.label, "counted": backend.counters().compilations,
    "fallbacks": backend.counters().fallbacks,
}))
"""


@needs_xla
def test_two_virtual_cores_train_as_eager_pytorch_on_one():
    done = subprocess.run(
        [sys.executable, "-c", CORES, "2", json.dumps(TINY)],
        cwd=ROOT,
        env=os.environ | {"PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["label"] == "XLA on CPU, 2 cores" and found["fallbacks"] == 0
    gan = Gan(tiny(), open_backend("cpu"))
    _, step = gan.compiled_steps()
    random = torch.Generator().manual_seed(0)
    expected = []
    for _ in range(3):
        high = torch.randint(0, 256, (2, 1, 16, 16), generator=random, dtype=torch.uint8)
        expected += step(high, torch.zeros(len(LOSSES)))
    expected = [row.tolist() for row in expected]
    np.testing.assert_allclose(found["losses"], expected, rtol=2e-3, atol=1e-4)


# --- tiles ---------------------------------------------------------------------------------------

SMALL = Tiling(tile=16, margin=3, blend=2, batch=3)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 45), st.integers(1, 45), st.sampled_from((1, 2, 4)), st.integers(0, 2**32 - 1)
)
def test_a_whole_frame_from_tiles_has_no_seams_whatever_its_size(height, width, scale, seed):
    frame = np.random.default_rng(seed).random((height, width), np.float32)
    shapes = set()

    def enlarge(tiles: torch.Tensor) -> torch.Tensor:
        shapes.add(tuple(tiles.shape))
        if scale == 1:
            return tiles
        return F.interpolate(tiles, scale_factor=scale, mode="bicubic", align_corners=False)

    made = upscale(frame, enlarge, scale, SMALL)
    expected = enlarge(torch.from_numpy(frame)[None, None])[0, 0].numpy()
    np.testing.assert_allclose(made, expected, rtol=0, atol=1e-5)
    assert shapes - {(1, 1, height, width)} <= {(3, 1, 16, 16)}, "one shape, one program"


def test_without_margin_the_seams_would_be_there():
    frame = np.random.default_rng(0).random((40, 40), np.float32)
    bare = upscale(frame, Bicubic(2), 2, Tiling(tile=16, margin=0, blend=0))
    assert np.abs(bare - Bicubic(2)(torch.from_numpy(frame)[None, None])[0, 0].numpy()).max() > 0.05


def test_a_tiling_that_leaves_nothing_is_refused_with_what_would_do():
    with pytest.raises(RequestError, match=r"--tile 16 is too small .* use at least 33"):
        Tiling(tile=16, margin=8, blend=8)


@needs_xla
def test_frames_of_different_sizes_are_one_program():
    from tpuscope.monitor.watch import Budget, watch

    enlarge = Upscaler(Generator(2, 4, 1).eval(), open_backend("tpu"), SMALL)
    with watch(budget=Budget(compilations=1, fallbacks=0)):
        for shape in ((40, 40), (7, 30), (1, 1)):
            frame = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
            difference = enlarge(frame).astype(int) - quality.bicubic(frame, 2)
            assert np.abs(difference).max() <= 1, "untrained, it is bicubic interpolation"


# --- numbers and pictures ------------------------------------------------------------------------


def test_psnr_and_ssim_are_compared_with_bicubic_frame_by_frame():
    truth = [np.kron(np.arange(64, dtype=np.uint8).reshape(8, 8), np.ones((2, 2), np.uint8))]
    scores = quality.compare(truth, 2, perfect=lambda low: quality.nearest(low, 2))
    assert scores["perfect"]["psnr"] == float("inf") and scores["perfect"]["ssim"] == 1
    assert scores["bicubic"]["psnr_gain"] == 0 and scores["perfect"]["better"] == 1
    assert "bicubic" in quality.table(scores)


def test_what_a_detector_sees_has_the_right_size_and_low_frames_give_large_logits():
    frame = torch.from_numpy(np.stack(scenes(2)))[:, None]
    for way in detect.WAYS:
        seen = detect.Seen(way, 2, Generator(2, 4, 1).eval())(frame)
        assert seen.shape == ((2, 3, 16, 16) if way == "low" else (2, 3, 32, 32))
    model = detect.Enlarged(detect.MSHNet(widths=(2,) * 5, depths=(1,) * 5), 2)
    scales, fused = model(detect.Seen("low", 2)(frame), True)
    assert scales[0].shape == fused.shape == (2, 1, 32, 32)


def test_the_experiment_scores_every_way_and_does_not_repeat_a_seed(tmp_path):
    experiment = detect.Experiment(
        tiny(steps=2, content_steps=1), ("low",), epochs=1, batch_size=4, widths=(2,) * 5,
        train=8, test=3,
    )  # fmt: skip
    rows = detect.run(experiment, open_backend("cpu"), tmp_path, 1, log=lambda text: None)
    scored = [(row["trained"], row["shown"]) for row in rows if "iou" in row]
    expected = [("full", way) for way in detect.WAYS if way != "low"] + [("low", "low")]
    assert scored == expected
    again = detect.run(experiment, open_backend("cpu"), tmp_path, 1)
    assert len(again) == len(rows)
    other = dataclasses.replace(experiment, epochs=2)
    with pytest.raises(RequestError, match="holds results of other settings"):
        detect.run(other, open_backend("cpu"), tmp_path, 1)
    assert detect.table(rows).startswith("means over 1 seed (smallest … largest)")


def test_the_benchmark_gives_ratios_and_names_what_is_absent(monkeypatch):
    numbers = benchmark.measure(TINY, steps=1)
    assert numbers["compilations"] == 0 and np.isfinite(numbers["losses"]).all()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark.absent("cuda, eager") == "PyTorch finds no CUDA GPU"
    times = {"step_seconds": 0.2, "frame_seconds": 0.1, "first_seconds": 3.0}
    results = [
        {"place": benchmark.BASE} | times,
        {"place": "cpu, XLA"} | times | {"step_seconds": 0.1},
        {"place": "cuda, eager", "absent": "PyTorch finds no CUDA GPU"},
    ]
    text = benchmark.table(results)
    assert "2.00×" in text and "PyTorch finds no CUDA GPU" in text


def test_the_check_tries_everything_and_says_what_failed(monkeypatch):
    rows = check.check("cpu")
    assert [row.name for row in rows if not row.fine] == []
    assert "load a model" in check.table(rows) and "everything works here" in check.table(rows)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "FAIL  device" in check.table(check.check("cuda"))


def test_pictures_of_a_run_and_of_a_frame(tmp_path):
    records = [{"step": 1, "phase": "content", "pixel": 0.1}]
    records += [{"step": 2, "phase": "gan"} | dict.fromkeys(LOSSES, 0.5)]
    pictures.curves(records, tmp_path / "curves.png")
    frame, mask = frames.pairs(None, "test", 32, 1)[0]
    versions = {"low": frames.shrunk(frame, 2), "truth": frame}
    pictures.comparison(versions, mask, path=tmp_path / "frames.png")
    assert all(Image.open(path).width > 300 for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match="no target"):
        pictures.comparison(versions, np.zeros_like(mask))


# --- commands ------------------------------------------------------------------------------------


def test_train_and_upscale_as_commands(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in (TINY | {"steps": 3}).items()]
    assert main(["train", "--save-dir", str(run), *flags]) == 0
    assert (run / "curves.png").exists()
    assert main(["train", "--save-dir", str(run), *flags]) == 2, "another run is not overwritten"
    assert main(["train", "--resume", str(run), "--steps", "4"]) == 0
    Image.fromarray(scenes(1)[0][:20]).save(tmp_path / "frame.png")
    flags = ["--weight-path", str(run), "--out", str(out), "--device", "cpu"]
    assert main(["upscale", str(tmp_path / "frame.png"), *flags]) == 0
    assert Image.open(out / "frame.png").size == (64, 40)
    assert main(["upscale", str(tmp_path / "frame.png"), *flags, "--compare"]) == 0
    assert "bicubic" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["train", "--scale", "3"], "--scale 3: must be 2 or 4"),
        (["train", "--crop", "50"], "--crop 50: must be a multiple of 16, such as 48"),
        (["train", "--crop", "64", "--size", "32"], "--crop 64: is larger than the frames"),
        (["train", "--batch-size", "9", "--tpu-cores", "2"], "--batch-size 9: is shared by 2"),
        (["train", "--tpu-cores", "2", "--device", "cpu"], "--tpu-cores 2: --device cpu trains"),
        (["train", "--resume", "nowhere"], "--resume nowhere: no whole checkpoint of this lab"),
        (["train", "--steps", "many"], "invalid int value: 'many'"),
        (["upscale", "no.png", "--weight-path", "x"], "no.png names no image"),
        (["detect", "--train-on", "cubic"], "--train-on cubic: must be one of full, low"),
        (["detect", "--size", "100"], "--size 100: must be a multiple of 32; use 96"),
        (["detect", "--seeds", "0"], "--seeds 0: must be at least 1"),
        (["paint"], "invalid choice: 'paint'"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_one_line_and_exit_code_2(argv, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    text = capsys.readouterr().err
    assert said in text and text.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["train", "upscale", "detect", "benchmark", "check"])
def test_each_commands_help_teaches(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and "%(" not in text
    assert text.startswith(f"usage: python -m labs.super_resolution {command}")
