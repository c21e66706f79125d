"""Options of the source `crosswire`: what they mean, and the errors for wrong ones."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from crosswire.errors import InvalidInput
from crosswire.pipeline.connector.options import EARLIEST, LATEST, ReadOptions, read_options

SUBSCRIBED = {"subscribe": "queue/a"}


def options(*, stream: bool = False, **given: Any) -> ReadOptions:
    return read_options({**SUBSCRIBED, **given}, stream=stream)


def test_a_batch_is_everything_and_a_stream_what_comes() -> None:
    assert (options().starts, options().ends) == (EARLIEST, LATEST)
    assert options(stream=True).starts == LATEST


def test_options_travel_without_showing_the_token() -> None:
    made = options(token="a-secret", hub="http://hub:7380/there")
    assert pickle.loads(pickle.dumps(made)) == made
    assert made.address.token == "a-secret" and "a-secret" not in repr(made)


def test_the_hub_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSWIRE_HUB", "http://there:1")
    monkeypatch.setenv("CROSSWIRE_TOKEN", "secret")
    assert (options().address.url, options().address.token) == ("http://there:1", "secret")


@pytest.mark.parametrize(
    ("text", "time_us"),
    [
        ("1500", 1_500_000),
        ("1970-01-01T00:00:02", 2_000_000),
        ("1970-01-01T01:00:02.5+01:00", 2_500_000),
    ],
)
def test_times_are_milliseconds_or_dates(text: str, time_us: int) -> None:
    assert options(startingTimestamp=text).since_us == time_us


def test_offsets_are_a_word_or_json() -> None:
    assert options(startingOffsets="Earliest").starts == EARLIEST
    assert options(startingOffsets='{"queue/a": {"n": 5}, "*": {"n": -1}}').starts == {
        "queue/a": {"n": 5},
        "*": {"n": -1},
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"startingOffset": "1"}, "did you mean startingOffsets"),
        ({"subscribePattern": "x"}, "either the option subscribe"),
        ({"subscribe": "orders"}, "does not start with queue/"),
        ({"subscribe": "topic/a#"}, "wildcard"),
        ({"columns": "value,nothing"}, "no column 'nothing'"),
        ({"columns": "value,value"}, "named twice"),
        ({"startingOffsets": "first"}, "`earliest`, `latest` or JSON"),
        ({"startingOffsets": "latest"}, "startingOffsets can't be latest in a batch"),
        ({"startingOffsets": '{"queue/a": 5}'}, "`earliest`, `latest` or JSON"),
        ({"startingOffsets": '{"queue/a": {"n": -3}}'}, "-2 (earliest)"),
        ({"startingOffsets": '{"queue/b": {"n": 3}}'}, "queue/b, which subscribe does not have"),
        ({"endingOffsets": "earliest"}, "endingOffsets can't be earliest"),
        ({"startingTimestamp": "noon"}, "milliseconds since 1970"),
        ({"maxOffsetsPerTrigger": "5"}, "an option for streams only"),
        ({"minPartitions": "0"}, "above 0"),
        ({"failOnDataLoss": "maybe"}, "true or false"),
        ({"includeHeaders": "yes"}, "true or false"),
        ({"hub": "ftp://there"}, "not the URL of a hub"),
        ({"patienceS": "long"}, "number of seconds"),
    ],
)
def test_wrong_options_are_reported(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        options(**given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"endingOffsets": "latest"}, "an option for batches only"),
        ({"maxOffsetsPerTrigger": "many"}, "above 0"),
    ],
)
def test_wrong_options_of_streams_are_reported(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        options(stream=True, **given)


@pytest.mark.parametrize("given", [{}, {"subscribePattern": "("}])
def test_something_must_be_subscribed_to(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="subscribe"):
        read_options(given, stream=False)
