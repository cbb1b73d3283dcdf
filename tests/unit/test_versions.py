"""Version pins: one place in the code, and the same in pyproject.toml."""

import re
import tomllib
from pathlib import Path

import pytest

from tpuscope import versions

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("python", "libtpu"), [((3, 11), versions.LIBTPU), ((3, 13), versions.LIBTPU_313)]
)
def test_the_compiler_comes_in_a_version_that_has_a_wheel(python, libtpu):
    assert versions.libtpu(python) == libtpu
    assert versions.install_compiler(python).endswith(f"libtpu=={libtpu}")


def test_pyproject_names_the_same_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = project["dependencies"] + [line for lines in extras.values() for line in lines]
    pinned: dict[str, set[str]] = {}
    for line in requirements:
        if found := re.match(r"([\w-]+)==([\w.]+)", line):
            pinned.setdefault(found[1], set()).add(found[2])
    assert pinned["torch_xla"] == {versions.TORCH_XLA}
    assert pinned["jax"] == pinned["jaxlib"] == {versions.JAX}
    assert pinned["libtpu"] == {versions.LIBTPU, versions.LIBTPU_313}
    assert pinned["cloud-tpu-client"] == {versions.CLOUD_TPU_CLIENT}


def test_no_other_module_of_tpuscope_pins_a_version():
    pin = re.compile(r"(torch|torch_xla|jax|jaxlib|libtpu|cloud-tpu-client)==\d")
    for path in (ROOT / "tpuscope").rglob("*.py"):
        assert not pin.search(path.read_text()), path
