"""What one message at a time costs the hub: processor time, switches, system calls.

    python benchmarks/one_at_a_time.py [--only emp] [--count 2000] [--rounds 3] [--trees DIR DIR]

emp, micromsg2, relink   a durable message is sent, on disk, acknowledged, delivered and settled
                         before the next one; with ledger and lake
calls                    EMP calls MicroMsg2 and gets its answer

Each line is one of the hub's threads: the event loop's, the one that syncs, and all others, which
are the engine's and the lake's. Of the rounds, the one with the least processor time counts:

    program, kernel   its µs in each of them
    waits, preempted  how often it gave up the processor, and how often that was taken from it
    calls             its system calls, from a round of its own under strace; without it, nothing

`p50` is beside an fdatasync of the same disk in the same round. With `--trees`, two trees of this
repository take turns, and the second is compared with the first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hub import CallingEmp, CallingMicroMsg2, call_times

from crosswire.cli.bench.contract import Line, Work
from crosswire.cli.bench.hub import StartedHub, started_hub
from crosswire.cli.bench.run import one_at_a_time

LOADS = ("emp", "micromsg2", "relink", "calls")
THREADS = ("loop", "sync", "others")
WARM_UP = 300
COLUMNS = 96
LEAST_SYNC_US = 10
"""Below this the folder is in memory (`TMPDIR=/dev/shm`), and there is no disk to compare with."""


@dataclass
class Usage:
    """What a thread used for one message. The kernel counts ticks of the clock by program and
    kernel, and the whole exactly."""

    cpu_us: float = 0.0
    program_ticks: float = 0.0
    kernel_ticks: float = 0.0
    waits: float = 0.0
    preempted: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[float, ...]:
        return (
            self.cpu_us,
            self.program_ticks,
            self.kernel_ticks,
            self.waits,
            self.preempted,
        )

    @property
    def kernel_us(self) -> float:
        ticks = self.program_ticks + self.kernel_ticks
        return self.cpu_us * self.kernel_ticks / ticks if ticks else 0.0


@dataclass
class Round:
    """One round: latency, an fdatasync beside it, and threads by kind."""

    p50_us: float
    sync_us: float
    threads: dict[str, Usage] = field(default_factory=dict)

    @property
    def cpu_us(self) -> float:
        return sum(each.cpu_us for each in self.threads.values())


def read_threads(pid: int) -> dict[str, Usage]:
    """What each thread of a process has used so far, by its number."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            cpu_us = int((task / "schedstat").read_text().split()[0]) / 1e3
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            status = (task / "status").read_text().splitlines()
        except OSError:
            continue  # it has ended
        waits, preempted = (int(line.split()[1]) for line in status if "ctxt_switches" in line)
        found[task.name] = Usage(cpu_us, int(fields[11]), int(fields[12]), waits, preempted)
    return found


def by_kind(pid: int, before: dict[str, Usage], after: dict[str, Usage], count: int) -> dict:
    """Of each kind of thread, what a message used; of the others, the one that waits most syncs."""
    used = {
        name: Usage(
            *(
                (now - then) / count
                for now, then in zip(
                    usage.values(), before.get(name, Usage()).values(), strict=True
                )
            )
        )
        for name, usage in after.items()
    }
    loop = used.pop(str(pid))
    sync = used.pop(max(used, key=lambda name: used[name].waits)) if used else Usage()
    return {"loop": loop, "sync": sync, "others": sum(used.values(), Usage())}


def fdatasync_us(folder: str, count: int = 200) -> float:
    """The median time of a small write and its fdatasync."""
    times = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(count):
            started = time.perf_counter()
            os.write(file.fileno(), b"x" * 300)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def loader(load: str, hub: StartedHub) -> Callable[[int], float]:
    """Makes the load: sends messages one at a time, and gives the median time in µs."""
    if load == "calls":
        work = Work(via="emp", destination="service/echo", ports=hub.ports)
        asking, serving = CallingEmp(work), CallingMicroMsg2(work)
        calling, answering = Line(work, asking), Line(work, serving)
        serving.serve(answering)
        return lambda count: (
            1e6 * statistics.median(call_times(asking, calling, serving, answering, count))
        )
    work = Work(via=load, destination="queue/bench", ports=hub.ports, window=1)
    return lambda count: one_at_a_time(work, count).answered_us


def listeners(load: str) -> tuple[str, ...]:
    return ("emp", "micromsg2") if load == "calls" else (load,)


def measure(load: str, count: int) -> Round:
    with started_hub(*listeners(load)) as hub:
        run = loader(load, hub)
        run(WARM_UP)
        before = read_threads(hub.pid)
        p50_us = run(count)
        threads = by_kind(hub.pid, before, read_threads(hub.pid), count)
        return Round(p50_us, fdatasync_us(hub.data), threads)


