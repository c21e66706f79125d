"""The report: one self-contained HTML page made from the pipeline's tables."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import NamedTemporaryFile

from crosswire.errors import PipelineError
from crosswire.pipeline.report.facts import Facts
from crosswire.pipeline.report.gather import gather
from crosswire.pipeline.report.page import render
from crosswire.pipeline.report.table_reader import ReportTables

__all__ = ["Facts", "write_report"]


def write_report(source: str, target: Path, *, made_us: int) -> Facts:
    """Read the tables in `source`, write the page, and return its figures.

    Raises InvalidInput for tables that don't exist or can't be read, PipelineError if the page
    can't be written; an old page at `target` is then unchanged.
    """
    if target.is_dir():
        raise PipelineError(f"{target} is a folder; the report is one file")
    if not target.parent.is_dir():
        raise PipelineError(f"can't write {target}: there is no folder {target.parent}")
    facts = gather(ReportTables(source))
    page = render(facts, source, made_us)
    try:
        _replace(target, page)
    except OSError as error:
        raise PipelineError(f"can't write {target}: {error.strerror}") from error
    return facts


def _replace(target: Path, page: str) -> None:
    with NamedTemporaryFile(
        "w", encoding="utf-8", dir=target.parent, prefix=f".{target.name}-", delete=False
    ) as file:
        try:
            file.write(page)
            file.close()
            # Temporary files are created readable for their owner only; a report should have the
            # permissions of any other new file.
            mask = os.umask(0)
            os.umask(mask)
            Path(file.name).chmod(0o666 & ~mask)
            Path(file.name).replace(target)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
