"""Settings, the two steps, and the run: first the pixel loss alone, then adversarial training.

As the paper does, the generator is trained alone first (``content_steps``), and the GAN starts from
there. Each phase is one XLA program: in the second one both networks' forward and backward passes
and both updates are traced into the same step, with nothing read and no cut in between.

**Batch and learning rate.** The rate is for a batch of 16, as in the paper, and grows in proportion
to the batch (:func:`scaled_rate`; Goyal et al. 2017, arXiv 1706.02677, for SGD). For Adam there are
arguments for the square root instead (Malladi et al. 2022, arXiv 2205.10287), so read the linear
rule as a starting point, and lower ``--lr`` if the losses jump.

**Several cores.** ``tpu_cores`` > 1 is one program over all of them (SPMD,
:class:`mshnet.training.backend.SpmdBackend`): the batch is split, everything else replicated, and
the compiler adds the reductions. The source document spawns 8 processes instead; ``xmp.spawn`` with
nprocs=8 is refused by today's torch_xla, batch norm would see an eighth of the batch in each, both
optimizers would have to reduce gradients by hand, and the code would be another than on one core.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from mshnet.training import backend as backends
from mshnet.training import checkpoint, run_dir
from mshnet.training.backend import Backend
from mshnet.training.config import DEVICES
from mshnet.training.preemption import GO_ON, STOP, Session
from tpuscope.errors import RequestError
from tpuscope.progress import progress

from . import frames as data
from .losses import adversarial_loss, discriminator_loss, features, perceptual_loss
from .networks import SCALES, Discriminator, Generator

BATCH = 16  # for which the learning rate is given
LOSSES = ("pixel", "perceptual", "adversarial", "discriminator", "judged_real", "judged_made")
GENERATOR = "generator.pkl"
CONTENT = "generator-content.pkl"  # as it was before the GAN began
LOG = "losses.jsonl"

Log = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """A run's settings; the field names are the flags of the command line.

    Attributes:
        dataset_dir: folder in the project's layout; None: built-in scenes.
        size: side of the frames that crops are cut from, pixels.
        scale: 2 or 4.
        steps: of both phases together.
        content_steps: of the first phase, in which there is no discriminator.
        batch_size: crops a step, over all cores together.
        crop: side of a crop, pixels of high resolution.
        lr: Adam's learning rate for a batch of 16.
        pixel, perceptual, adversarial: weights of the three losses.
        vgg: file with VGG19's weights for the perceptual loss; None: fixed features.
        width, blocks, expansion: of the generator.
        discriminator_width: channels of its first layer.
        device: auto is a TPU, then CUDA, then the CPU.
        tpu_cores: of this machine; with ``PJRT_DEVICE=CPU`` virtual ones.
        log_every: steps between two looks at the losses.
        save_minutes: between checkpoints.
    """

    dataset_dir: str | None = None
    size: int = 256
    scale: int = 2
    steps: int = 2000
    content_steps: int = 1000
    batch_size: int = 16
    crop: int = 64
    lr: float = 5e-4
    pixel: float = 1.0
    perceptual: float = 0.1
    adversarial: float = 1e-3
    vgg: str | None = None
    width: int = 32
    blocks: int = 6
    expansion: int = 4
    discriminator_width: int = 64
    device: str = "auto"
    tpu_cores: int = 1
    seed: int = 0
    log_every: int = 50
    save_minutes: float = 10.0
    save_dir: str = "weight/super-resolution"

    def __post_init__(self):
        """Raise RequestError for values that cannot work.

        Raises:
            RequestError: names the flag, its value and a value that would do.
        """
        positive = ("size", "steps", "batch_size", "crop", "width", "blocks", "expansion")
        for name in (*positive, "discriminator_width", "tpu_cores", "log_every"):
            if getattr(self, name) < 1:
                self._refuse(name, "must be at least 1")
        for name in ("content_steps", "seed", "pixel", "perceptual", "adversarial"):
            if getattr(self, name) < 0:
                self._refuse(name, "must be 0 or more")
        for name in ("lr", "save_minutes"):
            if not 0 < getattr(self, name) < float("inf"):
                self._refuse(name, "must be a positive number")
        if self.scale not in SCALES:
            self._refuse("scale", "must be 2 or 4")
        if self.device not in DEVICES:
            self._refuse("device", "must be one of " + ", ".join(DEVICES))
        if self.crop % 16:  # the discriminator halves four times
            self._refuse(
                "crop", f"must be a multiple of 16, such as {max(16, self.crop // 16 * 16)}"
            )
        if self.crop > self.size:
            self._refuse("crop", f"is larger than the frames (--size {self.size})")
        if self.batch_size % self.tpu_cores:
            near = max(1, self.batch_size // self.tpu_cores) * self.tpu_cores
            self._refuse("batch_size", f"is shared by {self.tpu_cores} cores; use {near}")

    def _refuse(self, name: str, rule: str) -> None:
        raise RequestError(f"--{name.replace('_', '-')} {getattr(self, name)}: {rule}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Settings":
        """Return settings from plain values; ignore keys that this version does not know."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})


