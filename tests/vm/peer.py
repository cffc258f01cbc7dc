"""The second guest: at the other end of a cable, started and killed when the first one's tests ask for it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Final

from tests.vm.guest import Guest
from tests.vm.host import HarnessError

#: Where the first guest sees the peer's /out. A test gives it jobs in `jobs` there, as the harness does, and asks for
#: its death or its start by making a file `kill` or `start` in /out/asked, which is gone once that is done.
IN_GUEST: Final = "/out/peer"


class Cable:
    """The two sockets that are the ends of a cable between two guests."""

    def __init__(self) -> None:
        # A socket's path has 107 bytes at most: not below the project.
        self.folder = Path(tempfile.mkdtemp(prefix="aiordma-"))
        self.near = (self.folder / "a", self.folder / "b")
        self.far = self.near[::-1]

    def close(self) -> None:
        """Remove them."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Peer:
    """A guest of one processor and 1 GiB at the far end of a cable."""

    def __init__(self, image: Path, first: Guest, cable: Cable) -> None:
        self._asked = first.folder / "asked"
        self.guest = Guest(image, first.folder / "peer", cpus=1, memory=1024, wire=cable.far)

    def start(self) -> None:
        """Boot it, and set up its end."""
        self.guest.boot()
        if self.guest.run('bash "$AIORDMA_VM_TOOLS/wire" 2', {}, 60, show=False):
            raise HarnessError(f"the peer's end of the cable could not be set up: see {self.guest.folder}/jobs")

    def serve(self) -> None:
        """Do what tests asked for."""
        for name, act in (("kill", self.guest.kill), ("start", self.start)):
            asked = self._asked / name
            if asked.exists():
                act()
                asked.unlink(missing_ok=True)
