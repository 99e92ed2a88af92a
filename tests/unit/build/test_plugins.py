"""Stores that other packages bring, from settings to a tier of an engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kvstow import build
from kvstow.backends.descriptor import OpenContext
from kvstow.build import plugins
from kvstow.build.plugins import GROUP, plugin_names
from kvstow.cache import Cache, LookupState
from kvstow.cli.doctor import command
from kvstow.errors import SettingsError, UnsupportedError
from kvstow.metrics import Metrics
from kvstow.pool.policy.lru import LRU
from kvstow.pool.pool import HostPool
from kvstow.runtime import SystemClock, ThreadExecutor
from kvstow.settings import Settings, parse
from kvstow.tiers import Tier
from tests.docs.pages import blocks
from tests.rigs.tiers import open_tier
from tests.unit.rig import FRAME_BYTES, LAYOUT, TOKENS, fill, hit, key, keys

EXAMPLE = next(
    b.body
    for b in blocks("python")
    if b.page.name == "write-a-store.md" and "def open_store" in b.body
)
BAD = """
import sys, threading
def raises(options): raise ZeroDivisionError("with " + str(options.get("password")))
def ends(options): sys.exit(3)
def hangs(options): threading.Event().wait()
def nothing(options): return None
def half(options): return type("Half", (), {"contains": lambda self, keys: []})()
def echoes(options): raise ValueError(repr(options))
class Mute(BaseException):
    def __str__(self): raise ValueError
def mute(options): raise Mute
class Fake:
    def __getattr__(self, name): sys.exit(4)
