"""``kvstow doctor`` on this host: real directories, a real Redis, the command and its exit codes."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kvstow import build
from kvstow.backends.disk import checks as disk
from kvstow.backends.disk import stored
from kvstow.backends.disk.checks import Measured, check_path
from kvstow.backends.disk.stored import check_stored
from kvstow.backends.mooncake.checks import check_mooncake
from kvstow.backends.objects.checks import check_objects
from kvstow.backends.objects.settings import ObjectsSettings
from kvstow.backends.redis.checks import check_redis
from kvstow.backends.redis.settings import RedisSettings
from kvstow.backends.result import Result, Status, failed, ok, warning
from kvstow.cli import conflicts, main
from kvstow.cli.doctor import command, host
from kvstow.cli.doctor.result import CORRECT
from kvstow.errors import SettingsError
from kvstow.fields.values import Secret
from kvstow.pool import hostmem
from kvstow.runtime import SystemClock
from kvstow.settings import sources
from kvstow.testing.store_suite import make_key
from tests.process.test_hostmem import makes_huge_pages as kernel_makes_huge_pages
from tests.rigs.redis_server import RedisServer, free_port, program
from tests.store.disks import disk as open_disk
from tests.store.disks import put, tmpfs

ROOM = 1_000_000


def by_check(results: Iterator[Result]) -> dict[str, Result]:
    return {result.check: result for result in results}


def look(path: Path, size: int = ROOM, min_free: int = 0) -> dict[str, Result]:
    return by_check(check_path(str(path), size, min_free, SystemClock()))


@pytest.fixture
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "SAMPLE_BYTES", 8 << 20)


@pytest.mark.parametrize("where", ["memfd", "tmpfs"])
def test_huge_pages_are_told_by_trying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with tmpfs(tmp_path / "shm", "16m") if where == "tmpfs" else nullcontext() as directory:
        pool_dir = str(directory) if directory else None
        if kernel_makes_huge_pages():
            assert (
                by_check(host.check_huge_pages(pool_dir, ROOM, disks=True))["huge pages"].status
                is Status.OK
            )
        monkeypatch.setattr(hostmem, "_make_huge", lambda view, offset, length: None)
        assert (
            by_check(host.check_huge_pages(pool_dir, ROOM, disks=True))["huge pages"].status
            is Status.WARNING
        )
        if directory:
            assert list(directory.iterdir()) == []


def test_huge_pages_without_memory_to_try_them() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "memfd_create", no_memory)
        assert not host.makes_huge_pages()


def no_memory(*_: object) -> int:
    raise OSError(errno.ENOMEM, "no memory")


# --- disks ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_sample")
def test_a_directory_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    found = look(tmp_path)
    assert found["disk path"] == ok("disk path", f"{tmp_path}: writable")
    assert {"filesystem", "direct I/O", "disk room", "disk speed"} <= set(found)
    assert "reads " in found["disk speed"].found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_sample")
def test_a_directory_that_is_not_there_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        disk, "filesystem_of", lambda _: disk.Filesystem(str(tmp_path), "ext4", "/dev/nvme0n1")
    )
    found = look(tmp_path / "a" / "b")
    assert found["disk path"].found == f"{tmp_path}/a/b: not there yet, {tmp_path} is writable"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_not_mounted_is_not_the_root_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "filesystem_of", lambda _: disk.Filesystem("/", "ext4", "/dev/vda"))
    found = look(tmp_path / "nvme0" / "kv")
    assert set(found) == {"disk path"}, "how fast the root disk is says nothing"
    assert found["disk path"].status is Status.WARNING
    assert found["disk path"].found.startswith(
        f"{tmp_path}/nvme0/kv: not there, and {tmp_path} is on the "
    )
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(disk, "measure", refused)
    assert look(tmp_path / "kv")["disk path"].status is Status.FAILED


def refused(*_: object) -> Measured:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_chunks_that_began_elsewhere_are_told_of(tmp_path: Path) -> None:
    path = tmp_path / "a kv"
    assert list(check_stored(str(path), "0")) == []
    roots = {bytes(make_key(1).namespace): "vLLM's default"}
    store = open_disk(path, describe=lambda namespace: {stored.ROOT: roots[namespace]})
    store.register_namespace(bytes(make_key(1).namespace), "vLLM's default")
    assert list(check_stored(str(path), "0")) == [], "nothing would be missed"
    assert put(store, make_key(1), 1)
    assert [result.status for result in check_stored(str(path), None)] == [Status.OK]
    [result] = check_stored(str(path), "0")
    assert result.status is Status.WARNING
    assert "stored with PYTHONHASHSEED unset; with PYTHONHASHSEED=0, as here," in result.found
    assert result.fix.startswith("if so, unset PYTHONHASHSEED; ")
    assert result.fix.endswith("kvstow disk ls and clear --namespace"), (
        "others may share the directory"
    )
    namespace_json = next(path.glob("*/namespace.json"))
    namespace_json.write_text(json.dumps({stored.ROOT: "seed 7"}))
    [result] = check_stored(str(path), None)
    assert result.fix.startswith("if so, export PYTHONHASHSEED=7; ")
    assert [result.status for result in check_stored(str(path), "7")] == [Status.OK]
    store.close()


def test_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert look(tmp_path / "file" / "kv")["disk path"].status is Status.FAILED


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "ro", "1m") as path:
        subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)
        found = look(path)
    assert found["disk path"].status is Status.FAILED
    assert found["disk path"].fix == "make it writable for the user that vLLM runs as"


def test_memory_is_no_disk_and_a_full_one_is_not_filled(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "8m") as path:
        found = look(path, size=64 << 20)
        assert list(path.iterdir()) == []
    assert found["filesystem"].status is Status.WARNING
    assert "not measured" in found["disk speed"].found
    assert found["disk room"].status is Status.WARNING
    assert "are lacking" in found["disk room"].found


def test_what_chunks_take_already_is_room(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    assert put(store, make_key(1), 1)
    store.close()
    used = disk.used_bytes(str(tmp_path))
    assert used > 0
    assert disk.used_bytes(str(tmp_path / "nowhere")) == 0
    (tmp_path / "ledger").write_bytes(b"x" * 4096)
    assert disk.used_bytes(str(tmp_path)) == 0


def test_network_filesystems_are_warned_of() -> None:
    for kind in ("nfs4", "cifs", "fuse.sshfs", "overlay"):
        [result] = disk._filesystem("/x", disk.Filesystem("/x", kind, "somewhere"))
        assert result.status is Status.WARNING, kind
        assert result.fix
    for kind in ("ext4", "xfs", "btrfs"):
        [result] = disk._filesystem("/x", disk.Filesystem("/x", kind, "/dev/nvme0n1"))
        assert result.status is Status.OK, kind


@pytest.mark.parametrize(
    ("measured", "check", "status"),
    [
        (Measured(True, True, True, 2e9, 2e9), "disk speed", Status.OK),
        (Measured(True, True, True, 2e9, 2e8), "disk speed", Status.WARNING),
        (Measured(False, True, True, 2e9, 2e9), "direct I/O", Status.WARNING),
        (Measured(True, False, True, 2e9, 2e9), "disk path", Status.FAILED),
        (Measured(True, True, False, 2e9, 2e9), "disk path", Status.FAILED),
    ],
)
def test_what_a_measurement_means(measured: Measured, check: str, status: Status) -> None:
    assert by_check(disk._quality("/x", measured))[check].status is status


# --- Redis ------------------------------------------------------------------------------------------------------------


def options(port: int, userinfo: str = "") -> RedisSettings:
    return RedisSettings(url=Secret(f"redis://{userinfo}127.0.0.1:{port}"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if program() is None:
        pytest.skip("no Redis here")
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.kill()


def test_a_redis_that_answers(server: RedisServer) -> None:
    server.ask("CONFIG", "SET", "maxmemory", "64mb", "maxmemory-policy", "allkeys-lru")
    found = by_check(check_redis(options(server.port), SystemClock()))
    assert [result.status for result in found.values()] == [Status.OK, Status.OK]
    assert "answers in" in found["redis"].found
    assert found["redis memory"].found.endswith("used of 64MiB, allkeys-lru")


@pytest.mark.parametrize(
    ("limit", "policy", "said"),
    [("0", "noeviction", "no limit"), ("64mb", "noeviction", "new chunks are refused")],
)
def test_a_redis_that_is_no_cache(server: RedisServer, limit: str, policy: str, said: str) -> None:
    server.ask("CONFIG", "SET", "maxmemory", limit, "maxmemory-policy", policy)
    found = by_check(check_redis(options(server.port), SystemClock()))["redis memory"]
    assert found.status is Status.WARNING
    assert said in found.found


def test_a_redis_user_who_may_not_ask(server: RedisServer) -> None:
    server.ask("ACL", "SETUSER", "kv", "on", ">pw", "~*", "+@all", "-info")
    found = by_check(check_redis(options(server.port, "kv:pw@"), SystemClock()))
    assert found["redis"].status is Status.OK
    assert found["redis memory"].status is Status.UNKNOWN


def test_a_redis_that_refuses_and_one_that_is_not_there(server: RedisServer) -> None:
    server.ask("ACL", "SETUSER", "wrong", "on", ">pw")
    for place in (options(server.port, "wrong:hidden@"), options(free_port())):
        found = by_check(check_redis(place, SystemClock()))["redis"]
        assert found.status is Status.FAILED
        assert "hidden" not in found.found


# --- other tiers ------------------------------------------------------------------------------------------------------


def test_a_bucket_that_answers_and_one_that_does_not(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    url = f"file://{tmp_path}/bucket"
    (tmp_path / "bucket").mkdir()
    found = by_check(check_objects(ObjectsSettings(url=url), SystemClock()))["objects"]
    assert found.status is Status.OK
    assert found.found.startswith(f"{url}, answers in ")
    options = ObjectsSettings(
        url="s3://bucket",
        endpoint=f"http://127.0.0.1:{free_port()}",
        anonymous=True,
        retries=0,
        timeout_ms=1000,
    )
    found = by_check(check_objects(options, SystemClock()))["objects"]
    assert found.status is Status.FAILED
    assert found.fix


def test_a_mooncake_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        master = f"127.0.0.1:{listening.getsockname()[1]}"
        assert [result.status for result in check_mooncake(master)] == [Status.OK]
    assert [result.status for result in check_mooncake(f"127.0.0.1:{free_port()}")] == [
        Status.FAILED
    ]
    with pytest.raises(SettingsError, match="expected host:port"):
        list(check_mooncake("nonsense"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "isn't installed" in next(check_mooncake("127.0.0.1:9")).found


def test_a_file_or_device_of_direct_storage(tmp_path: Path) -> None:
    path = tmp_path / "device"
    path.write_text("")
    found = by_check(check_path(str(path), ROOM, 0, SystemClock(), "direct.size"))
    assert found["disk path"].status is Status.OK
    assert look(path)["disk path"].found == f"{path}: {path} is no directory"


# --- the command -----------------------------------------------------------------------------------------------------


Kvstow = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kvstow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kvstow:
    def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sources.os, "environ", {"PATH": os.defpath, **(env or {})})
        monkeypatch.setattr(sys, "argv", ["kvstow", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of versions and memory this is a good host, whatever it is."""
    monkeypatch.setattr(command.versions, "installed", dict)
    monkeypatch.setattr(command.versions, "check_versions", lambda _: [ok("vllm", "0.32.0")])
    monkeypatch.setattr(command.host, "check_memory", lambda *_: [ok("memory", "enough")])


