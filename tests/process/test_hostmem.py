"""Shared host memory between real processes: mapping, reservation, and what is left after a kill."""

import ctypes
import errno
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest

from kvstow import hostmem
from kvstow.errors import UnsupportedError
from kvstow.hostmem import HostMemory, PoolError, PoolRef, map_memory, populate, reap
from kvstow.settings import host_facts
from tests.store.disks import mounted

SIZE = 1 << 20
KILLS = 5

CREATE = """
import json, sys
from dataclasses import asdict
from kvstow.hostmem import HostMemory
size, directory = int(sys.argv[1]), sys.argv[2]
memory = HostMemory.in_directory(size, "child", directory) if directory else HostMemory.anonymous(size, "child")
memory.view[:5] = b"child"
print(json.dumps(asdict(memory.ref)), flush=True)
sys.stdin.read()
"""

MAP = """
import json, sys
from kvstow.hostmem import PoolRef, map_memory
view = map_memory(PoolRef(**json.loads(sys.argv[1])))
view[5:10] = b"-mate"
print(bytes(view[:10]).decode(), flush=True)
sys.stdin.read()
print(bytes(view[:10]).decode(), flush=True)
"""


class Child:
    """A process that runs ``script`` up to its first line of output and then waits for its standard input to end."""

    def __init__(self, script: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline().strip()

    def ref(self) -> PoolRef:
        return msgspec.json.decode(self.line, type=PoolRef)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def finish(self) -> str:
        return self.process.communicate()[0].strip()


@pytest.fixture(params=["memfd", "file"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HostMemory]:
    if request.param == "memfd":
        memory = HostMemory.anonymous(SIZE, "test")
    else:
        memory = HostMemory.in_directory(SIZE, "test", str(tmp_path / "pool"))
    yield memory
    memory.close()


def reserved_bytes(memory: HostMemory) -> int:
    return os.stat(f"/proc/self/fd/{memory.ref.fd}").st_blocks * 512


def resident_bytes(memory: HostMemory) -> int:
    """Of the creator's own mapping."""
    mapping = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if " memfd:" in line or re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mapping = line
        elif line.startswith("Rss:") and f" {memory.ref.inode} " in mapping and "memfd:" in mapping:
            return int(line.split()[1]) << 10
    raise AssertionError("it is not mapped")


def pool_files(directory: Path) -> set[str]:
    return {str(path) for path in directory.iterdir() if path.name.endswith(hostmem.FILE_SUFFIX)}


def text(ref: PoolRef) -> str:
    return msgspec.json.encode(asdict(ref)).decode()


def test_another_process_sees_the_same_bytes(memory: HostMemory) -> None:
    memory.view[:5] = b"owner"
    child = Child(MAP, text(memory.ref))
    assert child.line == "owner-mate"
    assert bytes(memory.view[:10]) == b"owner-mate"
    child.finish()


def test_only_this_user_can_open_it(memory: HostMemory) -> None:
    status = os.stat(f"/proc/self/fd/{memory.ref.fd}")
    assert stat.S_IMODE(status.st_mode) == 0o600
    if memory.ref.path is not None:
        assert stat.S_IMODE(os.stat(Path(memory.ref.path).parent).st_mode) == 0o700


def test_no_process_inherits_it(memory: HostMemory) -> None:
    run = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=False)
    assert "pipe" in run.stdout
    assert "kvstow" not in run.stdout
    assert "memfd" not in run.stdout


@pytest.mark.parametrize("change", [{"inode": 1}, {"size_bytes": SIZE * 2}, {"size_bytes": SIZE // 2}])
def test_what_is_not_the_same_memory_is_refused(memory: HostMemory, change: dict[str, int]) -> None:
    with pytest.raises(UnsupportedError, match="is not the host pool 'test'"):
        map_memory(replace(memory.ref, **change))


def test_a_creator_that_has_ended_is_an_error_that_says_what_to_do() -> None:
    child = Child(CREATE, str(SIZE), "")
    ref = child.ref()
    map_memory(ref)
    child.kill()
    with pytest.raises(UnsupportedError, match=rf"'child' of process {ref.pid} .*pool_dir"):
        map_memory(ref)


def test_a_link_in_place_of_the_pool_file_is_refused(tmp_path: Path) -> None:
    memory = HostMemory.in_directory(SIZE, "test", str(tmp_path))
    assert memory.ref.path is not None
    os.rename(memory.ref.path, tmp_path / "moved")
    os.symlink(tmp_path / "moved", memory.ref.path)
    with pytest.raises(UnsupportedError):
        map_memory(memory.ref)
    memory.close()


def test_close_leaves_nothing_and_may_come_twice(memory: HostMemory) -> None:
    ref = memory.ref
    memory.close()
    memory.close()
    with pytest.raises(UnsupportedError):
        map_memory(ref)
    if ref.path is not None:
        assert not os.path.exists(ref.path)


def test_j4_once_unnamed_nothing_is_left_to_clean_up_and_the_bytes_stay_shared(tmp_path: Path) -> None:
    memory = HostMemory.in_directory(SIZE, "test", str(tmp_path))
    mapped = map_memory(memory.ref)
    memory.unname()
    memory.unname()
    assert os.listdir(tmp_path) == []
    memory.view[:4] = b"seen"
    assert bytes(mapped[:4]) == b"seen"
    memory.close()


def test_a_view_outlives_close(memory: HostMemory) -> None:
    part = memory.view[:4]
    part[:] = b"kept"
    memory.close()
    assert bytes(part) == b"kept"


def test_a_file_is_reserved_at_once(tmp_path: Path) -> None:
    memory = HostMemory.in_directory(SIZE, "test", str(tmp_path))
    assert reserved_bytes(memory) >= SIZE
    memory.close()


@pytest.mark.parametrize("huge", ["always within_size advise [never] deny force", "always [advise] never", None])
def test_a_memfd_is_reserved_piece_by_piece_and_keeps_its_content(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, huge: str | None
) -> None:
    if huge is not None:
        (tmp_path / "enabled").write_text(huge)
    monkeypatch.setattr(hostmem, "_SHARED_HUGE_PAGES", str(tmp_path / "enabled"))
    memory = HostMemory.anonymous(SIZE, "test")
    assert reserved_bytes(memory) == 0
    memory.view[:3] = b"abc"
    memory.reserve(0, SIZE // 2)
    assert reserved_bytes(memory) == SIZE // 2
    memory.reserve(SIZE // 2, SIZE // 2)
    assert reserved_bytes(memory) == SIZE
    assert bytes(memory.view[:4]) == b"abc\0"
    mapped = resident_bytes(memory)
    assert mapped == (SIZE if huge and "[advise]" in huge else 4096), "by mapping it only where that makes huge pages"
    memory.close()
    memory.reserve(0, SIZE)  # too late, and no harm to whatever has the descriptor's number now


def test_populate_backs_the_pages_and_keeps_their_content(memory: HostMemory) -> None:
    memory.view[5000:5003] = b"abc"
    populate(memory.view, 4096, SIZE // 2)
    assert reserved_bytes(memory) >= SIZE // 2
    assert bytes(memory.view[4999:5004]) == b"\0abc\0"


def test_populate_is_nothing_on_a_kernel_that_cannot(memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def madvise(address: int, length: int, advice: int) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(hostmem, "_libc", type("Libc", (), {"madvise": staticmethod(madvise)}))
    populate(memory.view, 0, SIZE)


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT])
def test_populate_without_memory_names_the_setting(
    memory: HostMemory, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def madvise(address: int, length: int, advice: int) -> int:
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(hostmem, "_libc", type("Libc", (), {"madvise": staticmethod(madvise)}))
    with pytest.raises(PoolError, match=r"memory\.size"):
        populate(memory.view, 0, SIZE)


def fail(code: int):  # type: ignore[no-untyped-def]
    def call(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EDQUOT])
def test_a_full_directory_names_the_setting_and_the_container_option_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fail(code))
    with pytest.raises(PoolError, match=r"memory\.size: no 1,048,576 bytes in pool_dir='.*--shm-size") as caught:
        HostMemory.in_directory(SIZE, "test", str(tmp_path))
    assert os.strerror(code) in str(caught.value)
    assert pool_files(tmp_path) == set()


def test_more_than_the_directory_has_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"memory\.size.* free there.*--shm-size"):
        HostMemory.in_directory(1 << 60, "test", str(tmp_path))
    assert pool_files(tmp_path) == set()


def test_a_filesystem_of_huge_pages_that_does_not_say_what_is_free_is_asked_for_them(tmp_path: Path) -> None:
    """Mounted without a size it reports 0 of 0 blocks. No machine has a terabyte of huge pages free."""
    with mounted(tmp_path / "huge", "-t", "hugetlbfs", "none") as path:
        assert host_facts(str(path)).pool_dir_free_bytes is None
        with pytest.raises(PoolError, match="No space left"):
            HostMemory.in_directory(1 << 40, "test", str(path))
        assert pool_files(path) == set()


@pytest.mark.parametrize("call", ["ftruncate", "memfd"])
def test_no_memory_for_a_memfd_names_the_setting(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    if call == "ftruncate":
        monkeypatch.setattr(os, "ftruncate", fail(errno.ENOMEM))
        with pytest.raises(PoolError, match=r"memory\.size: no 1,048,576 bytes of memory"):
            HostMemory.anonymous(SIZE, "test")
        return
    memory = HostMemory.anonymous(SIZE, "test")
    monkeypatch.setattr(os, "posix_fallocate", fail(errno.ENOMEM))
    with pytest.raises(PoolError, match=r"memory\.size: no 1,048,576 bytes of memory"):
        memory.reserve(0, SIZE)
    memory.close()


def test_a_pool_dir_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PoolError, match=r"pool_dir='.*file'.*set another directory"):
        HostMemory.in_directory(SIZE, "test", str(tmp_path / "file"))


def test_j4_a_killed_creator_leaves_at_most_one_file_that_the_next_start_removes(tmp_path: Path) -> None:
    live = Child(CREATE, str(SIZE), str(tmp_path))
    theirs = live.ref().path
    for _ in range(KILLS):
        child = Child(CREATE, str(SIZE), str(tmp_path))
        assert pool_files(tmp_path) == {theirs, child.ref().path}
        child.kill()
    view = map_memory(live.ref())
    assert bytes(view[:5]) == b"child"
    assert len(reap(str(tmp_path))) == 1
    assert pool_files(tmp_path) == {theirs}
    live.kill()
    memory = HostMemory.in_directory(SIZE, "test", str(tmp_path))
    assert pool_files(tmp_path) == {memory.ref.path}
    memory.close()
    assert pool_files(tmp_path) == set()
    assert bytes(view[:5]) == b"child"  # whoever has it mapped keeps it


def test_j4_a_killed_creator_of_a_memfd_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm"))
    for _ in range(KILLS):
        child = Child(CREATE, str(SIZE), "")
        assert child.ref().path is None
        assert not {name for name in set(os.listdir("/dev/shm")) - before if "kvstow" in name}
        child.kill()
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "kvstow" in name}


def test_a_worker_keeps_the_memory_when_its_creator_is_killed() -> None:
    creator = Child(CREATE, str(SIZE), "")
    worker = Child(MAP, creator.line)
    creator.kill()
    assert worker.finish() == "child-mate"


def test_j2_reaping_touches_nothing_else(tmp_path: Path) -> None:
    user = os.geteuid()
    kept = [
        f"kvstow-{user}-0123456789abcdef",  # no suffix
        f"kvstow-{user}-0123456789ABCDEF.kvstow-pool",
        f"kvstow-{user}-0123.kvstow-pool",
        f"x-kvstow-{user}-0123456789abcdef.kvstow-pool",
        "psm_0123",
        "precious.kvstow-pool",
    ]
    for name in kept:
        (tmp_path / name).write_text("precious")
    named = f"kvstow-{user}-{{:016x}}.kvstow-pool".format
    (tmp_path / named(1)).mkdir()
    os.symlink(tmp_path / "precious.kvstow-pool", tmp_path / named(2))
    os.mkfifo(tmp_path / named(3))
    (tmp_path / named(4)).write_text("orphan")
    before = set(os.listdir(tmp_path))
    assert reap(str(tmp_path)) == [str(tmp_path / named(4))]
    assert set(os.listdir(tmp_path)) == before - {named(4)}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user's")
def test_j4_another_users_files_stay(tmp_path: Path) -> None:
    theirs = tmp_path / "kvstow-0-0123456789abcdef.kvstow-pool"
    theirs.write_text("theirs")
    os.chown(theirs, 12345, 12345)
    assert reap(str(tmp_path)) == []
    assert theirs.exists()


def test_starts_at_the_same_time_do_not_reap_each_other(tmp_path: Path) -> None:
    """Every start reaps, and a file is not yet locked in the instant of its creation."""
    lost: list[str] = []

    def start_often() -> None:
        for _ in range(100):
            memory = HostMemory.in_directory(4096, "test", str(tmp_path))
            if memory.ref.path is None or not os.path.exists(memory.ref.path):
                lost.append(str(memory.ref.path))
            memory.close()

    threads = [threading.Thread(target=start_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost == []
    assert pool_files(tmp_path) == set()
