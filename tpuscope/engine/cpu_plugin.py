"""TorchTPU without a TPU: its device ``tpu`` computes on this machine's CPU, through XLA.

TorchTPU loads a PJRT plugin, libtpu. Here a CPU plugin stands in its place, and one option that
only libtpu knows is taken out of the client's creation. **The arrangement is this project's and no
feature of Google's.** It shows what a program computes, compiles and reads; it shows no TPU's
speed, memory or rounding, and one device only.

The plugin is the package :data:`PACKAGE`, which contains no code of torch or torch_tpu; the file is
compared with a hash before it is loaded, because it runs in this process.
"""

import ctypes
import hashlib
import os
from importlib import metadata
from pathlib import Path

from ..errors import RequestError

PACKAGE, VERSION = "lammps-jax-pjrt-cpu", "0.11.2"
_FILE = "pjrt_c_api_cpu_plugin.so"
_SHA256 = "ad1309ac822b1b24d51b7f9947c7c9fa9ef5d67f390584cbc3d1fa2428fed9c2"  # Linux, x86-64

_alive: list = []  # what the plugin's table points to


def install() -> str:
    """Return the command that installs the plugin."""
    return f"pip install {PACKAGE}=={VERSION}"


def path() -> Path:
    """Return the plugin's file.

    Raises:
        RequestError: it is not installed, or not the file that was tried here.
    """
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise RequestError(
            f"PJRT_DEVICE=CPU: TorchTPU runs on a CPU through the package {PACKAGE}, which is not "
            f"installed: {install()}",
            "not-installed",
        ) from None
    file = next((Path(str(f.locate())) for f in files if f.name == _FILE), None)
    if file is None or not file.is_file():
        raise RequestError(f"{PACKAGE} is damaged: it has no {_FILE}; {install()}", "plugin")
    if hashlib.sha256(file.read_bytes()).hexdigest() != _SHA256:
        raise RequestError(
            f"{file} is not the file of {PACKAGE} {VERSION} for Linux on x86-64, the only one "
            f"that was tried (its SHA-256 differs); {install()}",
            "plugin",
        )
    return file


def prepare() -> None:
    """Put the plugin in libtpu's place; before torch_tpu opens its device.

    Raises:
        RequestError: see :func:`path`.
    """
    if _alive:
        return
    plugin = str(path())
    os.environ["TPU_LIBRARY_PATH"] = plugin
    library = ctypes.CDLL(plugin)
    library.GetPjrtApi.restype = ctypes.c_void_p
    table = library.GetPjrtApi()
    # PJRT_Api: three words of header, the version (three words), then the functions in their order.
    slot = ctypes.cast(table + _HEADER + _CLIENT_CREATE * _WORD, ctypes.POINTER(ctypes.c_void_p))
    create = _Create(slot[0])

    def create_with_one_device(arguments):
        given = arguments.contents
        if given.count == 1:  # libtpu's size of pinned memory, which the CPU's plugin refuses
            option = given.options[0]
            option.name = ctypes.cast(_COUNT, ctypes.c_void_p).value
            option.name_size = len(_COUNT.value or b"")
            option.type, option.value, option.value_size = _INTEGER, 1, 1
        return create(arguments)

    replaced = _Create(create_with_one_device)
    _alive.extend([library, create, replaced])
    slot[0] = ctypes.cast(replaced, ctypes.c_void_p).value


# The layout of xla/pjrt/c/pjrt_c_api.h, API version 0.115.
_WORD = ctypes.sizeof(ctypes.c_void_p)
_HEADER = 5 * _WORD  # struct_size, extension_start, pjrt_api_version (24 bytes)
_CLIENT_CREATE = 10  # among the functions
_INTEGER = 1  # PJRT_NamedValue_kInt64
_COUNT = ctypes.c_char_p(b"cpu_device_count")


class _NamedValue(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("name", ctypes.c_void_p),
        ("name_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("value", ctypes.c_int64),
        ("value_size", ctypes.c_size_t),
    ]


class _CreateArguments(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("options", ctypes.POINTER(_NamedValue)),
        ("count", ctypes.c_size_t),
    ]


_Create = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CreateArguments))