def rows(out: str) -> dict[str, Any]:
    return {row["check"]: row for row in json.loads(out)["results"]}


@pytest.mark.usefixtures("fits", "small_sample")
def test_a_good_host_is_exit_code_0(kvstow: Kvstow, tmp_path: Path) -> None:
    env = {"KVSTOW_DISK_PATHS": str(tmp_path), "KVSTOW_DISK_SIZE": "1GB", "PYTHONHASHSEED": "0"}
    code, out, err = kvstow("doctor", "--json", env=env)
    assert (code, err) == (0, "")
    assert json.loads(out)["ok"] is True
    assert {
        "settings",
        "vllm",
        "PYTHONHASHSEED",
        "memory",
        "pools",
        "disk path",
        "disk speed",
    } <= set(rows(out))
    assert rows(out)["settings"]["status"] == "ok"


@pytest.mark.usefixtures("fits")
def test_people_see_a_table_with_fixes(kvstow: Kvstow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        command.host,
        "check_memory",
        lambda *_: [failed("memory", "too [little] of it", "buy more")],
    )
    code, out, err = kvstow("doctor")
    assert (code, err) == (1, "")
    assert "too [little] of it" in out
    assert "→ buy more" in out
    assert "1 failed" in out


@pytest.mark.usefixtures("fits")
def test_several_are_counted_in_the_plural(kvstow: Kvstow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.host, "has_unseen", lambda: False)
    monkeypatch.setattr(command.host, "check_pools", lambda *_, **__: [])
    for number, said in ((1, "1 warning\n"), (2, "2 warnings\n")):
        monkeypatch.setattr(
            command.host,
            "check_memory",
            lambda *_, n=number: [warning("memory", "low", "more")] * n,
        )
        assert kvstow("doctor")[1].endswith(f" ok, {said}")


