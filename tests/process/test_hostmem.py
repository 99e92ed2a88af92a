"""Shared host memory between real processes: mapping, reservation, and what is left after a kill."""

import ctypes
import errno
import gc
import mmap
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest

from kvstow.errors import UnsupportedError
from kvstow.pool import hostmem
from kvstow.pool.hostmem import HostMemory, PoolError, PoolRef, map_memory, populate, reap
from kvstow.settings import host_facts
from kvstow.settings.machine import Holder
from tests.store.disks import mounted, tmpfs

SIZE = 1 << 20
HUGE = 2 << 20
SIZE_OF_MANY = 32 * HUGE
KILLS = 5

CREATE = """
import json, sys
from dataclasses import asdict
from kvstow.pool.hostmem import HostMemory
size, directory = int(sys.argv[1]), sys.argv[2]
memory = HostMemory.in_directory(size, "child", directory) if directory else HostMemory.anonymous(size, "kvstow-child")
memory.view[:5] = b"child"
print(json.dumps(asdict(memory.ref)), flush=True)
sys.stdin.read()
"""

MAP = """
import json, sys
from kvstow.pool.hostmem import PoolRef, map_memory
view = map_memory(PoolRef(**json.loads(sys.argv[1])))
view[5:10] = b"-mate"
print(bytes(view[:10]).decode(), flush=True)
sys.stdin.read()
print(bytes(view[:10]).decode(), flush=True)
"""


WRITE = """
import json, os, sys, threading
from kvstow.pool.hostmem import PoolRef, map_memory
view = map_memory(PoolRef(**json.loads(sys.argv[1])))
print("writing", flush=True)
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set())).start()
said = {}
while not stop.is_set() or len(said) < len(view) // 4096:
    for at in range(0, len(view), 4096):
        said[at] = os.urandom(8)
        view[at : at + 8] = said[at]
print(*(said[at].hex() for at in range(0, len(view), 4096)))
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


def mapped(ref: PoolRef, what: str) -> int:
    """Bytes that the kernel counts as ``what``, of all mappings of the memory in this process."""
    mapping, found = "", 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mapping = line
        elif line.startswith(f"{what}:") and f" {ref.inode} " in mapping:
            found += int(line.split()[1]) << 10
    return found


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def makes_huge_pages() -> bool:
    """Whether this kernel does so when asked: as Linux 6.1 does, unless it was told to deny them."""
    release = [int(number) for number in re.findall(r"\d+", os.uname().release)[:2]]
    about = Path("/sys/kernel/mm/transparent_hugepage")
    return (
        release >= [6, 1]
        and about.is_dir()
        and "[deny]" not in (about / "shmem_enabled").read_text()
        and int((about / "hpage_pmd_size").read_text()) == HUGE
    )


huge_pages = pytest.mark.skipif(
    not makes_huge_pages(), reason="the kernel does not make huge pages on demand"
)


@contextmanager
def huge_pages_set_aside(pages: int) -> Iterator[None]:
    setting = Path("/proc/sys/vm/nr_hugepages")
    before = setting.read_text()
    try:
        setting.write_text(str(pages + int(before)))
    except OSError:
        pytest.skip("may not set huge pages aside here")
    try:
        if int(setting.read_text()) < pages + int(before):
            pytest.skip("there is no memory for huge pages")
        yield
    finally:
        setting.write_text(before)


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
    run = subprocess.run(
        ["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=False
    )
    assert "pipe" in run.stdout
    assert "kvstow" not in run.stdout
    assert "memfd" not in run.stdout


@pytest.mark.parametrize(
    "change", [{"inode": 1}, {"size_bytes": SIZE * 2}, {"size_bytes": SIZE // 2}]
)
def test_what_is_not_the_same_memory_is_refused(memory: HostMemory, change: dict[str, int]) -> None:
    with pytest.raises(UnsupportedError, match="is not the host pool 'test'"):
        map_memory(replace(memory.ref, **change))


def test_a_creator_that_has_ended_is_an_error_that_says_what_to_do() -> None:
    child = Child(CREATE, str(SIZE), "")
    ref = child.ref()
    map_memory(ref)
    child.kill()
    with pytest.raises(UnsupportedError, match=rf"'kvstow-child' of process {ref.pid} .*pool_dir"):
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


def test_j4_once_unnamed_nothing_is_left_to_clean_up_and_the_bytes_stay_shared(
    tmp_path: Path,
) -> None:
    memory = HostMemory.in_directory(SIZE, "test", str(tmp_path))
    mapped = map_memory(memory.ref)
    memory.unname()
    memory.unname()
    assert os.listdir(tmp_path) == []
    memory.view[:4] = b"seen"
    assert bytes(mapped[:4]) == b"seen"
    memory.close()


def test_who_still_maps_the_memory_of_a_killed_creator_is_found() -> None:
    owner = Child(CREATE, str(SIZE), "")
    worker = Child(MAP, owner.line)
    try:
        held = Holder(owner.process.pid, 4096)
        assert held in host_facts().holders
        owner.kill()
        assert [holder for holder in host_facts().holders if holder.pid == worker.process.pid] == [
            Holder(worker.process.pid, 4096)
        ]
    finally:
        worker.finish()


def test_a_view_outlives_close(memory: HostMemory) -> None:
    part = memory.view[:4]
    part[:] = b"kept"
    memory.close()
    assert bytes(part) == b"kept"


def test_a_file_is_reserved_at_once(tmp_path: Path) -> None:
    memory = HostMemory.in_directory(SIZE, "test", str(tmp_path))
    assert reserved_bytes(memory) >= SIZE
    memory.close()


def test_a_file_is_not_reserved_again_while_others_write_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its file system can't, as ramfs or NFS, libc does: it writes a zero wherever it has just read one."""
    memory = HostMemory.in_directory(SIZE, "test", str(tmp_path))
    theirs = map_memory(memory.ref)

    def as_libc_does(fd: int, offset: int, length: int) -> None:
        theirs[offset : offset + 4] = b"said"
        os.pwrite(fd, b"\0", offset)

    monkeypatch.setattr(os, "posix_fallocate", as_libc_does)
    theirs[:4] = b"said"
    memory.reserve(0, SIZE)
    assert bytes(theirs[:4]) == b"said"
    memory.close()


