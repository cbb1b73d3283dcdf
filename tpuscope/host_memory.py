"""Total and available memory of this machine or container."""

from pathlib import Path


def host_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """Return total and available bytes of RAM; a container's limit (cgroup 2 or 1) counts.

    Args:
        root: where the machine's file system begins.

    Returns:
        ``(total, available)``, or None if the system has no /proc/meminfo (not Linux).
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    rows = dict(line.split(":", 1) for line in lines if ":" in line)
    total, available = (int(rows[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for limit, used, reclaimable in _cgroup_limits(root):
        total = min(total, limit)
        available = min(available, limit - used + reclaimable)
    return total, max(0, available)


def _cgroup_limits(root: Path) -> list[tuple[int, int, int]]:
    """Return bytes allowed, used, and reclaimable (cached file contents), of each cgroup."""
    found = []
    for folder, allowed, used, inactive in (
        ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        (
            "sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        group = root / folder
        try:  # the text "max" means no limit
            numbers = [int((group / name).read_text()) for name in (allowed, used)]
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        found.append((*numbers, int(stat.get(inactive, 0))))
    return found
