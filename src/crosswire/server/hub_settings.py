"""What a hub gets of the configuration: its policies, and its parts of the memory."""

from __future__ import annotations

from typing import Final

from crosswire.config import Config
from crosswire.hub.policies import HubConfig
from crosswire.resources import memory_limit_bytes

__all__ = ["hub_config"]

_WINDOWS_PART: Final = 4
"""Queues and subscriptions together keep messages in memory up to this part of the limit."""
_SCHEDULES_PART: Final = 8
"""Messages of schedules, which are kept in memory, have up to this part of the limit."""
_CALLS_PART: Final = 4
"""Calls in progress have up to this part of the limit."""


def hub_config(config: Config) -> HubConfig:
    """The settings of a hub that runs with this configuration."""
    memory_bytes = memory_limit_bytes(config.limits.memory_bytes)
    return HubConfig(
        queues=config.queues,
        topics=config.topics,
        service=config.services,
        staging=config.ingest,
        lake=config.lake.messages or config.lake.ledger,
        windows_bytes=memory_bytes // _WINDOWS_PART,
        expire_s=config.store.expire_s,
        subscriptions=config.limits.subscriptions,
        schedules=config.limits.schedules,
        schedules_bytes=memory_bytes // _SCHEDULES_PART,
        calls_bytes=memory_bytes // _CALLS_PART,
        share=config.limits.share,
    )