def system_calls(load: str, count: int) -> dict[str, Counter[str]]:
    """System calls by kind of thread, for all messages; empty without strace."""
    strace = shutil.which("strace")
    if strace is None:
        return {}
    with started_hub(*listeners(load)) as hub, tempfile.TemporaryDirectory() as folder:
        run = loader(load, hub)
        run(WARM_UP)
        trace = Path(folder, "trace")
        command = [strace, "-f", "-o", str(trace), "-p", str(hub.pid)]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            process.stderr.readline()  # it is attached
            run(count)
            process.send_signal(signal.SIGINT)
            process.stderr.read()
        found: dict[str, Counter[str]] = {}
        for line in trace.read_text(errors="replace").splitlines():
            thread, call = line.split(None, 1)
            if "(" in call and "resumed>" not in call:
                found.setdefault(thread, Counter())[call.partition("(")[0]] += 1
        loop = found.pop(str(hub.pid), Counter())
        sync = Counter[str]()
        for thread in [each for each, calls in found.items() if calls["fdatasync"] > count // 2]:
            sync += found.pop(thread)
        return {"loop": loop, "sync": sync, "others": sum(found.values(), Counter[str]())}


def rounds_of(load: str, count: int, rounds: int, trees: list[str]) -> dict[str, list[Round]]:
    """Rounds by tree, in turns; each in a process of its own, which imports that tree."""
    found: dict[str, list[Round]] = {tree: [] for tree in trees}
    for index in range(rounds):
        for tree in trees if index % 2 == 0 else trees[::-1]:
            environment = {**os.environ, "PYTHONPATH": f"{tree}/src:{tree}"}
            command = [sys.executable, __file__, "--one", load, "--count", str(count)]
            done = subprocess.run(
                command, env=environment, check=True, stdout=subprocess.PIPE, text=True
            )
            one = json.loads(done.stdout)
            threads = {kind: Usage(**each) for kind, each in one.pop("threads").items()}
            found[tree].append(Round(**one, threads=threads))
    return found


def print_load(load: str, found: list[Round], calls: dict[str, Counter[str]], count: int) -> None:
    best = min(found, key=lambda each: each.cpu_us)
    beside = "" if load == "calls" else f"; fdatasync {best.sync_us:.0f} µs"
    if beside and best.sync_us >= LEAST_SYNC_US:
        beside += f": {best.p50_us / best.sync_us:.1f} ×"
    print(f"{load}: {best.cpu_us:.0f} µs CPU, p50 {best.p50_us:.0f} µs{beside}")
    for kind in THREADS:
        usage = best.threads[kind]
        print(
            f"  {kind:<7}{max(usage.cpu_us - usage.kernel_us, 0.0):>5.0f} program "
            f"{usage.kernel_us:>4.0f} kernel {usage.waits:>5.1f} waits "
            f"{usage.preempted:>4.1f} preempted"
        )
        if kind in calls:
            total = sum(calls[kind].values()) / count
            most = ", ".join(
                f"{name} {number / count:.1f}"
                for name, number in calls[kind].most_common()
                if number >= count / 10
            )
            print(
                textwrap.fill(
                    f"{total:.1f} calls: {most}" if most else f"{total:.1f} calls",
                    width=COLUMNS,
                    initial_indent=" " * 9,
                    subsequent_indent=" " * 11,
                )
            )
    sys.stdout.flush()


def print_comparison(load: str, found: dict[str, list[Round]]) -> None:
    first, second = found.values()
    for name in ("cpu_us", "p50_us"):
        a, b = ([getattr(each, name) for each in rounds] for rounds in (first, second))
        pairs = [two / one for one, two in zip(a, b, strict=True)]
        print(
            f"{load:<10}{name[:3]}  least {min(a):>5.0f} and {min(b):>5.0f} µs: "
            f"{min(b) / min(a):.2f} ×; in pairs {statistics.median(pairs):.2f} × "
            f"({min(pairs):.2f} … {max(pairs):.2f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=LOADS)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trees", nargs=2, metavar="DIR")
    parser.add_argument("--one", choices=LOADS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asdict(measure(options.one, options.count))))
        return
    own = str(Path(__file__).resolve().parents[1])
    for load in [options.only] if options.only else LOADS:
        found = rounds_of(load, options.count, options.rounds, options.trees or [own])
        if options.trees:
            print_comparison(load, found)
        else:
            print_load(load, found[own], system_calls(load, options.count), options.count)


if __name__ == "__main__":
    main()
