"""Memory of machines that are made of files."""

import pytest

from tpuscope.host_memory import host_memory

KB = 1024


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n")

    def limit(folder, **files):
        group = tmp_path / "sys/fs/cgroup" / folder
        group.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (group / name.replace("__", ".")).write_text(text)

    return tmp_path, limit


def test_without_a_container_the_machine_decides(machine):
    assert host_memory(machine[0]) == (16_000_000 * KB, 8_000_000 * KB)


def test_the_limit_of_cgroup_2_counts_and_cached_files_are_available(machine):
    root, limit = machine
    stat = "anon 3\ninactive_file 500000000\n"
    limit("", memory__max="4000000000\n", memory__current="3500000000\n", memory__stat=stat)
    assert host_memory(root) == (4_000_000_000, 1_000_000_000)


def test_the_limit_of_cgroup_1_counts(machine):
    root, limit = machine
    limit(
        "memory",
        memory__limit_in_bytes="2000000000\n",
        memory__usage_in_bytes="2100000000\n",
        memory__stat="total_inactive_file 0\n",
    )
    assert host_memory(root) == (2_000_000_000, 0)


def test_no_limit_and_no_answer(machine, tmp_path):
    root, limit = machine
    limit("", memory__max="max\n", memory__current="1\n", memory__stat="")
    assert host_memory(root) == (16_000_000 * KB, 8_000_000 * KB)
    assert host_memory(tmp_path / "elsewhere") is None
