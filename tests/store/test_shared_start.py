"""What the start refuses with an object store or Mooncake, because nothing would ever be found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstow import build
from kvstow.errors import UnsupportedError
from kvstow.metrics import Metrics
from kvstow.runtime import SystemClock
from kvstow.settings import Settings, parse
from tests.rigs.tiers import open_tier
from tests.store.test_redis_start import lower_tiers, prepare

LAYOUT = build.chunk_layout(Settings(), 16, [8192])
SHARED = {
    "objects": parse(None, {}, {"objects.url": "s3://bucket/prefix"}),
    "mooncake": parse(None, {}, {"mooncake.master": "127.0.0.1:1"}),
}


@pytest.mark.parametrize("tier", SHARED)
def test_c1_a_random_root_hash_is_refused_by_name_and_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    with pytest.raises(
        RuntimeError, match=rf"tier {tier} outlives this process.*PYTHONHASHSEED=0.*sha256"
    ):
        prepare(monkeypatch, "xxhash", None, SHARED[tier])
    prepare(monkeypatch, "sha256", None, SHARED[tier])


@pytest.mark.parametrize(
    ("tier", "setting"), [("objects", r"objects\.url"), ("mooncake", r"mooncake\.master")]
)
def test_kv_without_an_identity_is_refused(tier: str, setting: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"{setting} is set, .*: random weights"):
        lower_tiers("random weights", SHARED[tier])


def test_c3_engines_whose_hashes_begin_elsewhere_are_refused_and_others_share(
    tmp_path: Path,
) -> None:
    pytest.importorskip("obstore")
    own = parse(None, {}, {"objects.url": f"file://{tmp_path}/chunks"}).settings

    def start(root: tuple[str, str] | None) -> Any:
        return open_tier(own, LAYOUT, clock=SystemClock(), metrics=Metrics(), root=root)

    tiers = [
        start(("model", "seed 0")),
        start(("model", "seed 0")),
        start(("another model", "seed 7")),
        start(None),
    ]
    with pytest.raises(
        UnsupportedError, match=r"another root \(seed 0; here seed 1\).*PYTHONHASHSEED"
    ):
        start(("model", "seed 1"))
    assert all(tier.close(5.0) for tier in tiers)
