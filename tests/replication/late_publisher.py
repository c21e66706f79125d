"""`crosswire …` that stands still as a whole between the commit of a seal and the renaming of its
files: `python -m tests.replication.late_publisher FLAG serve …`, once for each time that the file
FLAG is made."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from crosswire.cli.main import main
from crosswire.lake.files import FinishedFile
from crosswire.lake.files import publish as publish_files
from crosswire.lake.writer import LakeWriter


def plant(flag: Path) -> None:
    def publish(parts: Iterable[FinishedFile]) -> None:
        if flag.exists():
            flag.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
        publish_files(parts)

    LakeWriter.publish = staticmethod(publish)  # type: ignore[method-assign]


if __name__ == "__main__":
    plant(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