def scaled_rate(lr: float, batch_size: int) -> float:
    """Return the learning rate for a batch, proportional to it: ``lr`` is for 16."""
    return lr * batch_size / BATCH


def open_backend(device: str = "auto", tpu_cores: int = 1) -> Backend:
    """Return the project's backend for a device.

    Raises:
        RequestError: it is not there, or has fewer cores.
    """
    try:
        return backends.make_backend(device, tpu_cores)
    except RequestError as error:  # it speaks of the main command's flags
        text = str(error).replace("--num-cores", "--tpu-cores")
        raise RequestError(text.replace("--use-tpu", "--device tpu")) from error


class Gan:
    """Both networks, their optimizers and the perceptual loss, on the device.

    Args:
        settings: the run's.
        backend: the device.
        state: of :meth:`state`, to go on from.

    Attributes:
        rate: learning rate of both optimizers.
    """

    def __init__(self, settings: Settings, backend: Backend, state: dict | None = None):
        self.settings = settings
        self.backend = backend
        self.rate = scaled_rate(settings.lr, settings.batch_size)
        torch.manual_seed(settings.seed)
        self.generator = generator_of(settings)
        self.discriminator = Discriminator(settings.discriminator_width)
        self.networks = {"generator": self.generator, "discriminator": self.discriminator}
        self.features = features(settings.vgg)
        self.optimizers: dict[str, Adam] = {}
        for name, network in self.networks.items():
            if state:
                network.load_state_dict(state[name])
            moments = state["optimizers"][name] if state else None
            fresh = _adam_state(network, self._adam, moments)
            self.optimizers[name] = backend.prepare(network, self._adam, fresh)
        backend.move(self.features)

    def _adam(self, network: nn.Module) -> Adam:
        # On XLA the count of steps lives on the device (capturable). As a Python number it would
        # be another one in every step, and so would the numbers that Adam computes from it.
        on_xla = self.backend.device.type == "xla"
        return Adam(network.parameters(), lr=self.rate, capturable=on_xla)

    def state(self) -> dict:
        """Return the state for a checkpoint; tensors on the device."""
        weights = {name: network.state_dict() for name, network in self.networks.items()}
        moments = {name: one.state_dict()["state"] for name, one in self.optimizers.items()}
        return weights | {"optimizers": moments}

    def content_step(self, high: Tensor, sums: Tensor) -> tuple[Tensor]:
        """Update the generator alone, by the pixel loss.

        Args:
            high: crops, uint8 (B, 1, S, S), on the device.
            sums: of :data:`LOSSES` so far, float32 (6,).

        Returns:
            The sums with this step's losses, still on the device.
        """
        real = high.float() / 255
        made = self.generator(data.shrink(real, self.settings.scale))
        pixel = F.l1_loss(made, real)
        pixel.backward()
        self._update("generator")
        return self._added(sums, pixel)

    def gan_step(self, high: Tensor, sums: Tensor) -> tuple[Tensor]:
        """Update the discriminator, then the generator, in one program.

        Arguments and result as of :meth:`content_step`.
        """
        real = high.float() / 255
        made = self.generator(data.shrink(real, self.settings.scale))

        on_real, on_made = self.discriminator(real), self.discriminator(made.detach())
        of_discriminator = discriminator_loss(on_real, on_made)
        of_discriminator.backward()
        self._update("discriminator")

        pixel = F.l1_loss(made, real)
        perceptual = perceptual_loss(self.features, made, real)
        adversarial = adversarial_loss(self.discriminator(made))
        weights = self.settings
        total = weights.pixel * pixel + weights.perceptual * perceptual
        (total + weights.adversarial * adversarial).backward()
        self._update("generator")
        self.optimizers["discriminator"].zero_grad(set_to_none=True)  # of the generator's loss
        judged = torch.sigmoid(on_real).mean(), torch.sigmoid(on_made).mean()
        return self._added(sums, pixel, perceptual, adversarial, of_discriminator, *judged)

    def compiled_steps(self) -> tuple[Callable, Callable]:
        """Return both steps, each compiled once (``Backend.compile_step``)."""
        state = [*self.features.parameters(), *self.features.buffers()]
        for name, network in self.networks.items():
            state += [*network.parameters(), *network.buffers()]
            state += [v for slots in self.optimizers[name].state.values() for v in slots.values()]
        return tuple(
            self.backend.compile_step(s, state) for s in (self.content_step, self.gan_step)
        )

    def _update(self, name: str) -> None:
        self.backend.optimizer_step(self.optimizers[name])
        self.optimizers[name].zero_grad(set_to_none=True)

    def _added(self, sums: Tensor, *losses: Tensor) -> tuple[Tensor]:
        rest = [torch.zeros_like(losses[0])] * (len(LOSSES) - len(losses))
        step = torch.stack([*(loss.detach() for loss in losses), *rest])
        return (self.backend.replicate_output(sums + step),)


