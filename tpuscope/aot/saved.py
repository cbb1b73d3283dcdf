"""A program that was saved as StableHLO, by TorchTPU, JAX or torch_xla."""

from pathlib import Path

from ..engine.lazy_graph import Program
from ..errors import RequestError

EXPECTED = (
    "expected StableHLO: a portable artifact or MLIR bytecode (begins with ML\\xefR), or MLIR text "
    "(module …)"
)
_BYTECODE = b"ML\xefR"


def read_program(path: str | Path) -> Program:
    """Return the program in a file; how many cores it is for, the program says.

    Args:
        path: StableHLO as a portable artifact, MLIR bytecode, or MLIR text. Of ``jax.export`` this
            is ``exported.mlir_module_serialized``.

    Raises:
        RequestError: the file cannot be read or holds something else; names the file.
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError as error:
        raise RequestError(f"{path}: no such file", "no-such-file") from error
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}; {EXPECTED}", "no-such-file") from error
    if not content.startswith(_BYTECODE) and not _is_text(content):
        kind = "empty" if not content else "neither bytecode nor text of MLIR"
        raise RequestError(f"{path} is {kind}; {EXPECTED}", "not-stablehlo")
    return Program(content, cores=None)


def _is_text(content: bytes) -> bool:
    """Return whether this looks like a module as text: MLIR's parser has the last word."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return False
    return any(word in text for word in ("module", "func"))
