"""Where tensors may go, and how much memory there is."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jdynoff.errors import ConfigurationError
from jdynoff.primitives import transfer
from jdynoff.runtime import Disk, default_tiers, host_memory, manager_for
from jdynoff.runtime import tiers as tiers_module
from jdynoff.runtime.bandwidth import moving_step, vector_of
from jdynoff.runtime.filesystems import Filesystem, filesystem_of, parse_mounts

MOUNTS = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
23 22 0:20 / /tmp rw shared:2 master:1 - tmpfs tmpfs rw,size=1g
24 22 0:21 / /data\040dir rw - xfs /dev/sdb rw
""".strip()


def test_the_mount_table_is_read_with_optional_fields_and_blanks_in_names() -> None:
    assert parse_mounts(MOUNTS) == [("/", "ext4"), ("/tmp", "tmpfs"), ("/data dir", "xfs")]


def test_the_innermost_mount_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mountinfo"
    inner = tmp_path / "ram"
    inner.mkdir()
    beside = tmp_path / "ramdisk"
    beside.mkdir()
    table.write_text(
        f"1 0 0:1 / / rw - ext4 root rw\n2 1 0:2 / {inner.resolve()} rw - tmpfs none rw\n"
    )
    monkeypatch.setattr("jdynoff.runtime.filesystems._MOUNT_TABLE", table)
    assert filesystem_of(inner).is_memory
    assert filesystem_of(beside).kind == "ext4"
    assert filesystem_of(beside).free_bytes > 0


def memory_filesystem(_: object) -> Filesystem:
    return Filesystem("tmpfs", "/", 1 << 30)


def test_the_variable_chooses_the_directory(tmp_path: Path) -> None:
    assert default_tiers({"JDYNOFF_SPILL_DIR": str(tmp_path)}) == (Disk(str(tmp_path)),)


def test_the_first_directory_on_a_disk_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ram, disk = tmp_path / "ram", tmp_path / "disk"
    ram.mkdir()
    disk.mkdir()
    monkeypatch.setattr(
        tiers_module,
        "filesystem_of",
        lambda directory: Filesystem("tmpfs" if directory == str(ram) else "ext4", "/", 1),
    )
    assert default_tiers({"TMPDIR": str(disk)}) == (Disk(str(disk)),)
    assert default_tiers({"TMPDIR": str(ram)}) != (Disk(str(ram)),)


def test_memory_is_refused_under_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_module, "filesystem_of", memory_filesystem)
    limited = tiers_module.host_memory().__class__(1, "a test", 1 << 30)
    monkeypatch.setattr(tiers_module, "host_memory", lambda: limited)
    with pytest.raises(ConfigurationError, match="JDYNOFF_SPILL_DIR"):
        default_tiers({})


def test_memory_is_taken_with_a_warning_where_there_is_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers_module, "filesystem_of", memory_filesystem)
    unlimited = tiers_module.host_memory().__class__(1, "a test", None)
    monkeypatch.setattr(tiers_module, "host_memory", lambda: unlimited)
    (chosen,) = default_tiers({"TMPDIR": str(tmp_path)})
    with pytest.warns(RuntimeWarning, match="tmpfs, which is memory"):
        manager_for([chosen])


def test_no_writable_directory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_module, "_candidates", lambda _: [str(tmp_path / "missing")])
    with pytest.raises(ConfigurationError, match="tiers=\\[\\]"):
        default_tiers({})


def test_one_manager_for_each_configuration(tmp_path: Path) -> None:
    first = manager_for([Disk(tmp_path)])
    assert manager_for([Disk(tmp_path)]) is first
    assert manager_for([Disk(tmp_path, limit="1GiB")]) is not first
    assert manager_for([Disk(tmp_path)], verify=True) is not first


def test_a_disk_is_used_no_faster_than_it_may_be(tmp_path: Path) -> None:
    entries, size, rate = 8, 1 << 20, 32 << 20
    manager = manager_for([Disk(tmp_path, rate=rate)])
    transfer.register_handlers()
    step, x = moving_step(entries), vector_of(size)
    for _ in range(2):  # the first compiles
        ticket = manager.open(2 * size, entries * size, expected_bytes=entries * size)
        try:
            started = time.perf_counter()
            jax.block_until_ready(step(np.uint32(ticket), x))
            elapsed = time.perf_counter() - started
            stats = manager.stats(ticket)
        finally:
            manager.close(ticket)
    assert stats["bytes_written"] >= 4 * size
    # Writing and reading may overlap, but for the first write and the last read.
    assert elapsed >= stats["bytes_read"] / rate


def test_the_end_does_not_wait_for_a_slow_disk(tmp_path: Path) -> None:
    entries, size, rate = 32, 1 << 20, 1_000_000
    manager = manager_for([Disk(tmp_path, rate=rate)])
    transfer.register_handlers()
    results = moving_step(entries)(
        np.uint32(manager.open(2 * size, entries * size, expected_bytes=entries * size)),
        vector_of(size),
    )
    started = time.perf_counter()
    manager.shutdown()
    assert time.perf_counter() - started < 0.5 * entries * size / rate
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # unless it was over by then
        jax.block_until_ready(results)


def test_unusable_tiers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        manager_for([Disk(tmp_path / "missing")])
    with pytest.raises(ConfigurationError, match=r"jdynoff\.Disk"):
        manager_for(["/var/tmp"])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="one is supported"):
        manager_for([Disk(tmp_path), Disk("/")])
    with pytest.raises(ConfigurationError, match="size"):
        manager_for([Disk(tmp_path, limit=0)])
    with pytest.raises(ConfigurationError, match="number of bytes"):
        manager_for([Disk(tmp_path, rate="fast")])
    with pytest.raises(ConfigurationError, match="500MB"):
        manager_for([Disk(tmp_path, rate=500)])


GIB = 1 << 30


def write_machine(root: Path, cgroup_line: str, files: dict[str, str]) -> tuple[Path, Path]:
    proc, sys = root / "proc", root / "sys"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(cgroup_line)
    (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:  {16 * GIB // 1024} kB\n")
    for name, text in files.items():
        path = sys / "fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, sys


def test_available_memory_counts_where_there_is_no_limit(tmp_path: Path) -> None:
    proc, sys = write_machine(tmp_path, "0::/job\n", {"job/memory.max": "max\n"})
    memory = host_memory(proc, sys)
    assert memory.available_bytes == 16 * GIB
    assert memory.limit_bytes is None


def test_a_version_2_limit_of_an_outer_group_counts(tmp_path: Path) -> None:
    proc, sys = write_machine(
        tmp_path,
        "0::/outer/inner\n",
        {
            "outer/inner/memory.max": "max\n",
            "outer/memory.max": f"{4 * GIB}\n",
            "outer/memory.current": f"{3 * GIB}\n",
            "outer/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        },
    )
    memory = host_memory(proc, sys)
    assert memory.available_bytes == 2 * GIB
    assert memory.limit_bytes == 4 * GIB
    assert "cgroup" in memory.source


def test_a_version_1_limit_counts_and_its_unlimited_does_not(tmp_path: Path) -> None:
    proc, sys = write_machine(
        tmp_path,
        "5:cpu:/x\n4:memory:/job\n0::/\n",
        {
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
            "memory/job/memory.usage_in_bytes": f"{GIB}\n",
            "memory/job/memory.stat": "total_inactive_file 0\n",
        },
    )
    memory = host_memory(proc, sys)
    assert memory.available_bytes == GIB
    assert memory.limit_bytes == 2 * GIB


def test_this_machine_has_memory() -> None:
    assert host_memory().available_bytes > 0