def _adam_state(network: nn.Module, make: Callable, moments: dict | None) -> dict:
    """Return Adam's state on the host, for its first step or to resume from.

    Adam makes its sums in the first step. There they would be zeros of the first graph and data of
    the second: one more compilation. The count has a dimension for the same reason.
    """
    state = make(network).state_dict()
    state["state"] = moments or {
        i: {
            "step": torch.zeros(1),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
        for i, p in enumerate(network.parameters())
    }
    return state


def generator_of(settings: Settings) -> Generator:
    """Return an untrained generator of a run's shape."""
    return Generator(settings.scale, settings.width, settings.blocks, settings.expansion)


def load_generator(path: str | Path) -> tuple[Generator, Settings]:
    """Return a trained generator, on the host in evaluation mode, and its run's settings.

    Args:
        path: ``generator.pkl``, a ``checkpoint.pkl``, or a run's folder.

    Raises:
        RequestError: missing, damaged, or no generator of this lab.
    """
    path = Path(path)
    content = checkpoint.load(path / GENERATOR if path.is_dir() else path)
    if not {"generator", "settings"} <= content.keys():
        raise RequestError(f"{path} holds no generator; name a {GENERATOR} of a run of this lab")
    settings = Settings.from_dict(content["settings"])
    generator = generator_of(settings)
    generator.load_state_dict(content["generator"])
    return generator.eval(), settings


class Run:
    """Trains both networks and leaves log, checkpoints and generator in one folder.

    Its state is the networks, the optimizers and the number of steps done: crops follow from seed
    and step. So a run that was interrupted goes on as if it had not been.

    Args:
        settings: the run's.
        backend: the device.
        frames: of high resolution, uint8 (H, W).
        resume: content of a checkpoint.
        session: says when to save and when to stop.

    Attributes:
        step: how many are done.
        records: mean losses of every ``log_every`` steps.
        stopped: why it ended early, or None.
    """

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        frames: Iterable[np.ndarray],
        resume: dict | None = None,
        session: Session | None = None,
    ):
        self.settings = settings
        self.backend = backend
        self.session = session or Session(settings.save_minutes)
        self.folder = Path(settings.save_dir)
        resume = resume or {}
        self.step: int = resume.get("step", 0)
        self.records: list[dict] = resume.get("records", [])
        self._sums = resume.get("sums", torch.zeros(len(LOSSES)))
        self._summed: int = resume.get("summed", 0)
        self.stopped: str | None = None
        self.gan = Gan(settings, backend, resume or None)
        self._crops = data.Crops(list(frames), settings.crop, settings.seed)

    def fit(self) -> list[dict]:
        """Train the remaining steps, or until the session ends; return the records."""
        settings, backend = self.settings, self.backend
        content, adversarial = self.gan.compiled_steps()
        loader = data.crop_loader(
            self._crops, self.step, settings.steps, settings.batch_size, backend.input_shard
        )
        self._sums = backend.to_device(self._sums)
        self._began = time.perf_counter()
        bar = progress(backend.device_batches(loader), "train", settings.steps, initial=self.step)
        for [high] in bar:
            run = content if self.step < settings.content_steps else adversarial
            [self._sums] = run(high, self._sums)
            self.step += 1
            self._summed += 1
            if self.step == settings.content_steps:
                self._save_generator(CONTENT)
            if self.step in (settings.content_steps, settings.steps) or (
                self.step % settings.log_every == 0
            ):
                bar.set_postfix(self._log())
            wanted = backend.max_over_processes(self.session.due())
            if wanted != GO_ON and self.step < settings.steps:
                self._save()
            if wanted == STOP:
                self.stopped = self.session.reason()
                return self.records
        self._save()
        self._save_generator(GENERATOR)
        return self.records

    def _log(self) -> dict[str, str]:
        """Read and log the sums: the only place where the host waits for the device."""
        means = (self._sums.cpu() / self._summed).tolist()
        took = time.perf_counter() - self._began
        gan = self.step > self.settings.content_steps
        losses = dict(zip(LOSSES if gan else LOSSES[:1], means, strict=False))
        counted = dataclasses.asdict(self.backend.counters())  # since the process began
        record = {"step": self.step, "phase": "gan" if gan else "content"} | losses | counted
        record["steps_per_second"] = round(self._summed / took, 3)
        self.records.append(record)
        self._sums = self.backend.to_device(torch.zeros(len(LOSSES)))
        self._summed, self._began = 0, time.perf_counter()
        return {name: f"{value:.4f}" for name, value in losses.items()}

    def _save(self) -> None:
        began = time.perf_counter()
        # All processes copy to the host, which may take part in a computation; one writes.
        content = checkpoint.to_host({**self.gan.state(), "sums": self._sums})
        if self.backend.is_main_process:
            about = {"step": self.step, "summed": self._summed, "records": self.records}
            about["settings"] = dataclasses.asdict(self.settings)
            checkpoint.save_newest(content | about, self.folder)
            log = "".join(f"{json.dumps(record)}\n" for record in self.records)
            (self.folder / LOG).write_text(log)
        self.session.saved(time.perf_counter() - began)

    def _save_generator(self, name: str) -> None:
        weights = checkpoint.to_host(self.gan.generator.state_dict())
        if self.backend.is_main_process:
            about = {"settings": dataclasses.asdict(self.settings), "step": self.step}
            checkpoint.save({"generator": weights, **about}, self.folder / name)


