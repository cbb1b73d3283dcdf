"""Python and packages: versions that match, imports that work."""

import platform
import re
from collections.abc import Mapping

from .. import versions as pins
from ..engine import hardware as tpu
from . import probe
from .machine import Machine
from .report import Check, ok, problem, warning

XLA = ("tpu", "xla")
SHOWN = ("torch", "torch_xla", "libtpu", "jax", "jaxlib", "torchvision", "numpy")
# What this package imports, and the name to install. `pip install --no-deps` leaves them out.
NEEDED = {"numpy": "numpy", "matplotlib.figure": "matplotlib", "tqdm": "tqdm"}
FRESH = "in Colab: Runtime > Disconnect and delete runtime brings the pair that belongs together"


def python(machine: Machine) -> Check:
    """Check the version of Python."""
    minor = tuple(map(int, machine.python.split(".")[:2]))
    if (3, 11) <= minor <= (3, 13):
        return ok("Python", machine.python)
    return problem(
        "Python",
        f"{machine.python}; the package needs 3.11, 3.12 or 3.13",
        "uv venv --python 3.13, then install in that environment",
    )


def versions(machine: Machine, require: str | None = None) -> list[Check]:
    """Check torch, torch_xla and libtpu against each other."""
    torch, xla = machine.version("torch"), machine.version("torch_xla")
    if not torch:
        return [problem("torch", "not installed", f"pip install torch=={pins.TORCH_XLA}")]
    if not xla:
        return [ok("torch", torch), _no_xla(machine, require)]
    if tpu.version_fault(torch, xla):
        detail = f"torch {torch} and torch_xla {xla} do not belong together"
        fits = torch.split(".")[:2] == pins.TORCH_XLA.split(".")[:2]
        fix = f"pip install torch_xla=={pins.TORCH_XLA}" if fits else pins.install_torch_xla()
        return [problem("torch and torch_xla", detail, f"{fix}; {FRESH}", XLA)]
    pair = f"torch {torch} and torch_xla {xla} belong together"
    if xla.split(".")[:2] != pins.TORCH_XLA.split(".")[:2]:
        fix = f"if anything fails: {pins.install_torch_xla()}"
        written = f"this package is written for {pins.TORCH_XLA}"
        return [
            warning("torch and torch_xla", f"{pair}, but {written}", fix),
            _libtpu(machine, xla),
        ]
    return [ok("torch and torch_xla", pair), _libtpu(machine, xla)]


def _no_xla(machine: Machine, require: str | None) -> Check:
    if platform.system() != "Linux":
        detail = f"not installed; it has no {platform.system()} build"
        if require in XLA:
            return problem("torch_xla", detail, "use Linux; or compute on CUDA or the CPU", XLA)
        return ok("torch_xla", f"{detail}, and CUDA and the CPU need none")
    fix = pins.install_torch_xla()
    if machine.chips():
        return problem("torch_xla", "not installed, and this machine has a TPU", fix, XLA)
    if require in XLA:
        return problem("torch_xla", "not installed", fix, XLA)
    return ok("torch_xla", "not installed; only a TPU, or XLA on the CPU, needs it", fix)


def _libtpu(machine: Machine, xla: str) -> Check:
    """Check the TPU's driver and compiler: the version must be the one that torch_xla names."""
    there = machine.version("libtpu")
    found = machine.distribution("torch_xla")
    requires = (found and found.requires) or []
    named = next((m[1] for r in requires if (m := re.match(r"libtpu==([\w.]+)", r))), None)
    wanted = named
    if named == pins.LIBTPU:
        wanted = pins.libtpu(tuple(map(int, machine.python.split(".")[:2])))
    fix = f"pip install libtpu=={wanted}" if wanted else f"pip install 'torch_xla[tpu]=={xla}'"
    if there is None:
        if machine.chips():
            return problem("libtpu", "not installed, and this machine has a TPU", fix, ("tpu",))
        return ok("libtpu", "not installed; only a TPU, and compiling for one, need it", fix)
    if named is None or there == wanted or there.startswith(f"{named}."):
        return ok("libtpu", f"{there} belongs to torch_xla {xla}")
    return warning("libtpu", f"{there}, but torch_xla {xla} belongs to {wanted}", fix)


def neighbours(machine: Machine) -> list[Check]:
    """Check packages that PyTorch does not need and that break if their version differs."""
    checks = []
    torch = machine.version("torch")
    for name in ("torchvision", "torchaudio"):
        found = machine.distribution(name)
        requires = (found and found.requires) or []
        bound = next((m[1] for r in requires if (m := re.match(r"torch ?\(?==([\w.]+)", r))), None)
        if found and torch and bound and bound != torch.split("+")[0]:
            checks.append(
                warning(
                    name,
                    f"{found.version} belongs to torch {bound}, and torch is {torch}",
                    f"pip uninstall -y {name} (if your program does not need it), or {FRESH}",
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
        checks.append(ok("jax", f"{jax}, with jaxlib {jaxlib}; PyTorch does not use it"))
    return checks


def imports(machine: Machine, limit: float, packages: Mapping[str, str] = NEEDED) -> list[Check]:
    """Import every package, and jax if it is installed, in another process.

    Args:
        machine: gives the environment of that process.
        limit: seconds.
        packages: module → name to install.
    """
    names = [*packages, *(["jax"] if machine.version("jax") else [])]
    faults = probe.imports(names, machine.environ, limit)
    checks = []
    for name, fault in faults.items():
        package = name.split(".")[0]
        if fault == f"ModuleNotFoundError: No module named '{package}'" and name in packages:
            fix = f"pip install {packages[name]}"
            checks.append(problem(packages[name], "not installed", fix))
        elif fault and name in packages:
            fix = f"pip install --force-reinstall --no-deps {packages[name]}"
            checks.append(problem(packages[name], f"cannot be imported: {fault}", fix))
        elif fault:
            fix = f"{pins.install_jax()}; PyTorch does not use it"
            checks.append(warning(name, f"cannot be imported: {fault}", fix))
    return checks or [ok("imports", ", ".join([*packages.values(), *names[len(packages) :]]))]
