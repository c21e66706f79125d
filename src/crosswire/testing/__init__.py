"""For tests of programs that use a hub: a real one, in a process of its own.

    async with running_hub() as hub, crosswire.connect(hub.url("emp")) as client:
        await client.publish("queue/orders", {"item": "tea"})

pytest finds the fixture `crosswire_hub` by itself.
"""

from crosswire.testing.hub_process import RunningHub, running_hub

__all__ = ["RunningHub", "running_hub"]
