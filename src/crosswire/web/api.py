"""The table of the API's operations: one module a subject."""

from __future__ import annotations

from typing import Final

from crosswire.web.analyses import ANALYSIS_OPERATIONS
from crosswire.web.checkpoints import CHECKPOINT_OPERATIONS
from crosswire.web.configuration import CONFIGURATION_OPERATIONS
from crosswire.web.connections import CONNECTION_OPERATIONS
from crosswire.web.consumer_lists import CONSUMER_OPERATIONS
from crosswire.web.contract import Operation
from crosswire.web.damage import DAMAGE_OPERATIONS
from crosswire.web.dead import DEAD_OPERATIONS
from crosswire.web.dead_lists import DEAD_LIST_OPERATIONS
from crosswire.web.frames import FRAME_OPERATIONS
from crosswire.web.ingest import INGEST_OPERATIONS
from crosswire.web.live import LIVE_OPERATIONS
from crosswire.web.log import LOG_OPERATIONS
from crosswire.web.messages import MESSAGE_OPERATIONS
from crosswire.web.queues import QUEUE_OPERATIONS
from crosswire.web.replication import REPLICATION_OPERATIONS
from crosswire.web.report_page import REPORT_OPERATIONS
from crosswire.web.schedules import SCHEDULE_OPERATIONS
from crosswire.web.search import SEARCH_OPERATIONS
from crosswire.web.services import SERVICE_OPERATIONS
from crosswire.web.session import SESSION_OPERATIONS
from crosswire.web.state import STATE_OPERATIONS
from crosswire.web.stats import STATS_OPERATIONS
from crosswire.web.storage import STORAGE_OPERATIONS
from crosswire.web.subscriptions import SUBSCRIPTION_OPERATIONS
from crosswire.web.topics import TOPIC_OPERATIONS
from crosswire.web.trace import TRACE_OPERATIONS
from crosswire.web.users import USER_OPERATIONS

__all__ = ["OPERATIONS"]

OPERATIONS: Final[tuple[Operation, ...]] = (
    *SESSION_OPERATIONS,
    *STATE_OPERATIONS,
    *REPLICATION_OPERATIONS,
    *STATS_OPERATIONS,
    *QUEUE_OPERATIONS,
    *TOPIC_OPERATIONS,
    *SUBSCRIPTION_OPERATIONS,
    *SERVICE_OPERATIONS,
    *CONNECTION_OPERATIONS,
    *CONSUMER_OPERATIONS,
    *SEARCH_OPERATIONS,
    *LIVE_OPERATIONS,
    *FRAME_OPERATIONS,
    *ANALYSIS_OPERATIONS,
    *MESSAGE_OPERATIONS,
    *TRACE_OPERATIONS,
    *DEAD_LIST_OPERATIONS,
    *DEAD_OPERATIONS,
    *SCHEDULE_OPERATIONS,
    *USER_OPERATIONS,
    *CONFIGURATION_OPERATIONS,
    *STORAGE_OPERATIONS,
    *REPORT_OPERATIONS,
    *DAMAGE_OPERATIONS,
    *CHECKPOINT_OPERATIONS,
    *INGEST_OPERATIONS,
    *LOG_OPERATIONS,
)