@pytest.mark.usefixtures("fits")
def test_what_is_set_for_nothing_is_told_of(kvstow: Kvstow) -> None:
    env = {"KVSTOW_MEMORY_SIZE": "3B", "KVSTOW_DISK_SIZE": "1GB"}
    code, out, _ = kvstow("doctor", "--json", env=env)
    assert (code, rows(out)["sizes"]["status"], rows(out)["unused"]["status"]) == (
        0,
        "warning",
        "warning",
    )
    out = kvstow("doctor", "--json", "--lmcache", env={"LMCACHE_MAX_LOCAL_DISK_SIZE": "1"})[1]
    assert "unused" not in rows(out)


@pytest.mark.usefixtures("fits")
@pytest.mark.parametrize(
    "env",
    [
        {"KVSTOW_MEMORY_SISE": "1"},
        {"KVSTOW_DISK_PATHS": "/x"},
        {"KVSTOW_CONFIG_FILE": "/nowhere.yaml"},
    ],
)
def test_wrong_settings_are_a_result(
    kvstow: Kvstow, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "check_path", lambda *_: [])
    code, out, _ = kvstow("doctor", "--json", env=env)
    assert code == 1
    assert rows(out)["settings"]["status"] == "failed"
    assert rows(out)["settings"]["fix"] == CORRECT
    assert rows(out)["vllm"]["status"] == "ok"