def fake(options): return Fake()
class NotOurs:
    def __init__(self, config, metadata, loop): pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The documented example, installed, with its entry point; and a module of bad ones."""
    folder = tmp_path / "site" / "kvstow_example"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "sqlite_store.py").write_text(EXAMPLE)
    (folder / "bad.py").write_text(BAD)
    about = tmp_path / "site" / "kvstow_example-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kvstow-example\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        f"[{GROUP}]\nsqlite = kvstow_example.sqlite_store:open_store\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return "kvstow_example"


def settings(**given: Any) -> Settings:
    return parse(None, {}, {"plugins": given}).settings


def built(**given: Any) -> list[Tier]:
    context = OpenContext(LAYOUT, SystemClock())
    plugins = build.resolve_plugins(settings(**given))
    return [build.open_tier(plugin, context, Metrics()) for plugin in plugins]


def refused(**given: Any) -> str:
    with pytest.raises(SettingsError) as error:
        built(**given)
    return str(error.value)


def engine(tiers: list[Tier]) -> tuple[Cache, ThreadExecutor]:
    sealer = ThreadExecutor("sealer")
    made = Cache(
        pool=HostPool.create(LAYOUT, 8 * FRAME_BYTES, name="plugins"),
        policy=LRU(),
        tiers=tiers,
        layout=LAYOUT,
        clock=SystemClock(),
        metrics=Metrics(),
        sealer=sealer,
        fetch_deadline_s=30.0,
    )
    return made, sealer


@pytest.mark.parametrize("store", ["sqlite", "sqlite=kvstow_example.sqlite_store:open_store"])
def test_the_documented_store_is_a_tier_that_outlives_the_engine(
    package: str, tmp_path: Path, store: str
) -> None:
    options = {"sqlite": {"path": str(tmp_path / "chunks.db")}}
    [tier] = built(stores=[store], options=options, threads=2)
    assert tier.name == "sqlite"
    first, sealer = engine([tier])
    for i in range(3):
        lease = first.reserve(key(i), b"", TOKENS)
        assert lease is not None
        fill(lease, key(i))
        first.commit(lease)
        lease.release()
    while first.busy():
        (sealer if sealer.outstanding else tier.executor).wait(1.0)
        first.poll()
    first.close(5.0)
    [tier] = built(stores=[store], options=options)
    second, _ = engine([tier])
    while (found := second.fetch("r", keys(0, 1, 2))).state is LookupState.PENDING:
        tier.executor.wait(1.0)
        second.poll()
    assert found == hit(3)
    assert second.origins("r") == {"sqlite": 3}
    second.close(5.0)


def test_a_plug_in_is_among_the_tiers_that_outlive_the_process() -> None:
    assert build.asked_for(settings(stores=["mine"])) == {"mine": "plugins.stores"}


def test_o1_names_that_are_none_are_refused() -> None:
    for stores, said in (
        (["disk"], "there is a tier disk already"),
        (["memory"], "there is a tier memory already"),
        (["a", "a=b:c"], "there is a tier a already"),
        (["../x"], "is no name"),
        (["a" * 33], "is no name"),
        (["a=b"], "expected name=module:function"),
        (["a=b:c()"], "expected name=module:function"),
    ):
        with pytest.raises(SettingsError, match=said):
            plugin_names(settings(stores=stores))


def test_o1_what_cannot_be_opened_stops_the_start_and_says_why(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no installed package has registered it (there are:" in refused(stores=["other"])
    for function, said in (
        ("nowhere:f", "ModuleNotFoundError"),
        (f"{package}.bad:missing", "AttributeError"),
        (f"{package}.bad:ends", "SystemExit: 3"),
        (f"{package}.bad:NotOurs", "TypeError"),
        (f"{package}.bad:nothing", "NoneType has no contains"),
        (f"{package}.bad:half", "Half has no read"),
        (f"{package}.bad:mute", "Mute, which can't be printed"),
        (f"{package}.bad:fake", "SystemExit: 4"),
    ):
        assert said in refused(stores=[f"mine={function}"]), function
    monkeypatch.setattr(plugins, "OPEN_S", 0.01)
    assert "did not end within 0.01 s" in refused(stores=[f"mine={package}.bad:hangs"])


def test_secrets_among_the_options_are_not_in_the_error(package: str) -> None:
    said = refused(stores=[f"mine={package}.bad:raises"], options={"mine": {"password": "hunter2"}})
    assert "ZeroDivisionError: with ****" in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    "options",
    [
        {"auth": {"password": "hunter2"}},
        {"tokens": [{"a": "hunter2"}]},
        {"url": "redis://u:hunter2@h/1"},
    ],
)
def test_nor_are_those_inside_of_others(package: str, options: dict[str, Any]) -> None:
    said = refused(stores=[f"mine={package}.bad:echoes"], options={"mine": options})
    assert "****" in said
    assert "hunter2" not in said


def test_o1_options_of_nobody_are_refused(package: str) -> None:
    assert "options for sqllite" in refused(stores=["sqlite"], options={"sqllite": {}})


# --- a plug-in with a descriptor --------------------------------------------------------------------------------------


@pytest.fixture
def described(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The documented descriptor, as it stands on the page."""
    for module in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)  # another test's, from another directory
    body = next(
        b.body
        for b in blocks("python")
        if b.page.name == "write-a-store.md" and "BACKEND = Backend(" in b.body
    )
    text = body.replace("my_package", package)
    (tmp_path / "site" / package / "described.py").write_text(text)
    return f"sqlite={package}.described:BACKEND"


def test_a_descriptor_brings_settings_codec_and_checks(described: str, tmp_path: Path) -> None:
    options = {"path": str(tmp_path / "chunks.db"), "codec": "lossless"}
    [plugin] = build.resolve_plugins(settings(stores=[described], options={"sqlite": options}))
    assert (plugin.name, plugin.codec, plugin.threads) == ("sqlite", "lossless", 2)
    [check] = plugin.backend.checks(plugin.section, SystemClock(), None)
    [result] = check.run()
    assert result.found == f"{options['path']} is the database"
    assert [check.name for check in command._tiers(settings(stores=[described]))] == ["plug-ins"]


def test_a_descriptors_hash_root_is_compared(described: str, tmp_path: Path) -> None:
    given = settings(stores=[described], options={"sqlite": {"path": str(tmp_path / "chunks.db")}})
    one = open_tier(given, LAYOUT, root=("model", "seed 0"))
    with pytest.raises(
        UnsupportedError, match=r"tier sqlite: .*another root \(seed 0; here seed 1"
    ):
        open_tier(given, LAYOUT, root=("model", "seed 1"))
    assert one.close(5.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pth": "/x"}, r"unknown setting pth in plugins\.options\.sqlite; did you mean path\?"),
        ({"threads": "many"}, "expected integer"),
    ],
)
def test_o1_wrong_options_of_a_descriptor_are_refused(
    described: str, options: dict[str, str], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        build.resolve_plugins(settings(stores=[described], options={"sqlite": options}))
