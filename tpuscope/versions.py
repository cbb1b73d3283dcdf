"""The versions that belong together; the only place that names them.

torch and torch_xla are bound by a C++ ABI. Colab's TPU runtime has these versions
(constraints/colab-tpu.txt), and PyTorch/XLA 2.9 is the last release.
"""

import sys

TORCH_XLA = "2.9.0"  # and of torch beside it
JAX = "0.7.2"  # and of jaxlib: brings the interface to the TPU's compiler
# torch_xla[tpu] pins libtpu 0.0.21, which has no wheel for Python 3.13; Colab has 0.0.21.1 there.
LIBTPU, LIBTPU_313 = "0.0.21", "0.0.21.1"
CLOUD_TPU_CLIENT = "0.10"
TORCH_TPU = "0.2.0"  # the successor; never in one environment with torch_xla
TORCH_OF_TORCH_TPU = ((2, 11), (2, 15))  # oldest and newest torch that it has binaries for

# The newest compiler that was tried, for an environment of its own: it takes Python 3.12 or newer,
# and does not go with torch_xla.
NEWEST_JAX, NEWEST_LIBTPU = "0.12.0.1", "0.0.52"


def libtpu(python: tuple[int, ...] = sys.version_info[:2]) -> str:
    """Return the libtpu version that has a wheel for this Python."""
    return LIBTPU_313 if python >= (3, 13) else LIBTPU


def pair() -> str:
    """Return the requirements of torch and torch_xla, for pip."""
    return f"torch=={TORCH_XLA} torch_xla=={TORCH_XLA}"


def install_torch_xla() -> str:
    """Return the command that installs the pair."""
    return f"pip install {pair()}"


def install_torch_tpu() -> str:
    """Return the command that installs TorchTPU and the newest torch it is built for."""
    newest = ".".join(map(str, TORCH_OF_TORCH_TPU[1]))
    return f"pip install torch=={newest}.* torch_tpu=={TORCH_TPU}"


def install_jax() -> str:
    """Return the command that installs jax and jaxlib."""
    return f"pip install jax=={JAX} jaxlib=={JAX}"


def install_compiler(python: tuple[int, ...] = sys.version_info[:2]) -> str:
    """Return the command that installs the TPU's compiler."""
    return f"{install_jax()} libtpu=={libtpu(python)}"


def newest_compiler() -> str:
    """Return the requirements of the newest compiler, for pip in an environment of its own."""
    return f"jax=={NEWEST_JAX} jaxlib=={NEWEST_JAX} libtpu=={NEWEST_LIBTPU}"
