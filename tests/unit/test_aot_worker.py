"""The compiler's process with stand-ins for jax: both forms of the interface that it meets."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import tpuscope.aot

WORKER = Path(tpuscope.aot.__file__).with_name("worker.py")
REQUEST = {"topology": "v5e:1x1", "options": {}, "cores": 1, "effort": "fast", "aliases": []}


class OlderOptions:
    """jax 0.7.2's: both pairs are there."""

    exec_time_optimization_effort = memory_fitting_effort = 0.0
    optimization_level = memory_fitting_level = 0


class NewerOptions:
    """jax 0.12's; ``__slots__`` as a C++ object has: an unknown name is an AttributeError."""

    __slots__ = (
        "device_assignment",
        "memory_fitting_level",
        "num_partitions",
        "num_replicas",
        "optimization_level",
        "use_spmd_partitioning",
    )


class Module:
    def __init__(self, attributes):
        self.operation = SimpleNamespace(
            attributes=attributes, write_bytecode=lambda buffer: buffer.write(b"bytecode")
        )


class Api:
    """What the worker uses of jax, in one of two forms, and what it was asked."""

    def __init__(self, form):
        self.form = form
        self.attributes = {}
        self.failure = None
        self.compiled = self.options = None

    def get_topology_desc(self, platform, topology_name, **options):
        if topology_name.startswith("tpu7x") and self.form == "older":
            raise RuntimeError("INVALID_ARGUMENT: Invalid TPU external name: TPU7x")
        client = SimpleNamespace(compile=self.compile)
        return SimpleNamespace(devices=[SimpleNamespace(id=i, client=client) for i in range(4)])

    def compile(self, program, devices, options):
        if isinstance(program, Module) is (self.form == "older"):
            raise TypeError("compile(): incompatible function arguments")
        if self.failure:
            raise RuntimeError(self.failure)
        self.compiled, self.options, self.devices = program, options, devices
        sizes = ("argument", "output", "alias", "temp", "generated_code")
        memory = {f"{name}_size_in_bytes": 1 for name in sizes} | {"peak_memory_in_bytes": 2}
        return SimpleNamespace(
            get_compiled_memory_stats=lambda: SimpleNamespace(**memory),
            cost_analysis=lambda: {"flops": 3.0, "bytes accessed": 4.0},
        )

    def parse(self, program):
        if not isinstance(program, str):
            raise TypeError("text")
        if "module" not in program:
            raise ValueError('Unable to parse module assembly:\nerror: "-":1:1: custom op')
        return Module(self.attributes)

    def compile_options(self):
        build = OlderOptions() if self.form == "older" else NewerOptions()
        return SimpleNamespace(executable_build_options=build)


class Context:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


@pytest.fixture(params=["older", "newer"])
def api(request):
    return Api(request.param)


@pytest.fixture
def worker(api, monkeypatch):
    """The worker, loaded with stand-ins for what it imports."""
    assignment = SimpleNamespace(create=lambda ids: ids.tolist())
    names = {
        "jax": {},
        "jax._src": {},
        "jax._src.interpreters": {"mlir": SimpleNamespace(make_ir_context=Context)},
        "jax._src.lib": {
            "xla_client": SimpleNamespace(
                CompileOptions=api.compile_options, DeviceAssignment=assignment, DeviceList=list
            )
        },
        "jax.experimental": {
            "topologies": SimpleNamespace(get_topology_desc=api.get_topology_desc)
        },
        "jaxlib": {},
        "jaxlib.mlir": {
            "ir": SimpleNamespace(
                Module=SimpleNamespace(parse=api.parse),
                IntegerAttr=lambda number: SimpleNamespace(value=number),
            )
        },
        "jaxlib.mlir.dialects": {
            "stablehlo": SimpleNamespace(
                deserialize_portable_artifact=lambda _, program: api.parse("module"),
                get_current_version=lambda: "1.13.0",
            )
        },
    }
    for name, content in names.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("worker_with_stand_ins", WORKER)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    monkeypatch.setattr(loaded.metadata, "version", {"jaxlib": "0.7", "libtpu": "0.0"}.get)
    return loaded


