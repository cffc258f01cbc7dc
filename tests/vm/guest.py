"""A guest under QEMU: booted, given jobs through a shared folder, and killed when it is late or no longer wanted."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, Self

from tests.vm.host import HarnessError

PROJECT: Final = Path(__file__).parents[2]
#: Emulated, on a machine that is busy too.
BOOT_LIMIT: Final = 240.0
#: With hardware virtualization, which is there on some machines and yet doesn't work.
KVM_LIMIT: Final = 45.0
#: What the guest may take to report, over a job's own limit, before it is given up.
GRACE: Final = 60.0
#: How often files are looked at.
INTERVAL: Final = 0.1
#: Lines by which the kernel says that it has a fault.
TRACE: Final = re.compile(
    r"BUG:|kernel BUG at|Oops|general protection fault|WARNING: CPU|Kernel panic|refcount_t:|hung_task"
)


class Job(NamedTuple):
    """A command that the guest runs."""

    command: str
    #: The stem of its files in the shared folder.
    file: Path
    limit: float
    #: When the guest is given up, by the monotonic clock.
    deadline: float


class Guest:
    """One guest.

    Args:
        image: The folder of the disk, kernel and initial RAM disk. They are not changed.
        folder: The guest's /out: its jobs and what comes back; emptied at the start.
        cpus: Number of processors.
        memory: Size of the memory in MiB.
        wire: Paths of two sockets, this guest's and the other's, that are the ends of one network cable between them.
    """

    def __init__(
        self, image: Path, folder: Path, *, cpus: int = 2, memory: int = 3072, wire: tuple[Path, Path] | None = None
    ) -> None:
        self.image = image
        self.folder = folder
        self.cpus = cpus
        self.memory = memory
        self.wire = wire
        self.boot_seconds = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def boot(self) -> None:
        """Start it and wait until it takes jobs; a HarnessError says how far it came otherwise."""
        while True:
            accelerator = _accelerators[0]
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            started = time.monotonic()
            with self._console().open("wb") as console:
                self._process = subprocess.Popen(
                    # Not to outlive us, however we end.
                    ["setpriv", "--pdeathsig", "KILL", *self._command(accelerator, "-nographic")],
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # ^C is the harness's, which then kills the guest.
                )
            fault = self._wait_up(started + (BOOT_LIMIT if len(_accelerators) == 1 else KVM_LIMIT))
            if fault is None:
                self.boot_seconds = time.monotonic() - started
                return
            error = self._error(f"the guest didn't boot: {fault}")
            self.kill()
            if len(_accelerators) == 1:
                raise error
            print(f"aiordma: the guest doesn't boot with {accelerator} here ({fault}): emulating it", flush=True)
            del _accelerators[0]

    def shell(self) -> int:
        """Boot it with its console on this terminal, and a shell there."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        columns = shutil.get_terminal_size().columns
        # The faster of the two may not work, and this is no place to find out.
        command = self._command(_accelerators[-1], "-nographic", f"aiordma.shell aiordma.columns={columns}")
        return subprocess.run(command, check=False).returncode

    def run(
        self,
        command: str,
        environment: Mapping[str, str],
        limit: float,
        *,
        show: bool = True,
        poll: Callable[[], None] | None = None,
    ) -> int:
        """Run a command of bash in the guest, its output on ours; gives its exit status, 124 if it was late.

        A HarnessError if the guest ended or no longer answers: the caller kills it then.

        Args:
            command: What to run, in the project's copy.
            environment: Its further environment variables.
            limit: Seconds that it may take.
            show: Whether its output is copied to ours.
            poll: Called now and then meanwhile.
        """
        return self.wait(self.start(command, environment, limit), show=show, poll=poll)

    def start(self, command: str, environment: Mapping[str, str], limit: float) -> Job:
        """Have the guest begin with a command, as `run` does, beside what else it runs."""
        file = self.folder / "jobs" / str(next(self._numbers))
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
        new = file.with_suffix(".new")
        new.write_text(f"{exports}exec timeout --kill-after=5 {limit:.0f} bash -c {shlex.quote(command)}\n")
        new.rename(file.with_suffix(".sh"))
        return Job(command, file, limit, time.monotonic() + limit + GRACE)

    def wait(self, job: Job, *, show: bool = True, poll: Callable[[], None] | None = None) -> int:
        """Wait for the end of a command; its output, also what there is by now, comes on ours."""
        shown = 0
        while True:
            # Looked at before the output is: what was written before the status is copied too.
            ended = job.file.with_suffix(".rc").exists()
            if show:
                shown = _copy_from(job.file.with_suffix(".out"), shown)
            if ended:
                return _status(job.file.with_suffix(".rc").read_text())
            if self._process is None or self._process.poll() is not None:
                raise self._error(f"the guest ended during {job.command!r}")
            if time.monotonic() > job.deadline:
                raise self._error(
                    f"the guest was still busy {GRACE:.0f} s after the limit of {job.limit:.0f} s: {job.command!r}"
                )
            if poll is not None:
                poll()
            time.sleep(INTERVAL)

    def kill(self) -> None:
        """End it at once, as a power cut does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def traces(self) -> list[str]:
        """Give the lines in which the kernel told of a fault."""
        return [line for line in self._lines() if TRACE.search(line)]

    def _console(self) -> Path:
        return self.folder / "console.log"

    def _lines(self) -> list[str]:
        console = self._console()
        return console.read_text(errors="replace").splitlines() if console.exists() else []

    def _error(self, what: str) -> HarnessError:
        tail = "\n".join(f"  | {line}" for line in self._lines()[-20:])
        return HarnessError(f"{what}; the end of its console, {self._console()}:\n{tail}")

    def _wait_up(self, deadline: float) -> str | None:
        assert self._process is not None
        while not (self.folder / "up").exists():
            if self._process.poll() is not None:
                return f"QEMU ended with status {self._process.returncode}"
            if any("KVM internal error" in line for line in self._lines()):
                return "KVM internal error"
            if time.monotonic() > deadline:
                return f"it wasn't up after {BOOT_LIMIT:.0f} s"
            time.sleep(INTERVAL)
        return None

    def _command(self, accelerator: str, display: str, arguments: str = "") -> list[str]:
        command = ["qemu-system-x86_64", "-M", "q35", display, "-no-reboot"]
        command += ["-accel", accelerator, "-cpu", "host" if accelerator == "kvm" else "max"]
        command += ["-smp", str(self.cpus), "-m", str(self.memory)]
        command += ["-kernel", str(self.image / "vmlinuz"), "-initrd", str(self.image / "initrd.img")]
        command += ["-drive", f"file={_escaped(self.image / 'root.img')},format=raw,if=virtio,snapshot=on"]
        for tag, path, how in (("project", PROJECT, ",readonly=on"), ("out", self.folder.resolve(), "")):
            share = f"local,path={_escaped(path)},mount_tag={tag},security_model=none,multidevs=remap{how}"
            command += ["-virtfs", share]
        if self.wire is None:
            command += ["-nic", "none"]
        else:
            here, there = self.wire
            here.unlink(missing_ok=True)
            ends = f"local.type=unix,local.path={here},remote.type=unix,remote.path={there}"
            mac = f"52:54:00:00:00:{_hash_of(here.name):02x}"
            command += ["-netdev", f"dgram,id=wire,{ends}", "-device", f"virtio-net-pci,netdev=wire,mac={mac}"]
        # Without tsc=reliable the guest may fall back to a slow clock.
        kernel = "console=ttyS0 panic=-1 root=/dev/vda rw loglevel=5 tsc=reliable net.ifnames=0 init=/sbin/aiordma-init"
        return [*command, "-append", f"{kernel} {arguments}"]


def _accelerators_here() -> list[str]:
    """Give what may run the guest, best first: AIORDMA_VM_ACCEL alone, or hardware if it seems there, and emulation."""
    if chosen := os.environ.get("AIORDMA_VM_ACCEL"):
        return [chosen]
    return ["kvm", "tcg,thread=multi"] if os.access("/dev/kvm", os.R_OK | os.W_OK) else ["tcg,thread=multi"]


#: What is still to be tried.
_accelerators = _accelerators_here()


def _hash_of(name: str) -> int:
    """Give a byte for a name."""
    return sum(name.encode()) & 0xFF


def _escaped(path: Path) -> str:
    return str(path).replace(",", ",,")


def _copy_from(file: Path, shown: int) -> int:
    try:
        with file.open("rb") as output:
            output.seek(shown)
            new = output.read()
    except FileNotFoundError:
        return shown
    sys.stdout.buffer.write(new)
    sys.stdout.flush()
    return shown + len(new)


def _status(text: str) -> int:
    if not text.strip().isdigit():
        raise HarnessError(f"a job in the guest left no exit status but {text!r}")
    return int(text)
