"""What several files say about the package: versions, names, pins."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import mshnet
import tpuscope
from tpuscope import versions

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def pins(extra: str, python: str = "3.13") -> dict[str, str]:
    """Return name → specifier of an extra on Linux x86-64, the extras that it names included."""
    found = {}
    machine = {"sys_platform": "linux", "platform_machine": "x86_64", "python_version": python}
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        if requirement.name == "mshnet":
            for inner in requirement.extras:
                found |= pins(inner, python)
        elif requirement.marker is None or requirement.marker.evaluate(machine):
            found[requirement.name] = str(requirement.specifier)
    return found


def test_both_packages_have_the_version_that_is_cited():
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited is not None
    assert cited[1] == mshnet.__version__ == tpuscope.__version__


def test_the_citation_names_the_repository():
    text = (ROOT / "CITATION.cff").read_text()
    assert f"repository-code: {PROJECT['urls']['Repository']}\n" in text


def test_ruff_has_one_version():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    revision = re.search(r"ruff-pre-commit\n +rev: v(\S+)", hooks)
    assert revision is not None
    assert pins("test")["ruff"] == f"=={revision[1]}"


def test_plain_installations_choose_their_torch_and_the_extra_xla_pins_the_pair():
    [torch] = [Requirement(text) for text in PROJECT["dependencies"] if text.startswith("torch")]
    assert torch.specifier.contains("2.15.0")
    pair = {"torch": f"=={versions.TORCH_XLA}", "torch_xla": f"=={versions.TORCH_XLA}"}
    assert pins("xla") == pair
    for extra in ("tpu", "aot", "jupyter", "labs", "test"):
        assert pair.items() <= pins(extra).items()


@pytest.mark.parametrize("python", ["3.11", "3.13"])
def test_the_tpu_s_compiler_has_the_versions_that_messages_name(python):
    minor = int(python.split(".")[1])
    expected = {"jax": versions.JAX, "jaxlib": versions.JAX, "libtpu": versions.libtpu((3, minor))}
    assert {name: pins("aot", python)[name] for name in expected} == {
        name: f"=={version}" for name, version in expected.items()
    }


@pytest.mark.parametrize("package", ["mshnet", "tpuscope"])
def test_types_are_part_of_the_package(package):
    assert (ROOT / package / "py.typed").exists()
    assert PYPROJECT["tool"]["setuptools"]["package-data"][package] == ["py.typed"]


@pytest.mark.parametrize(
    ("code", "absent"),
    [("import tpuscope", "mshnet"), ("import tpuscope, mshnet", "torch")],
    ids=["tpuscope without mshnet", "both without torch"],
)
def test_an_import_brings_no_more_than_it_needs(code, absent):
    code += f"; import sys; sys.exit({absent!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
