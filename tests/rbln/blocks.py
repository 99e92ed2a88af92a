"""The launch blocks of docs/how-to/rbln.md, as what they set and what they start."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "rbln.md"


class Launch(NamedTuple):
    """``variables`` as exported, ``arguments`` of ``vllm serve`` by flag; a flag without a value has an empty one."""

    variables: dict[str, str]
    model: str
    arguments: dict[str, str]

    @property
    def kv_transfer_config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self.arguments["--kv-transfer-config"])
        return config


def launches() -> list[Launch]:
    """The page's launch blocks: host memory, direct storage."""
    found = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [_launch(text) for text in found if "vllm serve" in text]


def alias_command() -> str:
    """The line that lets the vendor's own JSON find kvstow."""
    [line] = [line for line in PAGE.read_text().splitlines() if line.startswith("d=$(python")]
    return line


def _launch(text: str) -> Launch:
    words = shlex.split(text.replace("\\\n", " "))
    variables: dict[str, str] = {}
    start = words.index("vllm")
    for word in words[:start]:
        if word != "export":
            name, _, value = word.partition("=")
            variables[name] = value
    assert words[start + 1] == "serve"
    arguments: dict[str, str] = {}
    flag = ""
    for word in words[start + 3 :]:
        if word.startswith("--"):
            flag = word
            arguments[flag] = ""
        else:
            arguments[flag] = word
    return Launch(variables, words[start + 2], arguments)
