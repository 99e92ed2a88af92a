"""The container page: its YAML parses, and what it sets is settings that fit together."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from kvstow.backends.disk.settings import DiskSettings
from kvstow.backends.objects.settings import ObjectsSettings
from kvstow.backends.redis.settings import RedisSettings
from kvstow.settings import parse, parse_size
from tests.docs.pages import DOCS, Block, blocks

PAGE = "containers.md"
YML = [block for block in blocks("yml") if block.page.name == PAGE]
BINARY = {"Gi": 1 << 30, "g": 1 << 30}


def bytes_of(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(\w+)", text).groups()  # type: ignore[union-attr]
    return int(number) * BINARY[unit]


@pytest.mark.parametrize(
    "block", blocks("yml"), ids=lambda block: f"{block.page.name}:{block.body[:20]}"
)
def test_yaml_that_is_no_settings_parses(block: Block) -> None:
    assert all(isinstance(document, dict) for document in yaml.safe_load_all(block.body))


def pod() -> dict[str, Any]:
    [deployment] = [
        d for block in YML for d in yaml.safe_load_all(block.body) if d.get("kind") == "Deployment"
    ]
    assert (
        deployment["spec"]["selector"]["matchLabels"]
        == deployment["spec"]["template"]["metadata"]["labels"]
    )
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def settings_of(container: dict[str, Any]) -> Any:
    plain = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    secret = {entry["name"]: "redis://:x@h" for entry in container["env"] if "valueFrom" in entry}
    assert all(isinstance(value, str) for value in plain.values()), "Kubernetes takes text only"
    return parse(None, {**plain, **secret}).settings


def test_the_pods_settings_fit_its_limits_and_volumes() -> None:
    spec = pod()
    for container in (*spec["initContainers"], *spec["containers"]):
        settings, limits = settings_of(container), container["resources"]["limits"]
        shm = sum(bytes_of(v["emptyDir"]["sizeLimit"]) for v in spec["volumes"] if "emptyDir" in v)
        assert settings.memory.size + shm < bytes_of(limits["memory"])
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(settings.section(DiskSettings).paths) <= set(mounts)
        assert set(mounts.values()) == {volume["name"] for volume in spec["volumes"]}
    [vllm] = spec["containers"]
    ports = {port["name"] for port in vllm["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert vllm[probe]["httpGet"]["path"] == "/health"
        assert vllm[probe]["httpGet"]["port"] in ports


def test_arguments_are_vllms() -> None:
    [compose] = [d for block in YML for d in yaml.safe_load_all(block.body) if "services" in d]
    [service] = compose["services"].values()
    for arguments in (service["command"], pod()["containers"][0]["args"]):
        [config] = [
            one.partition("=")[2] for one in arguments if one.startswith("--kv-transfer-config=")
        ]
        assert not arguments[0].startswith("-"), "vLLM wants the model first, without --model"
        assert json.loads(config) == {"kv_connector": "KVStowConnector", "kv_role": "kv_both"}
    settings = parse(None, service["environment"]).settings
    assert settings.memory.size < bytes_of(service["mem_limit"])
    assert service["volumes"][0].split(":")[1] in settings.section(DiskSettings).paths


def test_the_image_has_what_the_examples_set() -> None:
    text = (DOCS / "how-to" / PAGE).read_text()
    [tag] = re.findall(r"^docker build -t (\S+) \.$", text, re.MULTILINE)
    [extras] = re.findall(r"^RUN .* pip install .*'/src/kvstow\[([\w,]+)\]'$", text, re.MULTILINE)
    assert set(re.findall(r"\bimage: (\S+)", text)) == {tag}
    for container in pod()["containers"]:
        settings = settings_of(container)
        sections = {"redis": RedisSettings, "objects": ObjectsSettings}
        needed = {tier for tier, kind in sections.items() if settings.section(kind).url is not None}
        assert needed
        assert needed <= set(extras.split(","))


def test_examples_that_may_share_a_directory_agree_on_the_root_of_hashes() -> None:
    set_in = [
        block
        for block in blocks("bash", "yml")
        if block.page.name == PAGE and "PYTHONHASHSEED" in block.body
    ]
    assert set_in == []


def test_docker_lines_fit_together() -> None:
    lines = [
        line
        for block in blocks("bash")
        if block.page.name == PAGE
        for line in block.body.replace("\\\n", " ").splitlines()
        if line.startswith("docker run")
    ]
    assert len(lines) >= 3
    for line in lines:
        given = dict(re.findall(r"-e (KVSTOW_\w+)=(\S+)", line))
        settings = parse(None, given).settings
        [memory] = re.findall(r"--memory (\S+)", line)
        assert parse_size(given["KVSTOW_MEMORY_SIZE"]) < bytes_of(memory)
        volumes = {inside for _, inside in re.findall(r"-v (\S+):(\S+)", line)}
        assert set(settings.section(DiskSettings).paths or ()) == volumes
