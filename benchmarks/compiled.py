"""What compiling the hottest modules with mypyc would give: CPU time of the hub per message.

Copies the package to a temporary directory, compiles there what mypyc accepts, and runs the pure
and the compiled copy in turns. The source itself is not changed, and nothing is installed.

    python benchmarks/compiled.py [--all] [--rounds 5] [--scale 1.0] [--mypyc DIR] [--keep DIR]

It needs a C compiler, Python's headers and mypy with its compiler (`pip install mypy[mypyc]`), here
or in the directory of `--mypyc` (`pip install --target DIR mypy[mypyc]`). `--keep` leaves both
copies in a directory, or uses those that are there: compiling takes minutes.

Modules that mypyc refuses stay as they are; the script prints which, and why. Classes that are
extended by code that is not compiled get mypyc's decorator for that, in the copy.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeGuard

ROOT = Path(__file__).parent.parent
TREES = ("pure", "compiled")
PROTOCOLS = {"emp": 10_000, "emqp": 10_000, "relink": 20_000, "epoxy": 5_000, "micromsg2": 20_000}
"""The protocols, and how many messages a round sends in batches."""
SINGLE = 1000
GOAL = 0.7

CORE = """
hub/{commits,ledger,intake,dispatch}
hub/backlog/{backlog,consumers,memory}
"""
"""Every durable message passes through these, whatever its protocol."""

MODULES = """
envelope budget session
wire/contract
wire/emp/{decoder,frames,connection}
wire/zmtp/{decoder,frames,connection,routing}
wire/emqp/{decoder,frames,connection,headers,jobs,runs}
wire/relink/{decoder,frames,connection,link,receiving,sending,channels}
wire/epoxy/{decoder,frames,connection,comm}
wire/micromsg2/{decoder,frames,connection,windows,values}
hub/{turns,dispatch,commits,intake,intake_gate,queues,ledger,wall,cursor,timers,shares}
hub/core
hub/backlog/{consumers,backlog,memory,retries}
commitlog/{body,records,contract}
store/{records,keys,engine,recovery,contract,rocks}
gateways/{gateway,payloads}
gateways/emp/{gateway,messages}
gateways/emqp/{gateway,messages,broker,clients,workers}
gateways/relink/{gateway,messages,links,link_end,producers,consumers}
gateways/epoxy/{gateway,messages}
gateways/micromsg2/{gateway,messages,outbox,intake}
"""
"""With `--all`: what a profile of durable messages shows.

Not `hub/attachment`, whose Structs and classes refer to each other; not `server/metrics`, whose
moved Structs use its constants before they are set; and not `commitlog/local`: its attribute
`_thread` becomes `__thread` in C, which is a keyword of the compiler.
"""

PLAIN_BASES = {"msgspec.Struct", "NamedTuple", "Enum", "IntEnum", "StrEnum", "IntFlag"}
"""What extends one of these is no extension type of mypyc's."""

REFUSED = re.compile(r"^(crosswire/\S+\.py):\d+: (?!note:|warning:)(.*)$", re.MULTILINE)


# ------------------------------------------------------------------------------------ compiling


def paths(words: str) -> list[str]:
    """The files of these modules, relative to the directory that holds the package."""
    found = []
    for word in words.split():
        folder, _, names = word.partition("{")
        each = names.rstrip("}").split(",") if names else [""]
        found += [f"crosswire/{folder}{name}.py" for name in each]
    return found


def prepare(folder: Path, mypyc: str | None, modules: list[str]) -> None:
    """Make both copies in `folder` and compile these modules in one of them."""
    for name in TREES:
        for package in ("crosswire", "pyspark_crosswire"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / "src" / package, folder / name / package, ignore=ignored)
    tree = folder / "compiled"
    moved = sum(_move_structs(tree, each) for each in modules)
    print(f"  {moved} Structs, enums and named tuples stay as they are", flush=True)
    while refused := _compile(tree, modules, mypyc, run="check"):
        for module, reason in refused.items():
            print(f"  left out: {module}: {reason}", flush=True)
        modules = [each for each in modules if each not in refused]
    _decorate(tree, modules)
    started = time.perf_counter()
    if refused := _compile(tree, modules, mypyc, run="build"):
        raise SystemExit(f"mypyc refuses what it accepted before: {refused}")
    count = len(list(tree.rglob("*.so")))
    took = time.perf_counter() - started
    print(f"  {len(modules)} modules compiled in {took:.0f} s, {count} libraries", flush=True)


