"""Values that nobody means to write: each is refused by ``SettingsError``, at once, whatever it is."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from kvstow.errors import SettingsError
from kvstow.settings import leaves, parse
from kvstow.settings import sources as module
from kvstow.settings.yamlfile import parse_yaml

HUGE = 10**5000  # more digits than Python turns into text
ODD = (
    HUGE,
    -HUGE,
    1 << 63,
    -1,
    float("nan"),
    float("inf"),
    "",
    "\x00",
    "\ud800",
    ["a", ["b"]],
    {"x": 1},
    object(),
)


@pytest.mark.parametrize("key", [leaf.key for leaf in leaves()])
def test_odd_values_are_taken_or_refused(key: str) -> None:
    for value in ODD:
        with suppress(SettingsError):  # anything else fails this test
            parse(None, {}, {key: value})


def test_aliases_of_aliases_are_not_written_out() -> None:
    bomb: list[Any] = ["x"] * 10
    for _ in range(60):
        bomb = [bomb] * 10
    with pytest.raises(SettingsError) as error:
        parse(None, {}, {"chunk_size": bomb})
    assert len(str(error.value)) < 3 * module.SHOWN_CHARACTERS


@pytest.mark.parametrize(
    "secret", ["mooncakestore://user1:hunter2@h:1", "user:hunter2@redis.in.example.com:6379"]
)
@pytest.mark.parametrize("key", [leaf.key for leaf in leaves()])
def test_nothing_of_a_list_or_mapping_is_repeated(key: str, secret: str) -> None:
    said = ""
    for value in ([secret], (secret, 1), {secret: 1}, {"a": [secret]}):
        try:
            parse(None, {}, {key: value})
        except SettingsError as error:
            said += str(error)
    assert "hunter2" not in said


@pytest.mark.parametrize(
    "tag", ["!!timestamp 'x'", "!!bool 'x'", "!!int 'x'", "!!float 'x'", "!!pairs x"]
)
def test_a_value_that_is_not_of_its_tag(tag: str) -> None:
    with pytest.raises(SettingsError, match="valid YAML"):
        parse_yaml(f"chunk_size: {tag}".encode(), "file")
