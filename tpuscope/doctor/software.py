"""Python and packages: versions that belong together, imports that work."""

import platform
import re

from ..engine import hardware as tpu
from . import probe
from .machine import Machine
from .report import Check, ok, problem, warning

WRITTEN_FOR = "2.9.0"  # of torch and torch_xla
PAIR = f"torch=={WRITTEN_FOR} torch_xla=={WRITTEN_FOR}"
XLA = ("tpu", "xla")
SHOWN = ("torch", "torch_xla", "libtpu", "jax", "jaxlib", "torchvision", "numpy")
# What this package imports, and the name to install. `pip install --no-deps` leaves them out.
NEEDED = {
    "numpy": "numpy",
    "PIL.Image": "pillow",
    "scipy.ndimage": "scipy",
    "skimage.measure": "scikit-image",
    "matplotlib.figure": "matplotlib",
    "tqdm": "tqdm",
}
FRESH = "in Colab: Runtime > Disconnect and delete runtime brings the pair that belongs together"


def python(machine: Machine) -> Check:
    minor = tuple(map(int, machine.python.split(".")[:2]))
    if (3, 11) <= minor <= (3, 13):
        return ok("Python", machine.python)
    return problem(
        "Python",
        f"{machine.python}; the package needs 3.11, 3.12 or 3.13",
        "uv venv --python 3.13, then install in that environment",
    )


def versions(machine: Machine, require: str | None = None) -> list[Check]:
    """torch, torch_xla, libtpu, and what else must match them."""
    torch, xla = machine.version("torch"), machine.version("torch_xla")
    if not torch:
        return [problem("torch", "not installed", f"pip install torch=={WRITTEN_FOR}")]
    if not xla:
        return [ok("torch", torch), _no_xla(machine, require)]
    if tpu.version_fault(torch, xla):
        detail = f"torch {torch} and torch_xla {xla} do not belong together"
        mine = torch.split(".")[:2] == WRITTEN_FOR.split(".")[:2]
        fix = f"pip install torch_xla=={WRITTEN_FOR}" if mine else f"pip install {PAIR}"
        return [problem("torch and torch_xla", detail, f"{fix}; {FRESH}", XLA)]
    pair = f"torch {torch} and torch_xla {xla} belong together"
    if xla.split(".")[:2] != WRITTEN_FOR.split(".")[:2]:
        fix = f"if anything fails: pip install {PAIR}"
        written = f"this package is written for {WRITTEN_FOR}"
        return [
            warning("torch and torch_xla", f"{pair}, but {written}", fix),
            _libtpu(machine, xla),
        ]
    return [ok("torch and torch_xla", pair), _libtpu(machine, xla)]


def _no_xla(machine: Machine, require: str | None) -> Check:
    if platform.system() != "Linux":
        detail = f"not installed; it has no {platform.system()} build"
        if require in XLA:
            return problem("torch_xla", detail, "use Linux, or --device cuda or cpu", XLA)
        return ok("torch_xla", f"{detail}, and --device cuda or cpu need none")
    fix = f"pip install {PAIR}"
    if machine.chips():
        return problem("torch_xla", "not installed, and this machine has a TPU", fix, XLA)
    if require in XLA:
        return problem("torch_xla", "not installed", fix, XLA)
    return ok("torch_xla", "not installed; only a TPU, or XLA on the CPU, needs it", fix)


def _libtpu(machine: Machine, xla: str) -> Check:
    """The TPU's driver and compiler, in the version that torch_xla names."""
    there = machine.version("libtpu")
    requires = machine.distribution("torch_xla").requires or []
    named = next((m[1] for r in requires if (m := re.match(r"libtpu==([\w.]+)", r))), None)
    wanted = named
    # 0.0.21 has no wheel for Python 3.13; 0.0.21.1 has, and is what Colab uses.
    if named == "0.0.21" and tuple(map(int, machine.python.split(".")[:2])) >= (3, 13):
        wanted = "0.0.21.1"
    fix = f"pip install libtpu=={wanted}" if wanted else f"pip install 'torch_xla[tpu]=={xla}'"
    if there is None:
        if machine.chips():
            return problem("libtpu", "not installed, and this machine has a TPU", fix, ("tpu",))
        return ok("libtpu", "not installed; only a TPU, and compiling for one, need it", fix)
    if named is None or there == wanted or there.startswith(f"{named}."):
        return ok("libtpu", f"{there} belongs to torch_xla {xla}")
    return warning("libtpu", f"{there}, but torch_xla {xla} belongs to {wanted}", fix)


def neighbours(machine: Machine) -> list[Check]:
    """Packages that are not needed for training and, in another version, break on their own."""
    checks = []
    torch = machine.version("torch")
    for name in ("torchvision", "torchaudio"):
        found = machine.distribution(name)
        requires = (found and found.requires) or []
        bound = next((m[1] for r in requires if (m := re.match(r"torch ?\(?==([\w.]+)", r))), None)
        if torch and bound and bound != torch.split("+")[0]:
            checks.append(
                warning(
                    name,
                    f"{found.version} belongs to torch {bound}, and torch is {torch}",
                    f"pip uninstall -y {name} (training does not need it), or {FRESH}",
                )
            )
    jax, jaxlib = machine.version("jax"), machine.version("jaxlib")
    if jax and jax != jaxlib:
        checks.append(
            warning(
                "jax",
                f"jax {jax} with jaxlib {jaxlib or '(not installed)'}; they need the same version",
                f"pip install jaxlib=={jax}",
            )
        )
    elif jax:
        checks.append(ok("jax", f"{jax}, with jaxlib {jaxlib}; training does not use it"))
    return checks


def imports(machine: Machine, limit: float) -> list[Check]:
    """Import every package that is needed, and jax if it is there, in another process."""
    names = [*NEEDED, *(["jax"] if machine.version("jax") else [])]
    faults = probe.imports(names, machine.environ, limit)
    checks = []
    for name, fault in faults.items():
        package = name.split(".")[0]
        if fault == f"ModuleNotFoundError: No module named '{package}'" and name in NEEDED:
            checks.append(problem(NEEDED[name], "not installed", f"pip install {NEEDED[name]}"))
        elif fault and name in NEEDED:
            fix = f"pip install --force-reinstall --no-deps {NEEDED[name]}"
            checks.append(problem(NEEDED[name], f"cannot be imported: {fault}", fix))
        elif fault:
            fix = "pip install jax==0.7.2 jaxlib==0.7.2; training does not use it"
            checks.append(warning(name, f"cannot be imported: {fault}", fix))
    return checks or [ok("imports", ", ".join([*NEEDED.values(), *names[len(NEEDED) :]]))]
