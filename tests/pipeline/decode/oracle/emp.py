"""EMP, frame by frame."""

from __future__ import annotations

from crosswire.pipeline.decode.meanings.contract import ACKNOWLEDGEMENT, Described
from crosswire.pipeline.decode.meanings.emp import (
    JSON,
    UNASKED,
    EmpBody,
    EmpMemory,
    asked,
    operation_beside,
    published,
    read_request,
    read_response,
)
from crosswire.wire.contract import Frame
from crosswire.wire.emp.frames import Request, Response


class EmpReading(EmpMemory):
    """A response has the destination of the request that it answers."""

    def describe(self, forward: bool, frame: Frame, offset: int, length: int) -> Described:
        """Remembers the target of a request's response."""
        if isinstance(frame, Request):
            described, answer = asked(frame.id, read_request(frame.body))
            if answer is not None:
                self.asked.put((forward, frame.id), answer)
            return described
        if isinstance(frame, Response):
            return self._response(forward, frame.id, read_response(frame.body))
        fields, target, _, status, *_ = operation_beside(frame)
        return Described(fields, target[0], status=status)

    def _response(self, forward: bool, number: int, body: EmpBody) -> Described:
        kind, destination = self.asked.take((not forward, number)) or UNASKED
        return Described(
            f'{{"id":{number}{body.operation.fields}',
            kind,
            str(number),
            destination,
            body.operation.status,
            payload_size=body.size,
            payload_end=body.after,
            payload=body.data or None,
            content_type=JSON if body.data else None,
            message_id=published(body.data) if kind == ACKNOWLEDGEMENT else None,
        )


READING = EmpReading
