"""The guest's disk, kernel and initial RAM disk: made once, kept in the user's cache by the hash of their recipe."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.vm.host import HarnessError, apt_options, mirror, require_packages

HERE: Final = Path(__file__).parent
SUITE: Final = "trixie"
#: The Python of that suite: the wheels are for it.
PYTHON: Final = "3.13"
#: The largest the disk may grow to; the file is sparse.
SIZE: Final = "2200M"
#: Not the -cloud- kernel: it has no rxe. What builds siw, gcc, stays for the programs in C that tests may build.
PACKAGES: Final = (
    "ethtool fio gcc ibverbs-providers ibverbs-utils iperf iproute2 kmod libibverbs-dev librdmacm-dev librdmacm1t64 "
    "linux-headers-amd64 linux-image-amd64 make netcat-traditional nvme-cli perftest procps python3 python3-pyverbs "
    "rdma-core rdmacm-utils tcpdump xz-utils"
)
WHEELS: Final = "attrs click crc32c hdrhistogram hypothesis numpy pytest pytest-timeout pytest-xdist rich uvloop"
PLATFORMS: Final = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")
FILES: Final = ("root.img", "vmlinuz", "initrd.img")
SITE: Final = f"/usr/local/lib/python{PYTHON}/dist-packages"

#: Run beside the tree when all is in it. The copy leaves out what is mounted there, and what only apt needs.
PACK: Final = f"""
set -eu
copy="$1.copy"
trap 'rm -rf "$copy" "$copy.img"' EXIT
mkdir "$copy"
tar -C "$1" --one-file-system --exclude './proc/*' --exclude './sys/*' --exclude './dev/*' --exclude './run/*' \
    --exclude './var/lib/apt/lists/*' --exclude './var/cache/apt/*' -c . | tar -C "$copy" -x
PATH="$PATH:/usr/sbin:/sbin" mke2fs -q -t ext4 -d "$copy" "$copy.img" {SIZE}
mkdir "$1/packed"
cp --sparse=always "$copy.img" "$1/packed/root.img"
cp -L "$1"/boot/vmlinuz-* "$1/packed/vmlinuz"
cp -L "$1"/boot/initrd.img-* "$1/packed/initrd.img"
"""


def recipe() -> str:
    """Give everything that decides what is in the image, as text."""
    scripts = [(HERE / "guest" / name).read_text() for name in ("init", "kernel")]
    return "\n".join([SUITE, PYTHON, SIZE, PACKAGES, WHEELS, *PLATFORMS, PACK, *scripts])


def recipe_hash(text: str) -> str:
    """Name an image by its recipe."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cache() -> Path:
    """Give the folder that images are kept in."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "aiordma" / "vm"


def image() -> Path:
    """Give the folder of the image, built now if this machine hasn't it yet."""
    folder = cache() / recipe_hash(recipe())
    if not folder.exists():
        require_packages(build=True)
        cache().mkdir(parents=True, exist_ok=True)
        with _only_builder():
            if not folder.exists():
                _build(folder)
    require_packages(build=False)
    os.utime(folder)
    return folder


def clean() -> None:
    """Remove all images."""
    shutil.rmtree(cache(), ignore_errors=True)


@contextlib.contextmanager
def _only_builder() -> Iterator[None]:
    with (cache() / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("aiordma: another process is building the guest's image; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(folder: Path) -> None:
    print("aiordma: building the guest's image, once: some minutes", flush=True)
    started = time.monotonic()
    for other in cache().iterdir():
        # What a killed builder left (we hold the lock), and what no clone has used for a month.
        if other.name.startswith("new-") or (other.is_dir() and other.stat().st_mtime < time.time() - 30 * 86400):
            shutil.rmtree(other)
    with tempfile.TemporaryDirectory(prefix="new-", dir=cache()) as name:
        work = Path(name)
        _wheels(work)
        _tree(work)
        # The way out of the user namespace fills the holes.
        subprocess.run(["fallocate", "--dig-holes", work / "root.img"], check=False)
        made = work / "image"
        made.mkdir()
        for file in FILES:
            (work / file).rename(made / file)
        made.rename(folder)
    print(f"aiordma: the guest's image was built in {time.monotonic() - started:.0f} s: {folder}", flush=True)


def _wheels(work: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-compile"]
    pip += ["--only-binary=:all:", "--implementation=cp", f"--python-version={PYTHON}"]
    pip += [f"--abi=cp{PYTHON.replace('.', '')}", *(f"--platform={platform}" for platform in PLATFORMS)]
    _logged([*pip, "--target", str(work / "site"), *WHEELS.split()], work, "downloading the guest's wheels")


def _tree(work: Path) -> None:
    hooks = [
        f'mkdir -p "$1"{SITE}',
        f"sync-in {shlex.quote(str(work / 'site'))} {SITE}",
        f"upload {shlex.quote(str(HERE / 'guest' / 'init'))} /sbin/aiordma-init",
        f"upload {shlex.quote(str(HERE / 'guest' / 'kernel'))} /root/kernel",
        'chmod 755 "$1/sbin/aiordma-init"',
        'chroot "$1" sh /root/kernel',
        f'chroot "$1" python3 -m compileall -q {SITE} || :',  # Some packages have files for other Pythons.
        PACK,
        *(f"download /packed/{file} {shlex.quote(str(work / file))}" for file in FILES),
    ]
    command = ["mmdebstrap", "--mode=auto", "--variant=minbase", "--format=null", "--skip=cleanup/apt/lists"]
    command += [f"--aptopt={option}" for option in apt_options()]
    command += [f"--include={','.join(PACKAGES.split())}", *(f"--customize-hook={hook}" for hook in hooks)]
    # Large, and not to be on a small tmpfs; the root of a user namespace writes there too, so not in the cache.
    environment = {"TMPDIR": "/var/tmp"} | os.environ | {"LC_ALL": "C.UTF-8"}
    _logged([*command, SUITE, "-", mirror()], work, "building the guest's tree with mmdebstrap", environment)


def _logged(command: list[str], work: Path, what: str, environment: dict[str, str] | None = None) -> None:
    log = work / "log"
    with log.open("w") as output:
        status = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False
        ).returncode
    if status:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise HarnessError(f"{what} failed (status {status}):\n{tail}")