def test_a_memfd_is_reserved_piece_by_piece_and_keeps_its_content() -> None:
    memory = HostMemory.anonymous(SIZE, "test")
    assert reserved_bytes(memory) == 0
    memory.view[:3] = b"abc"
    memory.reserve(0, SIZE // 2)
    assert reserved_bytes(memory) == SIZE // 2
    memory.reserve(SIZE // 2, SIZE // 2)
    assert reserved_bytes(memory) == SIZE
    assert bytes(memory.view[:4]) == b"abc\0"
    assert mapped(memory.ref, "Rss") == 4096, "small pages are reserved and not mapped here"
    memory.close()
    memory.reserve(0, SIZE)  # too late, and no harm to whatever has the descriptor's number now


@huge_pages
@pytest.mark.parametrize("where", ["memfd", "tmpfs"])
@pytest.mark.parametrize("first", ["reserve", "populate"])
def test_the_memory_is_of_huge_pages_whoever_asks_for_it_first(
    tmp_path: Path, where: str, first: str
) -> None:
    size = 4 * HUGE + SIZE
    with tmpfs(tmp_path / "shm", "32m") if where == "tmpfs" else nullcontext() as directory:
        memory = (
            HostMemory.in_directory(size, "test", str(directory))
            if directory
            else HostMemory.anonymous(size, "test")
        )
        theirs = map_memory(memory.ref)
        theirs[HUGE - 2 : HUGE + 2] = b"kept"
        if first == "reserve":
            memory.reserve(0, 3 * HUGE)
            memory.reserve(3 * HUGE, HUGE + SIZE)
        populate(theirs, 0, size)
        mappings = 2 if first == "reserve" else 1
        assert mapped(memory.ref, "ShmemPmdMapped") == mappings * 4 * HUGE, (
            "what does not fill one is of small pages"
        )
        assert bytes(memory.view[HUGE - 3 : HUGE + 3]) == b"\0kept\0"
        assert reserved_bytes(memory) == size
        memory.close()
        theirs.release()


@huge_pages
@pytest.mark.parametrize("_again", range(3))
def test_what_others_write_meanwhile_is_kept(_again: int) -> None:
    memory = HostMemory.anonymous(SIZE_OF_MANY, "test")
    writer = Child(WRITE, text(memory.ref))
    for at in range(0, SIZE_OF_MANY, HUGE):
        memory.reserve(at, HUGE)
    for at, said in enumerate(writer.finish().split()):
        assert memory.view[at * 4096 : at * 4096 + 8].tobytes().hex() == said
    memory.close()


@huge_pages
def test_a_page_that_a_device_holds_stays_where_it_is() -> None:
    """Pages that are being transferred, or pinned, must not be exchanged for others. Here a pipe holds some."""
    memory = HostMemory.anonymous(2 * HUGE, "test")
    memory.view[: 2 * HUGE] = os.urandom(4096) * (2 * HUGE // 4096)
    said = bytes(memory.view[:8192])
    read, write = os.pipe()
    held = ctypes.c_char.from_buffer(memory.view)
    span = (ctypes.c_size_t * 2)(ctypes.addressof(held), len(said))
    assert ctypes.CDLL(None).vmsplice(write, span, 1, 0) == len(said)
    memory.reserve(0, 2 * HUGE)
    memory.view[:4] = b"seen"
    assert os.read(read, len(said)) == b"seen" + said[4:], "the pipe's page is the pool's"
    os.close(read)
    os.close(write)
    del held
    memory.close()


@pytest.mark.parametrize("where", ["memfd", "file"])
def test_a_mapping_begins_where_a_huge_page_may_and_goes_with_its_last_view(
    where: str, tmp_path: Path
) -> None:
    memory = (
        HostMemory.anonymous(SIZE, "t")
        if where == "memfd"
        else HostMemory.in_directory(SIZE, "t", str(tmp_path))
    )
    theirs = map_memory(memory.ref)
    for view in (memory.view, theirs):
        assert ctypes.addressof(ctypes.c_char.from_buffer(view)) % HUGE == 0
    inode = f" {memory.ref.inode} "
    assert Path("/proc/self/maps").read_text().count(inode) == 2
    part = theirs[:4]
    memory.close()
    assert Path("/proc/self/maps").read_text().count(inode) == 1
    theirs.release()
    assert Path("/proc/self/maps").read_text().count(inode) == 1
    part.release()
    assert inode not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("step", ["dup", "mmap of a range", "mmap of the memory"])
def test_memory_that_cannot_be_mapped_leaves_no_range_and_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    memory, as_it_is = HostMemory.anonymous(1 << 30, "test"), hostmem._mmap

    def fails(address: int | None, length: int, protection: int, flags: int, fd: int) -> int:
        if (fd < 0) == (step == "mmap of a range"):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return as_it_is(address, length, protection, flags, fd)

    if step == "dup":
        monkeypatch.setattr(os, "dup", fail(errno.EMFILE))
    else:
        monkeypatch.setattr(hostmem, "_mmap", fails)
    for attempt in (
        lambda: HostMemory.anonymous(1 << 30, "test"),
        lambda: map_memory(memory.ref),
        lambda: hostmem.private_memory(1 << 30, "test"),
    ):
        gc.collect()
        before = address_space(), set(os.listdir("/proc/self/fd"))
        with pytest.raises((PoolError, OSError)):
            attempt()
        gc.collect()
        assert address_space() - before[0] < 1 << 29
        assert set(os.listdir("/proc/self/fd")) == before[1]
    memory.close()


@pytest.mark.parametrize("size", [2 * HUGE, 2 * HUGE - 4096])
def test_a_filesystem_of_huge_pages_holds_the_pool(tmp_path: Path, size: int) -> None:
    with mounted(tmp_path / "huge", "-t", "hugetlbfs", "none") as path, huge_pages_set_aside(4):
        memory = HostMemory.in_directory(size, "test", str(path))
        theirs = map_memory(memory.ref)
        memory.reserve(0, size)
        populate(theirs, 0, size)
        theirs[size - 4 : size] = b"last"
        assert bytes(memory.view[size - 4 : size]) == b"last"
        memory.close()
        theirs.release()


def test_populate_backs_the_pages_and_keeps_their_content(memory: HostMemory) -> None:
    memory.view[5000:5003] = b"abc"
    populate(memory.view, 4096, SIZE // 2)
    assert reserved_bytes(memory) >= SIZE // 2
    assert bytes(memory.view[4999:5004]) == b"\0abc\0"


@pytest.mark.parametrize(
    "code", [errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.EAGAIN, errno.EINTR]
)
def test_populate_is_nothing_on_a_kernel_that_cannot(
    memory: HostMemory, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def madvise(address: int, length: int, advice: int) -> int:
        ctypes.set_errno(code)
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
    with pytest.raises(
        PoolError, match=r"memory\.size: no 1,048,576 bytes in pool_dir='.*--shm-size"
    ) as caught:
        HostMemory.in_directory(SIZE, "test", str(tmp_path))
    assert os.strerror(code) in str(caught.value)
    assert pool_files(tmp_path) == set()


def test_more_than_the_directory_has_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"memory\.size.* free there.*--shm-size"):
        HostMemory.in_directory(1 << 60, "test", str(tmp_path))
    assert pool_files(tmp_path) == set()


def test_a_filesystem_of_huge_pages_that_does_not_say_what_is_free_is_asked_for_them(
    tmp_path: Path,
) -> None:
    """Mounted without a size it reports 0 of 0 blocks. No machine has a terabyte of huge pages free."""
    with mounted(tmp_path / "huge", "-t", "hugetlbfs", "none") as path:
        assert host_facts(str(path)).pool_dir_free_bytes is None
        with pytest.raises(PoolError, match="No space left"):
            HostMemory.in_directory(1 << 40, "test", str(path))
        assert pool_files(path) == set()


@pytest.mark.parametrize("call", ["ftruncate", "memfd"])
def test_no_memory_for_a_memfd_names_the_setting(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
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


def test_j4_a_killed_creator_leaves_at_most_one_file_that_the_next_start_removes(
    tmp_path: Path,
) -> None:
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
