"""eMQP's layout on the wire: every part of a command, its words and delimiters, stated once.

A command is a ZeroMQ message, whose frames `wire/zmtp/layout.py` has. Its parts, without the
identity that a ROUTER socket puts in front:

    0 empty       always
    1 version     eMQP/1.0
    2 command     in capitals
    3 msgid       unique, made by the sender
    4 …           by command:

    ACK           4 msgid of the command that is acknowledged
    REPLY         4 message, 5 msgid of the request (a receipt and an answer to ADMIN have none)
    HEARTBEAT     4 seconds since 1970, with or without a fraction
    REQUEST       4 queue, 5 headers, 6 message
    PUBLISH       4 topic, 5 headers, 6 message; or, of 6 parts: 4 topic, 5 message
    SCHEDULE      4 queue, 5 headers, 6 interval in seconds or -1, 7 message, 8 cron or empty
                  (deployed); or, of 7 parts: 4 queue, 5 headers, 6 message (specification)
    UNSCHEDULE    like SCHEDULE
    INFORM        4 queues, 5 worker or scheduler
    READY, DISCONNECT, KBAI (deployed: KBYE) and administration have no more parts

What a subscriber receives is no command but two parts: 0 topic, 1 message.

Message bodies and results may be any bytes; every other part is UTF-8. Parts after the last that
is named here are ignored.
"""

from __future__ import annotations

from typing import Final

# ---------------------------------------------------------------------------------------- header

VERSION: Final = b"eMQP/1.0"

EMPTY_PART: Final = 0
VERSION_PART: Final = 1
COMMAND_PART: Final = 2
MSGID_PART: Final = 3
MIN_PARTS: Final = 4
"""The parts that all commands have; their own begin here."""

# -------------------------------------------------------------------------------------- commands

COMMAND_ACK: Final = b"ACK"
COMMAND_REPLY: Final = b"REPLY"
COMMAND_HEARTBEAT: Final = b"HEARTBEAT"
COMMAND_DISCONNECT: Final = b"DISCONNECT"
COMMAND_KBAI: Final = b"KBAI"
COMMAND_KBYE: Final = b"KBYE"
"""KBAI as deployed peers spell it."""
COMMAND_READY: Final = b"READY"
COMMAND_REQUEST: Final = b"REQUEST"
COMMAND_PUBLISH: Final = b"PUBLISH"
COMMAND_SCHEDULE: Final = b"SCHEDULE"
COMMAND_UNSCHEDULE: Final = b"UNSCHEDULE"
COMMAND_INFORM: Final = b"INFORM"

ADMIN_COMMANDS: Final = (b"HELLO", b"STATUS", b"ROUTER_SHOW_WORKERS", b"ROUTER_SHOW_SCHEDULERS")
"""What the deployed `emq-cli` sends; the specification has none of them."""

# ----------------------------------------------------------------------------------------- parts

ACK_MSGID_PART: Final = 4
ACK_PARTS: Final = 5

REPLY_MESSAGE_PART: Final = 4
REPLY_REQUEST_PART: Final = 5
REPLY_PARTS: Final = 5
"""The least: of a receipt."""

HEARTBEAT_TIME_PART: Final = 4
HEARTBEAT_PARTS: Final = 5

REQUEST_QUEUE_PART: Final = 4
REQUEST_HEADERS_PART: Final = 5
REQUEST_MESSAGE_PART: Final = 6
REQUEST_PARTS: Final = 7

PUBLISH_TOPIC_PART: Final = 4
PUBLISH_HEADERS_PART: Final = 5
PUBLISH_MESSAGE_PART: Final = 6
SHORT_PUBLISH_MESSAGE_PART: Final = 5
SHORT_PUBLISH_PARTS: Final = 6
"""Of a publisher: without headers."""

SCHEDULE_QUEUE_PART: Final = 4
SCHEDULE_HEADERS_PART: Final = 5
SCHEDULE_INTERVAL_PART: Final = 6
SCHEDULE_MESSAGE_PART: Final = 7
SCHEDULE_CRON_PART: Final = 8
SHORT_SCHEDULE_MESSAGE_PART: Final = 6
SHORT_SCHEDULE_PARTS: Final = 7
"""As the specification has it: interval or cron are headers."""
SCHEDULE_PARTS: Final = 9
"""As deployed. Eight parts are neither."""
NO_INTERVAL: Final = "-1"
"""The interval of a schedule that has a cron expression."""

INFORM_QUEUES_PART: Final = 4
INFORM_PEER_PART: Final = 5
INFORM_PARTS: Final = 6

DELIVERY_TOPIC_PART: Final = 0
DELIVERY_MESSAGE_PART: Final = 1
DELIVERY_PARTS: Final = 2
