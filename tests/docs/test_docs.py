"""What the documentation names exists, and what it shows works."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

import kvstow.errors
import kvstow.frame
from kvstow.backends.base import Store
from kvstow.cli.main import app
from kvstow.metrics import METRICS
from kvstow.settings import leaves, parse, parse_lmcache
from kvstow.testing.store_suite import StoreSuite
from tests.docs.launches import commands as commands_of
from tests.docs.pages import (
    DOCS,
    PAGES,
    ROOT,
    SOURCE,
    anchors,
    blocks,
    exists,
    links,
    name,
    prose,
    rows,
    spans,
    texts,
)

LEAVES = {leaf.key: leaf for leaf in leaves()}
CONFIG_FILE = "KVSTOW_CONFIG_FILE"
REQUEST_PARAMETERS = {"kvstow.skip_load", "kvstow.skip_store"}
ENTRY_POINTS = {"kvstow.stores"}
HISTOGRAM_PARTS = ("", "_bucket", "_sum", "_count")
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=name)


@EVERY_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@EVERY_PAGE
def test_settings_exist(page: Path) -> None:
    text = page.read_text()
    variables = {leaf.variable for leaf in LEAVES.values()} | {CONFIG_FILE}
    assert set(re.findall(r"\bKVSTOW_[A-Z][A-Z_]*\b", text)) <= variables
    sections = "|".join(sorted({leaf.section for leaf in LEAVES.values()} - {""}))
    named = {
        m for span in spans(page) for m in re.findall(rf"(?<![\w/.])(?:{sections})\.[a-z_]+", span)
    }
    assert {key for key in named if not key.endswith((".md", ".py", "_over_raw"))} <= set(LEAVES)


@EVERY_PAGE
def test_metrics_exist(page: Path) -> None:
    exported = {
        spec.exported(metric) + part for metric, spec in METRICS.items() for part in HISTOGRAM_PARTS
    }
    named = set(re.findall(r"(?<![\w./])kvstow_[a-z_]*[a-z]\b(?!\*)", page.read_text()))
    assert named <= exported


@EVERY_PAGE
def test_modules_exist(page: Path) -> None:
    named = {
        word for span in spans(page) for word in re.findall(r"(?<![\w/-])kvstow(?:\.\w+)+", span)
    }
    assert [
        word for word in sorted(named - REQUEST_PARAMETERS - ENTRY_POINTS) if not exists(word)
    ] == []


def test_vllm_metrics_exist() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed here")
    known = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    for page in PAGES:
        for metric in re.findall(r"vllm:[a-z_]+", page.read_text()):
            assert f'"{metric.removesuffix("_total")}"' in known, f"{name(page)}: {metric}"


def test_parts_of_the_benchmark_exist() -> None:
    from bench.__main__ import PARTS

    shown = [part for block in blocks("bash") for part in re.findall(r"--only (\w+)", block.body)]
    assert shown
    assert set(shown) <= set(PARTS)


def test_the_tour_has_a_sentence_for_every_package() -> None:
    parts = {
        path.stem
        for path in SOURCE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    first = (row[0].strip("`") for row in rows(DOCS / "tour.md"))
    listed = {cell.removeprefix("kvstow.") for cell in first if cell.startswith("kvstow.")}
    assert listed == parts - {"__init__"}


def test_yaml_is_settings(tmp_path: Path) -> None:
    shown = blocks("yaml")
    assert shown
    for number, block in enumerate(shown):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block.body)
        if block.body.startswith("# lmcache_"):
            assert parse_lmcache({"LMCACHE_CONFIG_FILE": str(file)}, None, workers=1).settings, (
                name(block.page)
            )
        else:
            assert parse(str(file), {}).settings, name(block.page)


def test_json_and_shell_are_settings() -> None:
    extra: list[dict[str, Any]] = []
    for block in blocks("json", "bash"):
        given_to_vllm = re.findall(r"--kv-transfer-config[\s\\]+'([^']*)'", block.body)
        assert len(given_to_vllm) == block.body.count("--kv-transfer-config"), name(block.page)
        for text in [block.body] if block.tag == "json" else given_to_vllm:
            config = json.loads(text)
            if (module := config.get("kv_connector_module_path")) is None:
                assert config["kv_connector"] == "KVStowConnector", name(block.page)
            else:
                assert exists(f"{module}.{config['kv_connector']}"), name(block.page)
            options = config.get("kv_connector_extra_config", {})
            extra += [options] if "connectors" not in options else []
        given = dict(re.findall(r"\b(KVSTOW_[A-Z_]+)=(\S+)", block.body))
        given.pop(CONFIG_FILE, None)
        parse(None, given)
        lmcache = (
            [c.environment for c in commands_of(block.body)] if "LMCACHE_" in block.body else []
        )
        for environment in lmcache:
            environment.pop("LMCACHE_CONFIG_FILE", None)
            settings = parse_lmcache(environment, None, workers=1)
            assert not any(note.warns for note in settings.notes), name(block.page)
    assert any(extra)
    for config in extra:
        parse(None, {}, config)


def commands() -> list[tuple[str, str]]:
    """Page and command line of every ``kvstow …`` in shell blocks and inline code."""
    command = re.compile(r"kvstow(?: --?[\w-]+| [a-z]+| /[\w./-]+)+")
    found = []
    for block in blocks("bash"):
        found += [
            (name(block.page), line)
            for line in block.body.splitlines()
            if line.startswith("kvstow ")
        ]
    for page in PAGES:
        found += [(name(page), span) for span in spans(page) if command.fullmatch(span)]
    return found


def test_commands_exist() -> None:
    shown = commands()
    assert shown
    for where, line in shown:
        command: Any = typer.main.get_command(app)
        words = shlex.split(line)[1:]
        while words and not words[0].startswith("-") and hasattr(command, "commands"):
            assert words[0] in command.commands, (where, line)
            command = command.commands[words.pop(0)]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        assert {word for word in words if word.startswith("-")} <= known, (where, line)


def test_every_command_is_in_the_reference() -> None:
    def names(command: Any, prefix: str) -> list[str]:
        inner = getattr(command, "commands", None)
        return (
            [prefix]
            if inner is None
            else [n for word, c in inner.items() for n in names(c, f"{prefix} {word}")]
        )

    page = (DOCS / "reference" / "cli.md").read_text()
    assert [
        line for line in names(typer.main.get_command(app), "kvstow") if f"`{line}" not in page
    ] == []


def test_messages_are_as_the_code_says_them() -> None:
    known = "\n".join(texts())
    section = ""
    shown = []
    for line in (DOCS / "how-to" / "troubleshooting.md").read_text().splitlines():
        section = line if line.startswith("## ") else section
        if (
            line.startswith("| `")
            and "own messages" not in section
            and "nothing is restored" not in section
        ):
            shown.append(line.split("`")[1])
    assert len(shown) > 30
    first_run = (DOCS / "how-to" / "first-run.md").read_text()
    for line in re.findall(
        r"^(?:kv_load_failure|Retrieved|Host pool mapped).*", first_run, re.MULTILINE
    ):
        shown += re.sub(r"\d+|cmpl-…", "…", line).split(", size", 1)
    for message in shown:
        assert message.rstrip("… ") in known, message


def test_the_frame_page_is_the_docstring() -> None:
    lines = re.findall(r"^([\d,]+) +([\d,]+) +(\S.*)$", kvstow.frame.__doc__ or "", re.MULTILINE)
    table = [row for row in rows(DOCS / "reference" / "frame.md") if row[0][0].isdigit()]
    assert table == [[a, b, text.replace("``", "`")] for a, b, text in lines]


def test_the_exceptions_page_is_the_docstring() -> None:
    def tree(text: str) -> list[str]:
        return [line.strip() for line in text.splitlines() if "──" in line]

    assert tree((DOCS / "reference" / "exceptions.md").read_text()) == tree(
        kvstow.errors.__doc__ or ""
    )


def test_decisions_are_listed() -> None:
    index = (DOCS / "decisions" / "README.md").read_text()
    records = {path.name for path in DOCS.glob("decisions/0*.md")}
    assert records
    assert {record for record in records if f"]({record})" not in index} == set()


def test_dependencies_are_explained() -> None:
    def plain(package: str) -> str:
        return re.split(r"[=<>~!\[ ]", package)[0].lower().replace("_", "-")

    page = prose(DOCS / "dependencies.md")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = [
        *project["dependencies"],
        *(one for extra in project["optional-dependencies"].values() for one in extra),
    ]
    run_time = page.split("## The demo")[0]
    listed = {
        plain(row[0]) for row in rows(DOCS / "dependencies.md") if f"| {row[0]} |" in run_time
    } - {"package"}
    assert listed == {plain(package) for package in ours}
    pinned = [
        plain(line)
        for file in ("dev.txt", "model.txt", "redis.txt", "kvstow.txt", "vllm030.txt", "torch.txt")
        for line in (ROOT / "requirements" / file).read_text().splitlines()
        if "==" in line
    ]
    assert [package for package in pinned if package not in page] == []


def test_the_sizing_table_adds_up() -> None:
    checked = 0
    for row in rows(DOCS / "how-to" / "size-memory.md"):
        match = re.search(r"\((\d+)(?: layers)?, (\d+) (?:KV heads )?of (\d+)\)", row[0])
        if match is None:
            continue
        layers, heads, size = map(int, match.groups())
        token = 2 * layers * heads * size * (4 if "float32" in row[0] else 2)
        assert int(row[1].replace(",", "")) == token
        assert int(row[2].replace(",", "")) == pytest.approx(20e9 / token, rel=0.01)
        checked += 1
    assert checked >= 4


def documented_store() -> Any:
    [code] = [
        b.body
        for b in blocks("python")
        if b.page.name == "write-a-store.md" and "class SqliteStore" in b.body
    ]
    names: dict[str, Any] = {}
    exec(compile(code, "write-a-store.md", "exec"), names)
    return names["open_store"]


class TestDocumentedStore(StoreSuite):
    def make_store(self, tmp_path: Path) -> Store:
        store: Store = documented_store()({"path": tmp_path / "chunks.db"})
        return store
