"""The documentation's shell blocks are read as a shell would."""

from __future__ import annotations

from tests.docs.launches import Command, commands
from tests.docs.pages import DOCS, blocks


def test_exports_prefixes_continuations_quotes_and_comments() -> None:
    body = """
# a comment that isn't a command
export A=1 B='{
  "x": 2
}'
C=3 run \\
  --flag '{"a": "b c"}'   # said "aside"
export D="4 5"; other
"""
    [run, other, end] = list(commands(body.replace('   # said "aside"', "")))
    assert run == Command(
        {"A": "1", "B": '{\n  "x": 2\n}', "C": "3"}, ["run", "--flag", '{"a": "b c"}']
    )
    assert other == Command({"A": "1", "B": '{\n  "x": 2\n}', "D": "4 5"}, ["other"])
    assert end.words == []


def test_a_connectors_configuration_is_found() -> None:
    [command, _] = commands('vllm serve m --port 8 --kv-transfer-config \'{"kv_role":"kv_both"}\'')
    assert command.connector == {"kv_role": "kv_both"}
    assert command.option("--port") == "8"


def test_the_rbln_blocks_are_those_that_are_run_on_the_emulated_device() -> None:
    """tests/rbln takes its launches out of rbln.md; what users of LMCache are shown must be the same."""

    def launches(page: str) -> list[Command]:
        found = [
            c for b in blocks("bash") if b.page == DOCS / "how-to" / page for c in commands(b.body)
        ]
        serve = [command for command in found if command.words[:2] == ["vllm", "serve"]]
        return [
            command for command in serve if command.connector["kv_connector"].startswith("RBLN")
        ]

    assert len(launches("from-lmcache.md")) == 2
    assert launches("from-lmcache.md") == launches("rbln.md")
