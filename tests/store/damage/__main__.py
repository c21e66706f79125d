"""Run the campaign, or replay one case of it."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

import crosswire
from tests.store.damage import hubs
from tests.store.damage.judge import FAILURES, Verdict, judge
from tests.store.damage.reference import REFERENCES, Reference, make

_REFERENCE_SEED = 1
_SHOWN = 40


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    hubs.warm_up()
    base = Path(options.directory) if options.directory else _default_directory()
    references = _references(base)
    if options.case is not None:
        return _replay(options.case, references, base)
    seeds = range(options.seed * 1_000_000, options.seed * 1_000_000 + options.cases)
    begun = time.monotonic()
    verdicts = _run(seeds, references, base, options.jobs, options.progress)
    seconds = time.monotonic() - begun
    if options.json:
        print(json.dumps(_summary(verdicts, seconds)))
    else:
        _print_table(verdicts, seconds)
    failed = any(each.failures for each in verdicts)
    if not failed and not options.directory and not list(base.glob("run-*")):
        # Nothing to replay: references are made again in a second or two.
        shutil.rmtree(base, ignore_errors=True)
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.store.damage", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1, help="another one gives other cases")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--case", type=int, metavar="SEED", help="replay one and keep its files")
    parser.add_argument("--json", action="store_true", help="the result as one line of JSON")
    parser.add_argument("--progress", action="store_true", help="tell of each failure at once")
    parser.add_argument("--directory", metavar="DIR", help="where references and cases are kept")
    return parser


def _default_directory() -> Path:
    """In memory where there is room: nothing here outlives the machine, and syncing is slow."""
    memory = Path("/dev/shm")
    room = shutil.disk_usage(memory).free if memory.is_dir() else 0
    folder = memory if room > 2 << 30 else Path(tempfile.gettempdir())
    return folder / f"crosswire-damage-{os.getuid()}" / _stamp()


def _stamp() -> str:
    """Of the sources: references that other code made don't count."""
    digest = hashlib.sha256()
    for folder in (Path(crosswire.__file__).parent, Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            if path.parent.name != "damage" or path.name in ("reference.py", "hubs.py"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _references(base: Path) -> list[Reference]:
    """Made once for all runs in a directory, so that a case can be replayed."""
    folder = base / "references"
    if not folder.exists():
        making = base / f"making-{os.getpid()}"
        for name in REFERENCES:
            make(making / name, name, _REFERENCE_SEED)
        making.rename(folder)
    return [Reference.load(folder / name) for name in REFERENCES]


def _replay(seed: int, references: list[Reference], base: Path) -> int:
    folder = base / f"case-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    verdict = judge(seed, references, folder)
    print(f"{verdict.reference}: {_damages(verdict)}")
    print(f"outcome: {verdict.outcome}, {verdict.missing} missing, {verdict.seconds:.1f} s")
    for heading in ("failures", "excused"):
        for kind, detail in getattr(verdict, heading).items():
            print(f"{heading}: {kind}: {detail}")
    for heading in ("reports", "notes"):
        texts = getattr(verdict, heading)
        for text in texts[:_SHOWN]:
            print(f"{heading}: {text}")
        if len(texts) > _SHOWN:
            print(f"{heading}: … {len(texts) - _SHOWN} more")
    print(f"the files are in {folder}")
    return int(bool(verdict.failures))


def _run(
    seeds: Sequence[int], references: list[Reference], base: Path, jobs: int, progress: bool
) -> list[Verdict]:
    """Each job is a fork of this process; what it found comes back through a file."""
    work = base / f"run-{os.getpid()}"
    work.mkdir(parents=True)
    children = []
    for job in range(jobs):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                with (work / f"{job}.jsonl").open("wb", buffering=0) as results:
                    for verdict in _work(seeds[job::jobs], references, work):
                        results.write(msgspec.json.encode(verdict) + b"\n")
                        if progress and verdict.failures:
                            print(_line(verdict), file=sys.stderr, flush=True)
                code = 0
            except KeyboardInterrupt:
                pass
            finally:
                os._exit(code)
        children.append(pid)
    for pid in children:
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            print("a job ended early: its other cases are missing", file=sys.stderr)
    verdicts = [
        msgspec.json.decode(line, type=Verdict)
        for job in range(jobs)
        for line in (work / f"{job}.jsonl").read_bytes().splitlines()
    ]
    shutil.rmtree(work, ignore_errors=True)
    return sorted(verdicts, key=lambda each: each.seed)


def _work(seeds: Sequence[int], references: list[Reference], work: Path) -> Iterator[Verdict]:
    for seed in seeds:
        folder = work / str(seed)
        yield judge(seed, references, folder)
        shutil.rmtree(folder, ignore_errors=True)


def _line(verdict: Verdict) -> str:
    what = "; ".join(f"{kind}: {detail[:160]}" for kind, detail in verdict.failures.items())
    return f"{verdict.seed} {verdict.reference} {_damages(verdict)}: {what}"


def _damages(verdict: Verdict) -> str:
    return ", ".join(map(str, verdict.damages)) or "nothing damaged"


def _summary(verdicts: list[Verdict], seconds: float) -> dict[str, object]:
    failing = [each for each in verdicts if each.failures]
    return {
        "cases": len(verdicts),
        "seconds": round(seconds, 1),
        "outcomes": Counter(each.outcome for each in verdicts),
        "failures": {
            kind: [each.seed for each in failing if kind in each.failures] for kind in FAILURES
        },
        "missing": sum(each.missing for each in verdicts),
        "undetectable": [each.seed for each in verdicts if each.excused],
        "failing": [_line(each) for each in failing],
    }


def _print_table(verdicts: list[Verdict], seconds: float) -> None:
    columns = ["unnoticed", "reported", "refused", *FAILURES, "excused"]
    print(f"{'damage':8}{'file':16}{'cases':>6}" + "".join(f"{c:>11}" for c in columns))
    rows: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        rows.setdefault((verdict.kind, verdict.file_kind), []).append(verdict)
    for (kind, file), row in [*sorted(rows.items()), (("all", ""), verdicts)]:
        counts = [_count(row, column) for column in columns]
        numbers = "".join(f"{count or '':>11}" for count in counts)
        print(f"{kind:8}{file:16}{len(row):>6}{numbers}")
    missing = [each.missing for each in verdicts if each.missing]
    print(f"{len(verdicts)} cases in {seconds:.0f} s")
    print(f"{sum(missing)} acknowledged messages missing at the end, in {len(missing)} cases")
    for verdict in verdicts:
        if verdict.failures:
            print(_line(verdict))


def _count(verdicts: list[Verdict], column: str) -> int:
    if column in FAILURES:
        return sum(column in each.failures for each in verdicts)
    if column == "excused":
        return sum(bool(each.excused) for each in verdicts)
    return sum(each.outcome == column for each in verdicts)


if __name__ == "__main__":
    sys.exit(main())
