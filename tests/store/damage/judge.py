"""One case: damage a copy of a reference, run the hub on it, and hold it to its promise."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from tests.store.damage.hubs import (
    Delivered,
    Emp,
    Exited,
    Hub,
    HubLost,
    Stuck,
    has_store_command,
    run_command,
)
from tests.store.damage.kinds import Damaged, damage
from tests.store.damage.reference import Reference, Truth, copy_tree, digest, key_of
from tests.store.damage.reports import Reports

__all__ = ["FAILURES", "UNDETECTABLE", "Verdict", "judge"]

FAILURES: Final = {
    "wrong": "served wrongly: from another destination, with other content, or settled before",
    "lost": "an acknowledged message was not delivered, and nothing reported damage",
    "vague": "… and what was reported does not cover its destination",
    "hang": "neither ready nor ended in time, or stopped working later",
    "reuse": "a new message got an id at or below one that was handed out before",
    "unclear": "ended at the start without one clear line that says what to do",
    "alarm": "damage was reported where nothing had been damaged",
    "repair": "`crosswire store repair` failed, or the hub did not start after it",
}

UNDETECTABLE: Final[dict[str, Callable[[list[Damaged]], bool]]] = {
    "the log lost its end, and so did the file that tells where it ended": lambda damages: (
        {each.file_kind for each in damages} == {"log", "own"}
        and any((each.kind, each.file_kind) == ("stale", "own") for each in damages)
    ),
}
"""Damage that nobody can notice, as the documentation has it: why, and what it is."""

_READY_WALL_S: Final = 40.0
_READY_CPU_S: Final = 5.0
_QUIET_S: Final = 0.15
_LONG_QUIET_S: Final = 2.0
_COMMAND_S: Final = 60.0

_COVERED: Final = ("named", "general", "stopped")


class Verdict(msgspec.Struct):
    """What became of a case: its failures, and what the hub itself made of the damage."""

    seed: int
    reference: str
    damages: list[Damaged]
    outcome: str = "unnoticed"
    """`unnoticed`, `reported` in one way or another, or `refused` to start at first."""
    failures: dict[str, str] = {}
    excused: dict[str, str] = {}
    """Failures that the documentation says can't be avoided."""
    reports: list[str] = []
    notes: list[str] = []
    missing: int = 0
    """Acknowledged messages that never came, by the end."""
    seconds: float = 0.0

    @property
    def kind(self) -> str:
        """Of the damage."""
        return "two" if len(self.damages) > 1 else self.damages[0].kind if self.damages else "none"

    @property
    def file_kind(self) -> str:
        return "+".join(sorted(each.file_kind for each in self.damages))

    def fail(self, kind: str, detail: str) -> None:
        for reason, is_that in UNDETECTABLE.items():
            if kind in ("wrong", "lost") and is_that(self.damages):
                self.excused.setdefault(kind, f"{reason}: {detail}")
                return
        self.failures.setdefault(kind, detail)


class _Refused(Exception):
    """The hub did not start."""

    def __init__(self, exited: Exited) -> None:
        super().__init__(exited.stderr)
        self.exited = exited


