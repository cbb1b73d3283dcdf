"""The Python whose jax and libtpu compile: this one, or another that the user names."""

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata

from .. import versions
from ..errors import RequestError

VARIABLE = "TPUSCOPE_COMPILER"
PACKAGES = ("jax", "jaxlib", "libtpu")

# Imports nothing of the packages: asking takes a tenth of a second.
_PROBE = """
import importlib.util, json, sys
from importlib import metadata
found = {n: metadata.version(n) for n in sys.argv[1:] if importlib.util.find_spec(n)}
print(json.dumps(found))
"""
_SECONDS = 60  # a Python on a slow network disk answers in less


class CompilerUnavailable(RequestError):
    """jax, jaxlib or libtpu is not installed; the message says how to install them."""

    def __init__(self, message: str, code: str = "not-installed"):
        super().__init__(message, code)


@dataclass(frozen=True)
class Toolchain:
    """A Python that has the TPU's compiler.

    Attributes:
        python: its path.
        versions: of jax, jaxlib and libtpu there.
    """

    python: str
    versions: tuple[tuple[str, str], ...]

    @property
    def libtpu(self) -> str:
        """Version of the compiler."""
        return dict(self.versions)["libtpu"]

    @classmethod
    def find(cls, python: str | None = None) -> "Toolchain":
        """Return the chosen Python, checked.

        Args:
            python: its path, or a name on PATH; None for the variable ``TPUSCOPE_COMPILER``, or if
                that is empty for this Python.

        Raises:
            CompilerUnavailable: there is no such Python, or it lacks a package.
        """
        source = "--compiler" if python else VARIABLE
        python = python or os.environ.get(VARIABLE) or sys.executable
        if python == sys.executable:
            found = {
                name: metadata.version(name)
                for name in PACKAGES
                if importlib.util.find_spec(name) is not None
            }
            where, command = "here; on Linux", versions.install_compiler()
        else:
            found = _probe(source, python)
            where, command = f"in {python}", _install_newest(python)
        missing = [name for name in PACKAGES if name not in found]
        if missing:
            raise CompilerUnavailable(
                f"the TPU's compiler needs {' and '.join(missing)}, not installed {where}: "
                f"{command}"
            )
        return cls(python, tuple(found.items()))


def environment() -> dict[str, str]:
    """Return this process's variables without those that show another Python our packages."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH")
    }


def newest(python: str = "python") -> str:
    """Return one sentence: how to get the newest compiler, and how to choose it."""
    return (
        f"make an environment of its own ({_install_newest(python)}) and name its Python with "
        f"--compiler or {VARIABLE}"
    )


def _install_newest(python: str) -> str:
    return f"{shlex.quote(python)} -m pip install {versions.newest_compiler()}"


def _probe(source: str, python: str) -> dict[str, str]:
    path = shutil.which(python)
    if path is None:
        raise CompilerUnavailable(
            f"{source} {python}: no such program; name an environment's bin/python", "no-such-file"
        )
    try:
        done = subprocess.run(
            [path, "-P", "-c", _PROBE, *PACKAGES],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
        )
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise CompilerUnavailable(
            f"{source} {python}: not a Python of version 3.11 or newer that runs; name an "
            "environment's bin/python",
            "no-such-file",
        ) from error