def _compile(tree: Path, modules: Sequence[str], mypyc: str | None, *, run: str) -> dict[str, str]:
    """Run mypyc in a process of its own; returns the modules that it refuses, and why."""
    path = [mypyc] if mypyc else []
    done = subprocess.run(
        [sys.executable, __file__, "--run", run, *modules],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(tree)])},
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.returncode:
        return {}
    refused: dict[str, str] = {}
    for module, reason in REFUSED.findall(done.stdout + done.stderr):
        if module in modules:
            refused.setdefault(module, reason)
    if not refused:
        raise SystemExit(f"mypyc failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return refused


def run_mypyc(modules: Sequence[str], *, build: bool) -> None:
    """In the process of `_compile`: check the modules, or compile them beside their sources."""
    from mypyc.build import mypycify
    from setuptools import setup  # type: ignore[import-untyped]

    options = ["--check-untyped-defs", "--ignore-missing-imports", "--follow-imports=silent"]
    extensions = mypycify([*options, *modules], opt_level="2", debug_level="0", multi_file=True)
    if build:
        jobs = f"-j{os.cpu_count()}"
        arguments = ["build_ext", "--inplace", jobs]
        setup(name="crosswire", packages=[], ext_modules=extensions, script_args=arguments)


def _decorate(tree: Path, modules: Sequence[str]) -> None:
    """Allow what the rest of the program does with classes that will be compiled."""
    extended: set[str] = set()
    for file in [*tree.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        if file.is_relative_to(tree) and str(file.relative_to(tree)) in modules:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                extended |= {each.id for each in node.bases if isinstance(each, ast.Name)}
    for module in modules:
        file = tree / module
        lines = file.read_text().splitlines(keepends=True)
        classes = [each for each in ast.parse("".join(lines)).body if _is_native(each)]
        # A class can be extended by code that isn't compiled only if its bases can be, too.
        more = True
        while more:
            more = False
            for node in classes:
                bases = {each.id for each in node.bases if isinstance(each, ast.Name)}
                if node.name in extended and not bases <= extended:
                    extended |= bases
                    more = True
        _insert(file, lines, classes, extended)


def _move_structs(tree: Path, module: str) -> int:
    """Let a module take its Structs, enums and named tuples from a pure copy of itself.

    mypyc ignores the keywords of a class, so that a Struct would lose `frozen`, `array_like` and
    `kw_only`, and keeps only the outermost class of a field's annotation, so that a ClassVar would
    become a field. Returns how many classes were moved.
    """
    file = tree / module
    text = file.read_text()
    moved: set[str] = set()
    lines = text.splitlines(keepends=True)
    pure = file.with_stem(f"{file.stem}_pure")
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ClassDef):
            continue
        bases = {ast.unparse(each).partition("[")[0] for each in node.bases}
        if node.keywords or bases & (PLAIN_BASES | moved):
            moved.add(node.name)
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
            lines[first : node.end_lineno] = [""] * ((node.end_lineno or first) - first)
            source = ".".join(pure.relative_to(tree).with_suffix("").parts)
            lines[first] = f"from {source} import {node.name}\n"
    if moved:
        pure.write_text(text)
        file.write_text("".join(lines))
    return len(moved)


def _is_native(node: ast.stmt) -> TypeGuard[ast.ClassDef]:
    """Whether mypyc makes an extension type of this class."""
    if not isinstance(node, ast.ClassDef) or node.keywords:
        return False
    bases = {ast.unparse(each).partition("[")[0] for each in node.bases}
    return not bases & (PLAIN_BASES | {"Protocol", "Shape"})


def _insert(file: Path, lines: list[str], classes: list[ast.ClassDef], extended: set[str]) -> None:
    added = 0
    for node in classes:
        if node.name in extended:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            lines.insert(first - 1 + added, "@mypyc_attr(allow_interpreted_subclasses=True)\n")
            added += 1
    if added:
        future = next(n for n, line in enumerate(lines) if line.startswith("from __future__"))
        lines.insert(future + 1, "from mypy_extensions import mypyc_attr\n")
        file.write_text("".join(lines))


# ------------------------------------------------------------------------------------ measuring


def run_core() -> None:
    """In a process of its own, with one of the copies: print CPU µs for each piece of work."""
    import asyncio

    import uvloop
    from hub_core import GROUP, PEER, Taker, envelopes

    from crosswire.hub.hub import Hub
    from crosswire.store.rocks import RocksStore
    from crosswire.wire.emp.decoder import EmpDecoder
    from crosswire.wire.emp.frames import Request, serialize

    async def through_queue(path: Path, groups: int, size: int) -> float:
        """Durable messages: sent, committed, delivered and settled, in groups of `size`."""
        hub = Hub(RocksStore(path), now=time.time(), random=Random(1), clock=time.time)
        hub.commits.start(asyncio.get_running_loop())
        taker = Taker()
        hub.consume("queue/bench", taker, time.time(), peer=PEER, window=GROUP)
        batches = [envelopes("queue/bench", "send", size) for _ in range(groups)]
        started = time.process_time()
        for batch in batches:
            await hub.produce(batch, time.time())
        await hub.committed()
        used = time.process_time() - started
        await hub.commits.close()
        if taker.count != groups * size:
            raise SystemExit(f"{taker.count} of {groups * size} were delivered")
        return 1e6 * used / (groups * size)

    def codec(work: Callable[[], object], count: int) -> float:
        work()
        started = time.process_time()
        for _ in range(100):
            work()
        return 1e6 * (time.process_time() - started) / (100 * count)

    with tempfile.TemporaryDirectory(prefix="crosswire-bench-") as folder:
        path = Path(folder)
        row("core, groups of 1,000", uvloop.run(through_queue(path / "groups", 50, GROUP)))
        row("core, one at a time", uvloop.run(through_queue(path / "single", SINGLE, 1)))
    frames = [Request(number, b"x" * 112) for number in range(1, 1001)]
    wire = b"".join(map(serialize, frames))
    row("EMP frames, decode", codec(lambda: EmpDecoder("client").feed(wire), len(frames)))
    row("EMP frames, encode", codec(lambda: [serialize(each) for each in frames], len(frames)))


def row(label: str, cpu_us: float) -> None:
    """A figure on its way from a child process to `core`."""
    print(f"{label}\t{cpu_us}", flush=True)


def core(tree: Path) -> Iterator[tuple[str, float]]:
    path = os.pathsep.join(map(str, (tree, ROOT / "benchmarks")))
    done = subprocess.run(
        [sys.executable, __file__, "--run", "core"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for line in done.stdout.splitlines():
        label, _, figure = line.partition("\t")
        yield label, float(figure)


@contextmanager
def hub_of(tree: Path, via: str) -> Iterator[Any]:
    """A hub of this copy. The load runs in our own process, which has imported the source."""
    from crosswire.cli.bench.hub import started_hub
    from crosswire.listeners import PLAIN_LISTENERS

    listeners = [name for name in PLAIN_LISTENERS if name.partition("-")[0] == via]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(tree)
    try:
        with started_hub(*listeners) as hub:
            yield hub
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def sockets(tree: Path, scale: float) -> Iterator[tuple[str, float]]:
    """CPU time of the hub's process per durable message, in every protocol.

    Without the lake's encoder, which is a process of its own and the same in both copies.
    """
    from crosswire.cli.bench.contract import Work
    from crosswire.cli.bench.run import load, one_at_a_time

    for via, count in PROTOCOLS.items():
        with hub_of(tree, via) as hub:

            def cpu_s(pid: int = hub.pid) -> float:
                threads = Path(f"/proc/{pid}/task").iterdir()
                used = (int((each / "schedstat").read_text().split()[0]) for each in threads)
                return sum(used) / 1e9

            work = Work(via=via, destination="queue/bench", ports=hub.ports)
            figures = load(work, int(count * scale), cpu_s)
            assert figures.cpu_us is not None
            yield f"{via}, window 1,000", figures.cpu_us
            work = Work(via=via, destination="queue/single", ports=hub.ports, window=10)
            one_at_a_time(work, SINGLE // 10)
            before, count = cpu_s(), int(SINGLE * scale)
            one_at_a_time(work, count)
            yield f"{via}, one at a time", 1e6 * (cpu_s() - before) / count


def measure(folder: Path, rounds: int, scale: float) -> None:
    """Run both copies in turns and print a table: ranges, medians and the ratio of the medians."""
    found: dict[str, dict[str, list[float]]] = {}
    for index in range(rounds):
        # Each begins every other round: what one leaves to the machine doesn't always hit the same.
        for name in TREES if index % 2 else reversed(TREES):
            for work in (core(folder / name), sockets(folder / name, scale)):
                for label, cpu_us in work:
                    found.setdefault(label, {each: [] for each in TREES})[name].append(cpu_us)
                    print(f"{index}\t{name}\t{label}\t{cpu_us:.2f}", file=sys.stderr, flush=True)
    print(f"CPU µs per message, {rounds} rounds in turns: least, median, most")
    ratios = {}
    for label, figures in found.items():
        middle = {name: statistics.median(each) for name, each in figures.items()}
        ratios[label] = middle["compiled"] / middle["pure"]
        line = f"  {label:<26}"
        for name, each in figures.items():
            line += f"{name} {min(each):>7.2f} {middle[name]:>7.2f} {max(each):>7.2f}   "
        print(f"{line}{ratios[label]:.2f} ×")
    for kind in ("window 1,000", "one at a time"):
        ours = [
            ratio
            for label, ratio in ratios.items()
            if label in {f"{via}, {kind}" for via in PROTOCOLS}
        ]
        mean = statistics.geometric_mean(ours)
        print(f"  five protocols, {kind}: {mean:.2f} × ({min(ours):.2f} … {max(ours):.2f})")
    print(f"  worth it at {GOAL} × in both")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="compile all hot modules")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="factor for numbers of messages")
    parser.add_argument("--mypyc", metavar="DIR")
    parser.add_argument("--keep", metavar="DIR", type=Path)
    parser.add_argument("--run", choices=("check", "build", "core"), help=argparse.SUPPRESS)
    parser.add_argument("modules", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run == "core":
        run_core()
    elif options.run:
        run_mypyc(options.modules, build=options.run == "build")
    elif options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        compare(options.keep.resolve(), options)
    else:
        with tempfile.TemporaryDirectory(prefix="crosswire-compiled-") as folder:
            compare(Path(folder), options)


def compare(folder: Path, options: argparse.Namespace) -> None:
    if not list((folder / "compiled").rglob("*.so")):
        chosen = paths(MODULES if options.all else CORE)
        prepare(folder, options.mypyc and str(Path(options.mypyc).resolve()), chosen)
    measure(folder, options.rounds, options.scale)


if __name__ == "__main__":
    main()
