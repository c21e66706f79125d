"""The names in the state of streams: those that older versions have stored must be found again."""

from __future__ import annotations

from crosswire.pipeline.stream import columns, decoder_state, ledger_state
from crosswire.pipeline.tables import carry_over
from crosswire.pipeline.tables.conversations import CALL_COLUMNS

COLUMNS = {
    "steps": {
        "node",
        "subscription",
        "seq",
        "id",
        "time",
        "step",
        "destination",
        "protocol",
        "connection",
        "principal",
        "attempt",
        "detail",
        "count",
        "origin",
        "is_moved",
        "is_answer",
        "is_told",
        "is_listed",
    },
    "envelopes": {
        "node",
        "id",
        "time",
        "kind",
        "destination",
        "protocol",
        "connection",
        "crc",
        "intact",
        "is_scheduled",
    },
    "said": {
        "node",
        "connection",
        "protocol",
        "destination",
        "kind",
        "time",
        "crc",
        "id",
        "correlation",
        "sequence",
        "way",
        "side",
        "name",
        "place",
        "refuses",
        "said_yes",
    },
    "passed": {
        "node",
        "subscription",
        "id",
        "connection",
        "destination",
        "way",
        "verdict",
        "wire_time",
        "same_payload",
    },
    "lines": {
        "node",
        "connection",
        "line",
        "whole",
        "written_until",
        "broken_off",
        "is_over",
        "last_time",
        "client",
    },
    "counted": {"counted_node", "counted_destination"},
}


def test_states() -> None:
    assert (carry_over.COUNTS, carry_over.CALLS, carry_over.EDGES) == ("counts", "said", "edges")
    assert (decoder_state.FLOWS, columns.STATES) == ("flows", "states")
    assert ledger_state.STATE == "records"


def test_columns_of_calls() -> None:
    assert " ".join(CALL_COLUMNS) == (
        "node connection direction offset time protocol kind destination correlation status "
        "payload_length"
    )


def test_parts_and_columns_of_what_a_hub_recorded() -> None:
    stored = {
        part: {ledger_state.STORED_NAMES.get(name, name) for name in names}
        for part, names in ledger_state.PARTS.items()
    }
    assert stored == COLUMNS
