"""eMQP's headers: the list, the dictionary, and properties of other protocols."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosswire.wire.emqp.headers import KNOWN, NO_HEADERS, Headers, Property
from tests.wire.vectors import load

text = st.text(st.characters(codec="utf-8"), max_size=20)


def test_known_headers() -> None:
    headers = Headers.parse("reply-requested,guarantee,retry-count:3,timeout:5")
    assert headers.reply_requested and headers.guarantee and not headers.nohaste
    assert (headers.retry_count, headers.timeout_s) == (3, 5.0)


def test_defaults() -> None:
    headers = Headers.parse("")
    assert headers is NO_HEADERS and str(headers) == ""
    assert not (headers.reply_requested or headers.guarantee or headers.nohaste)
    assert (headers.retry_count, headers.timeout_s, headers.run_count) == (0, None, None)
    assert (headers.interval_s, headers.cron) == (None, None)


def test_those_of_a_schedule() -> None:
    headers = Headers.parse("nohaste,run_count:2,interval:1.5,cron:*%2F5%20*%20*%20*%201%2C2")
    assert headers.nohaste and headers.run_count == 2
    assert (headers.interval_s, headers.cron) == (1.5, "*/5 * * * 1,2")


@pytest.mark.parametrize("value", ["abc", "", "-1", "1e9", "٣", "9" * 400, "nan"])
def test_a_senseless_number_is_as_good_as_absent(value: str) -> None:
    headers = Headers.parse(f"retry-count:{value},timeout:{value},run_count:{value}")
    assert (headers.retry_count, headers.timeout_s, headers.run_count) == (0, None, None)


@pytest.mark.parametrize("value", ["1.5", str(2**63), "1e3", "\u0661"])
def test_counts_are_whole_and_fit_into_63_bits(value: str) -> None:
    headers = Headers.parse(f"retry-count:{value},run_count:{value}")
    assert (headers.retry_count, headers.run_count) == (0, None)
    largest = Headers.parse(f"retry-count:{2**63 - 1},timeout:999999999999")
    assert (largest.retry_count, largest.timeout_s) == (2**63 - 1, None)


def test_a_timeout_of_nothing_is_none() -> None:
    assert Headers.parse("timeout:0").timeout_s is None


def test_spaces_are_no_part_of_a_name() -> None:
    headers = Headers.parse("reply-requested, guarantee , retry-count: 2")
    assert headers.guarantee and headers.retry_count == 2


def test_the_first_of_two_counts() -> None:
    assert Headers.parse("timeout:1,timeout:2").timeout_s == 1


@pytest.mark.parametrize("value", ["false", "0", "no", "False"])
def test_a_flag_can_be_denied(value: str) -> None:
    assert not Headers.parse(f"guarantee:{value}").guarantee


def test_a_name_within_a_name_is_not_that_name() -> None:
    assert not Headers.parse("no-reply-requested").reply_requested


@given(text)
def test_any_text_is_read_and_printed_unchanged(given_text: str) -> None:
    headers = Headers.parse(given_text)
    if not given_text.lstrip().startswith("{"):
        assert str(headers) == given_text
    headers.properties()
    assert headers.retry_count >= 0


class TestDictionary:
    def test_is_read(self) -> None:
        headers = Headers.parse(
            '{"reply-requested": true, "guarantee": false, "retry-count": 2, "timeout": 1.5,'
            ' "tenant": "a,b", "cron": "0 0 * * 1,2", "absent": null}'
        )
        assert headers.reply_requested and not headers.guarantee
        assert (headers.retry_count, headers.timeout_s) == (2, 1.5)
        assert headers.properties() == {"tenant": "a,b"}
        assert headers.cron == "0 0 * * 1,2"
        assert "absent" not in headers

    def test_is_printed_as_a_list_when_something_is_added(self) -> None:
        headers = Headers.parse('{"timeout": 5, "x": "1"}').having("reply-requested")
        assert str(headers) == "timeout:5,x:%31,reply-requested"

    @pytest.mark.parametrize("wrong", ["{", '{"a": [1]}', '{"a": {}}', "{" * 5000, "{}x"])
    def test_what_is_no_dictionary_is_a_list(self, wrong: str) -> None:
        assert str(Headers.parse(wrong)) == wrong


class TestChange:
    def test_adding_keeps_what_is_there(self) -> None:
        headers = Headers.parse("timeout:5,x").having("reply-requested")
        assert str(headers) == "timeout:5,x,reply-requested"
        assert headers.having("reply-requested") is headers

    def test_adding_a_value(self) -> None:
        assert str(NO_HEADERS.having("timeout", "5")) == "timeout:5"

    def test_removing(self) -> None:
        assert str(Headers.parse("a,timeout:5,b").without("timeout")) == "a,b"

    def test_writing_as_the_deployed_client_does(self) -> None:
        headers = Headers.of(reply_requested=True, guarantee=True, retry_count=3, timeout_s=5)
        assert str(headers) == "reply-requested,guarantee,retry-count:3,timeout:5"

    def test_writing_for_a_schedule(self) -> None:
        headers = Headers.of(guarantee=True, nohaste=True, run_count=2, timeout_s=0.5)
        assert str(headers) == "guarantee,timeout:0.5,nohaste,run_count:2"

    def test_equal_and_hashable(self) -> None:
        assert Headers.parse("a,b") == Headers(["a", "b"])
        assert len({Headers.parse("a,b"), Headers(["a", "b"])}) == 1
        assert repr(Headers.parse("a")) == "Headers('a')"


class TestProperties:
    def test_types_by_looks(self) -> None:
        headers = Headers.parse("a:1,b:-2,c:1.50,d:true,e:false,f:x%2Cy,g,h:1e5,timeout:3")
        assert headers.properties() == {
            "a": 1,
            "b": -2,
            "c": 1.5,
            "d": True,
            "e": False,
            "f": "x,y",
            "g": True,
            "h": "1e5",
        }

    @pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**30])
    def test_an_integer_beyond_64_bits_is_text(self, number: int) -> None:
        assert Headers.parse(f"a:{number}").properties() == {"a": str(number)}
        assert Headers.of(properties={"a": number}).properties() == {"a": str(number)}

    def test_infinity_is_text(self) -> None:
        assert Headers.of(properties={"a": math.inf}).properties() == {"a": "inf"}

    @given(
        st.dictionaries(
            text.filter(lambda name: name and name not in KNOWN),
            st.integers(-(2**63), 2**63 - 1)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.booleans()
            | text
            | st.sampled_from(["42", "-1", "1.5", "true", "false", ""]),
            max_size=5,
        )
    )
    def test_survive_the_way_through_headers(self, properties: dict[str, Property]) -> None:
        printed = str(Headers.of(properties=properties))
        back = Headers.parse(printed).properties()
        assert back == properties
        assert [type(value) for value in back.values()] == [
            type(value) for value in properties.values()
        ]
        assert printed.isascii()


@pytest.mark.parametrize(
    "text_of_vector",
    sorted({v["fields"]["headers"] for v in load("emqp") if "headers" in v.get("fields", {})}),
)
def test_recorded_headers_are_known(text_of_vector: str) -> None:
    headers = Headers.parse(text_of_vector)
    assert headers.properties() == {} and str(headers) == text_of_vector
