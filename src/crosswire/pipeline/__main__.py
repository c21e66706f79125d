"""`crosswire pipeline` as a program that spark-submit can start.

    python -m crosswire.pipeline run --input … --output …
    spark-submit --master … PATH/crosswire/pipeline/__main__.py run --input … --output …

The second takes master and settings from spark-submit.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Started as a file, its folder is where Python looks first: `spark` and `tables` would be ours.
    here = Path(__file__).resolve().parent
    sys.path = [path for path in sys.path if not path or Path(path).resolve() != here]

    from crosswire.cli.main import main

    sys.exit(main(["pipeline", *sys.argv[1:]]))
