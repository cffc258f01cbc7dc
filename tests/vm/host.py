"""What the harness needs of the machine it runs on, and how that reaches its package sources."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Final

KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class HarnessError(Exception):
    """The harness can't do its work; the message says why and what to do, in one line or with a tail of output."""


def which(program: str) -> str | None:
    """Find a program, also where only root's PATH leads."""
    return shutil.which(program, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")


def require_packages(*, build: bool) -> None:
    """Raise a HarnessError that names the packages missing on this machine; fewer are needed when nothing is built."""
    if platform.machine() != "x86_64":
        raise HarnessError(f"the guest is x86-64, and so must this machine be: it is {platform.machine()}")
    missing = [] if which("qemu-system-x86_64") else ["qemu-system-x86"]
    if build:
        if not which("apt-get"):
            raise HarnessError("the guest's image is made with mmdebstrap and apt: run this on Debian or Ubuntu")
        programs = {"mmdebstrap": "mmdebstrap", "mke2fs": "e2fsprogs"}
        if os.geteuid() != 0:
            programs["newuidmap"] = "uidmap"
        missing += [package for program, package in programs.items() if not which(program)]
        if not KEYRING.exists():
            missing.append("debian-archive-keyring")
    if missing:
        raise HarnessError(f"missing here: {', '.join(missing)}; apt-get install {' '.join(missing)}")


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def find_mirror(targets: str) -> str | None:
    """Pick Debian's archive out of the lines 'URI ORIGIN LABEL' of this machine's package sources."""
    for line in targets.splitlines():
        uri, _, kind = line.partition(" ")
        if kind == "Debian Debian":
            return uri
    return None


def mirror() -> str:
    """Say where this machine takes Debian from: AIORDMA_VM_MIRROR, or else what apt is set up with."""
    if configured := os.environ.get("AIORDMA_VM_MIRROR"):
        return configured
    targets = ("apt-get", "indextargets", "--format", "$(REPO_URI) $(ORIGIN) $(LABEL)", "Created-By: Packages")
    found = find_mirror(_output(*targets))
    if found is None:
        raise HarnessError(
            "apt knows no Debian archive on this machine: run apt-get update, or set AIORDMA_VM_MIRROR=URL to one"
        )
    return found


def apt_options() -> list[str]:
    """Give those options of this machine's apt that reaching its archive may need."""
    wanted = ("Acquire::Check-Valid-Until ", "Acquire::Check-Date ", "Acquire::http::Proxy ", "Acquire::https::Proxy ")
    return [line.removesuffix(";") for line in _output("apt-config", "dump").splitlines() if line.startswith(wanted)]