@pytest.mark.usefixtures("fits")
def test_a_password_is_never_shown(kvstow: Kvstow) -> None:
    url = f"redis://user:s3cret@127.0.0.1:{free_port()}"
    for arguments in ((), ("--json",)):
        code, out, err = kvstow("doctor", *arguments, env={"KVSTOW_REDIS_URL": url})
        assert code == 1
        assert "s3cret" not in out + err
    code, out, _ = kvstow("doctor", "--json", env={"KVSTOW_REDIS_URL": "redis://:s3cret@h/x"})
    assert (code, rows(out)["settings"]["status"], rows(out)["redis"]["status"]) == (
        1,
        "failed",
        "could not check",
    )
    assert "s3cret" not in out


@pytest.mark.usefixtures("fits")
def test_a_file_on_a_mount_that_hangs_is_not_waited_for(
    kvstow: Kvstow, monkeypatch: pytest.MonkeyPatch
) -> None:
    came_back = threading.Event()
    monkeypatch.setattr(conflicts, "LIMIT_S", 0.05)
    monkeypatch.setattr(build, "integrity_key", lambda _: came_back.wait())
    for name in ("doctor", "config"):
        code, out, err = kvstow(name, env={"KVSTOW_INTEGRITY_KEY_FILE": "/nfs/key"})
        assert code in (1, 2)
        assert (
            "integrity_key_file: no answer within 0.05 s: a file or directory that it names hangs"
            in out + err
        )
    came_back.set()


