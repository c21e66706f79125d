"""Whether the hub is ready, and why it is not."""

from __future__ import annotations

import time

import msgspec
import pytest

from crosswire.access import User
from crosswire.errors import RequestFailed, StoreFailed
from crosswire.hub.wall import Clock
from tests.web.conftest import StartWeb, WebHub

ROOT = User(name="root", token="the-secret-of-root", administer=True)
ANNA = User(name="anna", token="a-secret-of-anna", produce=("queue/orders",))


async def readiness(web: WebHub) -> tuple[int, list[str], list[str]]:
    status, body = await web.ask("GET /readyz HTTP/1.1\nhost: localhost")
    answer = msgspec.json.decode(body)
    return status, answer["reasons"], answer["notes"]


async def test_a_clock_that_stands_still_is_not_ready(web: WebHub) -> None:
    assert (await readiness(web))[:2] == (200, [])
    server = web.server
    timekeeper = server.timekeeper
    assert timekeeper._timer is not None and server.watchdog._beat_at is not None
    timekeeper._timer.cancel()
    timekeeper._timer = None
    timekeeper._timer_at -= 60
    server.watchdog._beat_at -= 60
    server.hub.call_at(server.context.now() - 30, lambda _now: None)
    status, reasons, _ = await readiness(web)
    assert status == 503
    assert reasons[0].startswith("timers have not run for 6")
    assert reasons[1].startswith("timers are late by 3")
    timekeeper._keep_time()
    status, reasons, notes = await readiness(web)
    assert (status, reasons) == (200, [])
    assert notes and "event loop" in notes[0]
    assert server.watchdog.blocked == 1


async def test_a_jump_is_noted_but_the_hub_is_ready(start_web: StartWeb) -> None:
    ahead = [0.0]
    web = await start_web(clock=Clock(wall=lambda: time.time() + ahead[0]))
    ahead[0] = 40 * 86_400.0
    web.server.timekeeper._run_timers()
    status, _, notes = await readiness(web)
    assert status == 200
    assert "jumped by +3456000 s" in notes[0]
    assert "retention by age is 3456000 s late" in notes[1]
    metrics = (await web.ask("GET /metrics HTTP/1.1\nhost: localhost"))[1].decode()
    assert "\ncrosswire_clock_jumps_forward_total 1\n" in metrics
    assert "\ncrosswire_clock_jumps_back_total 0\n" in metrics
    assert "\ncrosswire_retention_lag_seconds 345" in metrics
    assert 'crosswire_loop_lag_seconds_bucket{le="+Inf"}' in metrics
    for name in (
        "crosswire_loop_lag_worst_seconds",
        "crosswire_loop_blocked_total",
        "crosswire_timers_late_seconds",
        "crosswire_timers_failed_total",
        "crosswire_schedules_failed_total",
    ):
        assert f"\n{name} " in metrics


async def test_a_draining_hub_is_not_ready(web: WebHub) -> None:
    web.server.context.draining = True
    status, body = await web.ask("GET /readyz HTTP/1.1\nhost: localhost")
    assert (status, b'"draining"' in body) == (503, True)
    assert (await web.ask("GET /healthz HTTP/1.1\nhost: localhost"))[0] == 200


async def test_damage_is_shown_until_it_is_acknowledged(start_web: StartWeb) -> None:
    web = await start_web(users=(ROOT, ANNA))
    web.server.hub.store.report_damage("record", "message 7 of queue/a is damaged")
    request = "GET /readyz HTTP/1.1\nhost: localhost"
    for token in ("", ANNA.token, ROOT.token):
        sign_in = f"\nauthorization: Bearer {token}" if token else ""
        status, body = await web.ask(request + sign_in)
        assert status == 200, "all that is intact is served"
        assert b'"damaged"' in body
        # Who may not observe learns nothing of what there is.
        assert (b"queue/a" in body) == (token == ROOT.token)
    state = await web.get("/v1/state", token=ROOT.token)
    assert state["damaged"] and state["damage"] == ["message 7 of queue/a is damaged"]
    (entry,) = (await web.get("/v1/damage", token=ROOT.token))["damage"]
    assert entry["part"] == "record"
    with pytest.raises(RequestFailed):
        await web.post("/v1/damage/acknowledge", {}, token=ANNA.token)
    answer = await web.post("/v1/damage/acknowledge", {}, token=ROOT.token)
    assert answer == {"acknowledged": 1}
    status, body = await web.ask("GET /readyz HTTP/1.1\nhost: localhost")
    assert status == 200 and b'"ready"' in body
    web.server.hub.store.report_damage("record", "message 7 of queue/a is damaged")
    assert not (await web.get("/v1/state", token=ROOT.token))["damaged"], "it is known"


async def test_a_failing_disk_is_not_called_full(
    web: WebHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = web.server.hub.store

    def fail(_batch: object) -> None:
        raise StoreFailed("IO error: Input/output error")

    monkeypatch.setattr(store, "_write", fail)
    commits = web.server.hub.commits
    commits.request()
    with pytest.raises(StoreFailed):
        await commits.flush()
    status, body = await web.ask("GET /readyz HTTP/1.1\nhost: localhost")
    assert status == 503 and b"Input/output error" in body and b"no room" not in body
    monkeypatch.undo()
    await commits.flush()
    assert (await web.ask("GET /readyz HTTP/1.1\nhost: localhost"))[0] == 200