def resumed(overrides: dict, run: str | Path | None) -> tuple[Settings, dict | None]:
    """Return the settings of a request, and the checkpoint to resume from.

    Args:
        overrides: settings by name.
        run: a run's folder; its settings hold unless given.

    Raises:
        RequestError: there is nothing to continue, or a setting is wrong.
    """
    if run is None:
        return Settings.from_dict(overrides), None
    path, content, _ = checkpoint.newest([Path(run)])
    if path is None or "discriminator" not in content:
        raise RequestError(f"--resume {run}: no whole checkpoint of this lab is there")
    settings = Settings.from_dict(content["settings"] | overrides | {"save_dir": str(run)})
    if content["step"] >= settings.steps:
        raise RequestError(
            f"--resume {run}: its {content['step']} steps are done; ask for more with --steps"
        )
    return settings, content


def train(
    overrides: dict, resume: str | Path | None = None, log: Log = print, stop=lambda: None
) -> Run:
    """Train and save; return the finished (or stopped) run.

    Args:
        overrides: settings by the field names of :class:`Settings`.
        resume: folder of a run to continue.
        log: takes messages for people.
        stop: tells the name of a signal that asks to stop, or None.

    Raises:
        RequestError: the request cannot be fulfilled; nothing has been trained then.
    """
    settings, state = resumed(overrides, resume)
    backend = open_backend(settings.device, settings.tpu_cores)
    log(f"device: {backend.label}")
    frames = [frame for frame, _ in data.pairs(settings.dataset_dir, "train", settings.size)]
    # Two checkpoints of two networks with two sums each are less than this.
    run_dir.claim(settings.save_dir, 400_000_000, resuming=state is not None)
    run = Run(settings, backend, frames, state, Session(settings.save_minutes, None, stop))
    rate = f"learning rate {run.gan.rate:g} for a batch of {settings.batch_size}"
    log(f"{len(frames)} frames, {rate}; from step {run.step} to {settings.steps}")
    run.fit()
    return run