@pytest.mark.usefixtures("fits")
@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"KVSTOW_DIRECT_PATH": "/x"}, "direct.path is set and direct.engine isn't"),
        (
            {"KVSTOW_DIRECT_ENGINE": "file"},
            "set direct.path to a directory on local NVMe, and direct.size",
        ),
        ({"KVSTOW_DISK_PATHS": "/x"}, "(disk.paths is from KVSTOW_DISK_PATHS)"),
        ({"KVSTOW_INTEGRITY_KEY_FILE": "/nowhere"}, "integrity_key_file /nowhere can't be read"),
        ({"KVSTOW_DISK_PATHS": "/x"}, "disk.paths is set and disk.size is not"),
        ({"KVSTOW_REDIS_URL": "http://h"}, "redis.url: expected a URL that begins with redis://"),
        ({"KVSTOW_MOONCAKE_MASTER": "nonsense"}, "mooncake.master: expected host:port"),
        (
            {"KVSTOW_OBJECTS_URL": "s3://b", "KVSTOW_OBJECTS_ENDPOINT": "http://127.0.0.1:99999"},
            "objects.endpoint: expected https://host or https://host:port",
        ),
        ({"KVSTOW_PLUGINS_STORES": "1"}, "plugins.stores: '1' is no name"),
    ],
)
def test_settings_that_vllm_would_not_start_with(
    kvstow: Kvstow, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], said: str
) -> None:
    monkeypatch.setattr(disk, "check_path", lambda *_: [])
    code, out, _ = kvstow("doctor", "--json", env=env)
    assert code == 1
    assert said in rows(out)["settings"]["found"]


@pytest.mark.usefixtures("fits")
@pytest.mark.parametrize("name", ["lossless", "raw"])
def test_a_codec_needs_its_libraries(
    kvstow: Kvstow, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(disk, "check_path", lambda *_: [])
    for module in [each for each in sys.modules if each.startswith("kvstow.codec")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "numpy", None)
    env = {"KVSTOW_DISK_PATHS": "/x", "KVSTOW_DISK_SIZE": "1GB", "KVSTOW_DISK_CODEC": name}
    code, out, _ = kvstow("doctor", "--json", env=env)
    missing = (
        "disk.codec is lossless, and its libraries aren't installed: pip install 'kvstow[codec]'"
    )
    assert (missing in rows(out)["settings"]["found"], code) == (
        name == "lossless",
        int(name == "lossless"),
    )


@pytest.mark.usefixtures("fits", "small_sample")
def test_direct_storage_needs_no_pool_and_its_disk_is_looked_at(
    kvstow: Kvstow, tmp_path: Path
) -> None:
    env = {
        "KVSTOW_DIRECT_ENGINE": "file",
        "KVSTOW_DIRECT_PATH": str(tmp_path),
        "KVSTOW_DIRECT_SIZE": "1GB",
    }
    code, out, _ = kvstow("doctor", "--json", env=env)
    assert code == 0
    assert "memory" not in rows(out), "there is no pool"
    assert rows(out)["disk path"]["found"] == f"{tmp_path}: writable"
    assert rows(out)["disk room"]["found"].endswith("its part of direct.size is 1GB")
    _, out, _ = kvstow("doctor", "--json", env={**env, "KVSTOW_DIRECT_SIZE": "8PB"})
    assert (
        rows(out)["disk room"]["status"],
        "set direct.size" in rows(out)["disk room"]["fix"],
    ) == ("warning", True)
    assert "disk.size" not in out


@pytest.mark.usefixtures("fits", "small_sample")
def test_lmcaches_variables_if_asked_for(kvstow: Kvstow, tmp_path: Path) -> None:
    env = {
        "LMCACHE_LOCAL_DISK": f"file://{tmp_path}",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "1",
        "PYTHONHASHSEED": "0",
    }
    unread = rows(kvstow("doctor", "--json", env=env)[1])
    assert "disk path" not in unread
    assert (unread["LMCache"]["status"], "--lmcache" in unread["LMCache"]["fix"]) == (
        "warning",
        True,
    )
    code, out, _ = kvstow("doctor", "--json", "--lmcache", "--workers", "2", env=env)
    assert code == 0
    assert "LMCache" not in rows(out)
    assert rows(out)["disk path"]["found"] == f"{tmp_path}: writable"
    assert "disk.size=2" in rows(out)["settings"]["found"]
    assert kvstow("doctor", "--lmcache", "--file", "x")[0] == 2


@pytest.mark.usefixtures("fits")
def test_a_check_that_breaks_is_no_traceback(
    kvstow: Kvstow, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(command.host, "check_huge_pages", broken)
    code, out, err = kvstow("doctor", "--json")
    assert (code, err) == (0, "")
    assert rows(out)["huge pages"]["found"] == "could not check: RuntimeError: unforeseen"


def test_called_wrongly_is_exit_code_2(kvstow: Kvstow) -> None:
    assert kvstow("doctor", "--nonsense")[0] == 2
