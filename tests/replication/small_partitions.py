"""`crosswire replication …` whose logs have small partitions, so that trimming can be seen soon."""

from __future__ import annotations

import sys

from crosswire.cli.main import main
from crosswire.commitlog.postgres.engine import PostgresEngine

if __name__ == "__main__":
    defaults = PostgresEngine.create_for.__kwdefaults__
    assert defaults is not None
    defaults["partition_records"] = 50
    sys.exit(main(sys.argv[1:]))