class _Case:
    def __init__(self, reference: Reference, folder: Path, verdict: Verdict, random: Random):
        self.truth = msgspec.json.decode(msgspec.json.encode(reference.truth), type=Truth)
        self.config = reference.config
        self.data = folder / "data"
        self.folder = folder
        self.verdict = verdict
        self.random = random
        self.reports = Reports()
        self.all_reports: list[str] = []
        self.missing: set[tuple[str, str]] = set()
        self.newest = self.truth.newest_id
        self.lives = 0
        self.fresh = 0

    # Reports.

    def note(self, text: str) -> None:
        self.verdict.notes.append(text)

    def learn_reports(self, hub: Hub) -> None:
        """What the hub tells its administrator about damage."""
        self.reports.add_answer(hub.get("/readyz"))
        self.reports.add_answer(hub.get("/v1/state"))
        self.reports.add_log(hub.log())

    def coverage(self, target: str, key: str) -> str:
        names = {target, target.removeprefix("queue/"), self.truth.sent[key]}
        is_dead = target.endswith("/dead")
        return self.reports.coverage(names, 0 if is_dead else self.truth.ids.get(key, 0))

    # A life of the hub.

    def live(self) -> None:
        """Start, drain everything, send new messages, stop. Raises _Refused, Stuck or HubLost."""
        self.lives += 1
        hub = Hub(self.data, self.config, self.folder / f"life-{self.lives}")
        try:
            exited = hub.ready(_READY_WALL_S, _READY_CPU_S)
            if exited is not None:
                raise _Refused(exited)
            self.learn_reports(hub)
            self.work(hub)
            self.learn_reports(hub)
            if self.random.random() < 0.5:
                hub.kill()
            else:
                exited = hub.stop(20.0)
                if exited.code:
                    self.verdict.fail("hang", f"did not stop well: {_last_line(exited)}")
        except Stuck as error:
            raise Stuck(f"{error}\n{hub.stack()}") from None
        except HubLost as error:
            raise HubLost(f"{error}\n{hub.log()[-3000:]}") from None
        finally:
            hub.kill()
            self.reports.add_log(hub.log())

    def work(self, hub: Hub) -> None:
        emp = Emp(hub.port("emp"), lambda _delivered: True)
        self.check_schedules(emp)
        self.subscribe(emp, self.truth.targets)
        self.drain(hub, emp)
        self.compare(emp.delivered)
        emp.delivered.clear()
        new = self.send(emp)
        self.subscribe(emp, new)
        self.drain(hub, emp)
        self.compare(emp.delivered)
        # Settlements are on disk when what was sent after them is acknowledged.
        emp.request("$publish", {"destination": "queue/judge", "text": ""})
        emp.close()
        # Nobody takes these before the next life.
        emp = Emp(hub.port("emp"))
        self.send(emp)
        emp.close()

    def subscribe(self, emp: Emp, targets: list[str]) -> None:
        asked: dict[str, dict[str, Any]] = {}
        for target in targets:
            pattern = self.truth.subscriptions.get(target)
            named = {} if pattern is None else {"name": target}
            asked[target] = {"destination": pattern or target, "window": 64, **named}
        for target, reason in emp.subscribe(asked).items():
            self.reports.add(f"subscribing to {target} was refused: {reason}")

    def check_schedules(self, emp: Emp) -> None:
        response = emp.request("$list_schedules", {})
        if not response.succeeded:
            self.reports.add(f"listing schedules was refused: {response.description}")
            return
        found = {each["schedule"] for each in json.loads(response.data)["schedules"]}
        missing = set(self.truth.schedules) - found
        if missing and not self.reports.mentions("schedule"):
            covered = self.reports.coverage({"schedules"}, 0)
            if covered != "general":
                self.verdict.fail("vague" if covered else "lost", f"schedules {sorted(missing)}")
        # Said once, for this life and those after it.
        self.truth.schedules = sorted(found & set(self.truth.schedules))

    def drain(self, hub: Hub, emp: Emp) -> None:
        """Take deliveries until all came that must, or none comes any more.

        Where something is missing that nobody reported, patience is longer: the machine may be
        busy.
        """
        expected = {target: set(keys) for target, keys in self.truth.unsettled.items()}
        quiet_since = time.monotonic()
        looked = 0
        while True:
            if emp.pump(0.02):
                quiet_since = time.monotonic()
                continue
            for delivered in emp.delivered[looked:]:
                expected.get(delivered.target, set()).discard(key_of(delivered.text))
            looked = len(emp.delivered)
            missing = [(target, key) for target, keys in expected.items() for key in keys]
            if hub.exited is not None:
                raise HubLost(f"the hub died: {_last_line(hub.exited)}")
            quiet_s = time.monotonic() - quiet_since
            if not missing:
                # What should not come would have come with the rest; a round trip is enough.
                emp.request("$echo", {})
                if not emp.pump(0.05):
                    return
            elif quiet_s > _LONG_QUIET_S:
                return
            elif quiet_s > _QUIET_S:
                self.learn_reports(hub)
                if all(self.coverage(*each) in _COVERED for each in missing):
                    return

    def compare(self, delivered: list[Delivered]) -> None:
        truth, verdict = self.truth, self.verdict
        seen: dict[str, Counter[str]] = {}
        for each in delivered:
            key = key_of(each.text)
            seen.setdefault(each.target, Counter())[key] += 1
            self.missing.discard((each.target, key))
            if truth.digests.get(key) != digest(each.text):
                verdict.fail("wrong", f"{each.target} delivered what was never sent: {each}")
                continue
            # A dead letter is at home beside its queue.
            home = each.destination.removesuffix("/dead")
            wanted = truth.unsettled.get(each.target, [])
            if truth.sent[key] != home:
                verdict.fail("wrong", f"{key} of {truth.sent[key]} came from {each.destination}")
            elif key in truth.settled.get(each.target, []):
                if not self.reports.says_again():
                    verdict.fail("wrong", f"{key} was settled in {each.target}, and came again")
            elif key not in wanted and key not in truth.uncertain.get(each.target, []):
                verdict.fail("wrong", f"{key} of {truth.sent[key]} came from {each.target}")
        for target, keys in list(truth.unsettled.items()):
            heard = seen.get(target, Counter())
            missing = set(keys) - set(heard)
            twice = [key for key, count in heard.items() if count > 1]
            if twice:
                verdict.fail("wrong", f"{target} delivered {twice} more than once")
            truth.settled.setdefault(target, []).extend(set(keys) & set(heard))
            truth.unsettled[target] = self.judge_missing(target, missing)

    def judge_missing(self, target: str, missing: set[str]) -> list[str]:
        """Gives those that must come when their queue goes on, after a repair."""
        by_coverage: dict[str, list[str]] = {}
        self.missing |= {(target, key) for key in missing}
        for key in sorted(missing):
            by_coverage.setdefault(self.coverage(target, key), []).append(key)
        for covered, keys in by_coverage.items():
            ids = [self.truth.ids.get(key) for key in keys[:5]]
            detail = f"{len(keys)} of {target}: {keys[:5]}, ids {ids}"
            if covered in _COVERED:
                self.note(f"missing, {covered}: {detail}")
            else:
                self.verdict.fail(covered or "lost", detail)
            if covered != "stopped":
                # Said once to be missing, they may turn up later: after a repair.
                self.truth.uncertain.setdefault(target, []).extend(keys)
        return by_coverage.get("stopped", [])

    def send(self, emp: Emp) -> list[str]:
        """New messages to known and new destinations, with new ids; gives the new destinations."""
        known = sorted({*self.truth.sent.values()})
        self.fresh += 1
        chosen = [*self.random.sample(known, 6), f"queue/new-{self.fresh}", "queue/q04"]
        texts = []
        for number, destination in enumerate(chosen):
            key = f"new-{self.fresh}-{number}"
            texts.append((key, destination, f"{key}|{destination}|{'.' * 50}"))
        bodies = [{"destination": each[1], "text": each[2]} for each in texts]
        responses = emp.requests("$publish", bodies)
        for (key, destination, text), response in zip(texts, responses, strict=True):
            if not response.succeeded:
                self.reports.add(f"publishing to {destination} was refused: {response.description}")
                continue
            identifier = json.loads(response.data)["id"]
            if identifier <= self.newest:
                self.verdict.fail("reuse", f"id {identifier} after {self.newest} was used")
            self.newest = max(self.newest, identifier)
            self.truth.ids[key] = identifier
            self.truth.digests[key] = digest(text)
            self.truth.sent[key] = destination
            for target in self.targets_of(destination):
                self.truth.unsettled.setdefault(target, []).append(key)
        return [f"queue/new-{self.fresh}"]

    def targets_of(self, destination: str) -> list[str]:
        if destination.startswith("queue/"):
            return [destination]
        return [
            name
            for name, pattern in self.truth.subscriptions.items()
            if pattern in (destination, "topic/#")
            or (pattern.endswith("/+") and destination.rpartition("/")[0] == pattern[:-2])
        ]

    # Refusals.

    def judge_refusal(self, exited: Exited) -> None:
        """A start that is refused says why in one line, and names the command that helps."""
        self.verdict.outcome = "refused"
        lines = [line for line in exited.stderr.splitlines() if line and not _is_json(line)]
        if exited.code == 1 and len(lines) == 1 and "crosswire store" in lines[0]:
            self.reports.add(f"refused: {lines[0]}")
        else:
            self.verdict.fail("unclear", f"exit code {exited.code}: {exited.stderr[-2000:]}")

    def repair(self) -> bool:
        """Verify and repair; gives whether the hub may be started now."""
        if not has_store_command():
            return False
        self.all_reports += self.reports.entries
        self.reports.forget()
        for word in ("verify", "repair"):
            arguments = ["store", word, str(self.data), "--json"]
            try:
                exited = run_command(arguments, self.folder / word, timeout_s=_COMMAND_S)
            except Stuck as error:
                self.verdict.fail("hang", f"store {word}: {error}")
                return False
            if "Traceback" in exited.stderr or exited.code not in (0, 1):
                self.verdict.fail("repair", f"store {word}: {exited.stderr[-2000:]}")
                return False
            if word == "repair" and exited.code:
                self.verdict.fail("repair", f"exit code {exited.code}: {exited.stderr[-500:]}")
                return False
            if word == "verify" and exited.code and not self.verdict.damages:
                self.verdict.fail("alarm", f"store verify: {exited.stdout}{exited.stderr}")
            self.reports.add_result(word, exited.stdout)
        return True

    # All of it.

    def run(self) -> None:
        """Two lives; where a start is refused, or damage was reported, a repair and another."""
        verdict = self.verdict
        lives, repairs = 0, 0
        while lives < 2:
            # Nothing is started while an exception is handled: its fork would have it as context.
            refusal = None
            try:
                self.live()
            except _Refused as refused:
                refusal = refused.exited
            except Stuck as error:
                verdict.fail("hang", str(error))
                return
            except HubLost as error:
                verdict.fail("hang", f"in life {self.lives}: {error}")
                return
            if refusal is None:
                lives += 1
                worth_repair = self.reports or not verdict.damages
                if lives < 2 or repairs or not worth_repair or not has_store_command():
                    continue
                # Damage that a hub works with can be repaired as well; then it works on. So does a
                # hub with nothing to repair.
                lives -= 1
            else:
                self.judge_refusal(refusal)
                if repairs:
                    verdict.fail("repair", "the hub does not start after a repair")
                    return
            repairs += 1
            if not self.repair():
                return


def _is_json(line: str) -> bool:
    return line.startswith("{") and line.endswith("}")


def _last_line(exited: Exited) -> str:
    lines = exited.stderr.strip().splitlines()
    return f"exit code {exited.code}: {lines[-1] if lines else ''}"


def judge(seed: int, references: list[Reference], folder: Path) -> Verdict:
    """Damage and judge; the folder is new, and left to the caller."""
    begun = time.monotonic()
    random = Random(seed)
    reference = random.choice(references)
    copy_tree(reference.data, folder / "data")
    damages = damage(folder / "data", reference.older, random)
    verdict = Verdict(seed, reference.truth.name, damages)
    case = _Case(reference, folder, verdict, random)
    case.run()
    verdict.reports = [*case.all_reports, *case.reports.entries]
    verdict.missing = len(case.missing)
    if verdict.outcome == "unnoticed" and verdict.reports:
        verdict.outcome = "reported"
    if not damages and verdict.outcome != "unnoticed":
        verdict.fail("alarm", "; ".join(verdict.reports))
    verdict.seconds = time.monotonic() - begun
    return verdict


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