def test_least_effort_is_asked_for_in_the_form_that_there_is(api, worker):
    answer = worker.compile_program(b"module {}", REQUEST)
    build = api.options.executable_build_options
    if api.form == "older":
        assert api.compiled == b"bytecode"
        assert build.exec_time_optimization_effort == build.memory_fitting_effort == -1.0
        assert build.optimization_level == 0
    else:
        assert isinstance(api.compiled, Module)
        assert build.optimization_level == build.memory_fitting_level == worker.LEAST_LEVEL
    assert (answer["cores"], answer["peak"], answer["accessed"]) == (1, 2, 4.0)


def test_full_effort_leaves_the_compilers_own(api, worker):
    worker.compile_program(b"module {}", REQUEST | {"effort": "full"})
    build = api.options.executable_build_options
    assert getattr(build, "exec_time_optimization_effort", 0.0) == 0.0
    assert getattr(build, "optimization_level", 0) == 0


@pytest.mark.parametrize(
    "program", [b"ML\xefR\rStableHLO_v1.0.0\0", b"ML\xefR\rMLIR22\0", b"module"]
)
def test_all_forms_of_a_program_are_read(worker, program):
    assert worker.compile_program(program, REQUEST)["flops"] == 3.0


@pytest.mark.parametrize(
    ("said", "requested", "replicas", "partitions"),
    [
        ({}, None, 1, 1),
        ({}, 4, 1, 4),
        ({"mhlo.num_partitions": 4}, None, 1, 4),
        ({"mhlo.num_partitions": 4}, 4, 1, 4),
        ({"mhlo.num_replicas": 2, "mhlo.num_partitions": 2}, None, 2, 2),
    ],
)
def test_a_program_says_how_many_cores_it_is_for(
    api, worker, said, requested, replicas, partitions
):
    api.attributes = said
    answer = worker.compile_program(b"module", REQUEST | {"cores": requested})
    build = api.options.executable_build_options
    assert answer["cores"] == len(api.devices) == replicas * partitions
    assert (build.num_replicas, build.num_partitions) == (replicas, partitions)
    assert [len(row) for row in build.device_assignment] == [partitions] * replicas
    assert build.use_spmd_partitioning is (partitions > 1)


@pytest.mark.parametrize(
    ("program", "said", "cores", "words"),
    [
        (
            b"nonsense",
            {},
            1,
            'jaxlib 0.7 can read (it knows versions up to 1.13.0): error: "-":1:1',
        ),
        (b"\xff\xfe", {}, 1, "can't decode byte 0xff"),
        (b"module", {"mhlo.num_partitions": 4}, 2, "for 4 cores, not 2"),
        (b"module", {"mhlo.num_partitions": 8}, None, "for 8 cores; v5e:1x1 has 4"),
    ],
)
def test_a_wrong_program_is_told_from_one_that_is_rejected(
    api, worker, program, said, cores, words
):
    api.attributes = said
    with pytest.raises(worker.WrongRequest) as error:
        worker.compile_program(program, REQUEST | {"cores": cores})
    assert words in str(error.value)


def answered(worker, folder, monkeypatch, request, program=None):
    if program is not None:
        (folder / "program").write_bytes(program)
    (folder / "request.json").write_text(json.dumps(request))
    monkeypatch.setattr(sys, "argv", ["worker.py", str(folder)])
    worker.main()
    return json.loads((folder / "answer.json").read_text())


def test_a_slice_alone_is_a_request_too(api, worker, tmp_path, monkeypatch):
    request = REQUEST | {"topology": "tpu7x:2x2x1"}
    answer = answered(worker, tmp_path, monkeypatch, request)
    if api.form == "older":
        assert "Invalid TPU external name" in answer["slice_refused"]
    else:
        assert answer == {"cores": 4, "libtpu": "0.0"}


def test_what_the_compiler_says_of_a_program_is_an_answer(api, worker, tmp_path, monkeypatch):
    api.failure = "RESOURCE_EXHAUSTED: …"
    answer = answered(worker, tmp_path, monkeypatch, REQUEST, b"module")
    assert answer == {"cores": 1, "error": api.failure, "libtpu": "0.0"}
    answer = answered(worker, tmp_path, monkeypatch, REQUEST, b"nonsense")
    assert set(answer) == {"wrong", "libtpu"}
