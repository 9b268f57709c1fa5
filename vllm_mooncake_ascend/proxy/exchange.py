"""One client request as two legs: what to send next, when to try again, what to answer, what to release.

Pure: the relay performs the actions in order and hands back one event for the last of them; the exchange holds every
decision. It must not know HTTP connections, bodies or clocks: an answer is its status here, and deadlines belong to the
one who waits.

    stage       event                      next        actions
    ---------   ------------------------   ---------   -------------------------------------------------------------------
    (begin)     plan with remote prefill   PREFILL     AskPrefill
                plan without               DECODE      AskDecode without params
    PREFILL     answered 2xx with params   DECODE      AskDecode with these params
                answered 4xx               ENDED       PassAnswer: the client's fault, told in prefill's words
                answered otherwise, lost   PREFILL     once AskPrefill elsewhere, with a new transfer id
                  ... twice, or no other   DECODE      policy local: AskDecode without params
                                           ENDED       policy fail: AnswerError
    DECODE      answered 2xx               ANSWERING   PassAnswer; the KV is read by now, nothing to release
                answered 4xx               ENDED       Release, PassAnswer
                answered otherwise, lost   DECODE      once AskDecode elsewhere, with the same params: prefill still holds
                  ... twice, or no other   ENDED       Release, AnswerError
    ANSWERING   passed                     ENDED       none
                stream broke               ENDED       EndStream: bytes are with the client, so never a second attempt
    PREFILL     client left                ENDED       Abandon
    any other   client left                ENDED       Release where decode was not seen to start

With the concurrent flow the relay may have sent decode's leg beside prefill's (`early`); AskDecode then takes it. When it was
sent changes nothing of the above.

A 2xx of decode counts as its start only with the first event of a stream or the whole of a body: vLLM sends the status
line before it has looked for the KV. Release is idempotent and is ignored by a producer whose KV a decode engine reads.

A prefill that is given up before it answered is aborted by vLLM when the connection closes, and then holds nothing. But it
may just have ended, with its answer on the way to nobody: its transfer is abandoned under the id we gave it.
"""

from __future__ import annotations

import enum
from typing import Literal, Union

import msgspec

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import LocalProtocolError
from vllm_mooncake_ascend.proxy.rewrite import JsonObject
from vllm_mooncake_ascend.types import TransferId

Leg = Literal["prefill", "decode"]
OnPrefillUnavailable = Literal["fail", "local"]
PdMode = Literal["remote", "local", "local_fallback", "none"]
"""Where the prompt was computed: by prefill; by decode because the request is of that kind; by decode because prefill
failed; nowhere (never got to decode, or a call that has no prompt)."""
LossReason = Literal["unreachable", "silent", "reset", "malformed", "exhausted"]
"""`exhausted` is our own lack of files, ports or memory; the others are the instance's. `upstream` has the table."""
FailureReason = Literal[LossReason, "status", "no_params", "no_instance"]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a request before anything is sent."""

    transfer_ids: tuple[TransferId, ...]
    """A fresh one for each attempt at prefill, `limits.LEG_ATTEMPTS` of them; empty: decode alone serves the request."""
    on_prefill_unavailable: OnPrefillUnavailable
    has_prompt: bool
    """False for calls that generate nothing (models, tokenize)."""


# --- events -----------------------------------------------------------------------------------------------------------


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class LegAnswered(_Event, frozen=True, kw_only=True):
    instance: str
    status: int
    params: JsonObject | None = None
    """kv_transfer_params of prefill's answer."""


class LegLost(_Event, frozen=True, kw_only=True):
    """The instance did not answer, or not to the end of what must be whole."""

    instance: str
    reason: LossReason
    detail: str


class NoInstance(_Event, frozen=True, kw_only=True):
    """There is no instance for the leg apart from those already asked."""


class AnswerPassed(_Event, frozen=True, kw_only=True):
    pass


class StreamBroke(_Event, frozen=True, kw_only=True):
    """The answer broke off after its first bytes had gone to the client."""

    instance: str
    detail: str


class ClientLeft(_Event, frozen=True, kw_only=True):
    pass


Event = Union[LegAnswered, LegLost, NoInstance, AnswerPassed, StreamBroke, ClientLeft]

# --- actions ----------------------------------------------------------------------------------------------------------


class _Action(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class AskPrefill(_Action, frozen=True, kw_only=True):
    """Answered by LegAnswered, LegLost or NoInstance. `avoid`: instances that had their try."""

    transfer_id: TransferId
    avoid: tuple[str, ...]


class AskDecode(_Action, frozen=True, kw_only=True):
    """Answered by LegAnswered, LegLost or NoInstance."""

    params: JsonObject | None
    avoid: tuple[str, ...]


class PassAnswer(_Action, frozen=True, kw_only=True):
    """Give the client the leg's answer as it is. Answered by AnswerPassed or StreamBroke."""


class AnswerError(_Action, frozen=True, kw_only=True):
    """Give the client an error of our own."""

    status: int
    kind: str
    message: str


class EndStream(_Action, frozen=True, kw_only=True):
    """Tell a client in the middle of a stream that it ends here, and end it."""

    message: str


class Release(_Action, frozen=True, kw_only=True):
    """Tell the producer that no reader will come."""

    params: JsonObject


class Abandon(_Action, frozen=True, kw_only=True):
    """Tell the instance asked last that no reader will come for a transfer it has not answered yet."""

    transfer_id: TransferId


class CountRetry(_Action, frozen=True, kw_only=True):
    leg: Leg
    reason: FailureReason


Action = Union[AskPrefill, AskDecode, PassAnswer, AnswerError, EndStream, Release, Abandon, CountRetry]


class _Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why an attempt at a leg gave nothing."""

    reason: FailureReason
    text: str


_STATUS_OF_FAILURE: dict[FailureReason, int] = {"unreachable": 503, "exhausted": 503, "no_instance": 503, "silent": 504}
"""What the client is told; 502 for the rest."""


class Stage(enum.Enum):
    NEW = "new"
    PREFILL = "prefill"
    DECODE = "decode"
    ANSWERING = "answering"
    ENDED = "ended"


class Exchange:
    """The state of one client request; see the table of the module."""

    def __init__(self, plan: Plan) -> None:
        assert len(plan.transfer_ids) in (0, limits.LEG_ATTEMPTS), "one transfer id for each attempt at prefill"
        self.stage = Stage.NEW
        self.pd_mode: PdMode = "none"
        self._plan = plan
        self._params: JsonObject | None = None
        self._tried: tuple[str, ...] = ()
        """Instances asked for the leg under way."""
        self._failure: _Failure | None = None
        """Of the last attempt at the leg under way."""

    @property
    def ended(self) -> bool:
        return self.stage is Stage.ENDED

    def begin(self) -> list[Action]:
        """The first actions; called once."""
        assert self.stage is Stage.NEW, "an exchange begins once"
        if self._plan.transfer_ids:
            self.stage = Stage.PREFILL
            return [AskPrefill(transfer_id=self._plan.transfer_ids[0], avoid=())]
        return self._to_decode("local" if self._plan.has_prompt else "none")

    def handle(self, event: Event) -> list[Action]:
        """What follows from `event`.

        Raises:
            LocalProtocolError: no such event can come in this stage.
        """
        if self.ended:
            raise LocalProtocolError(f"{type(event).__name__} after the end of an exchange")
        if isinstance(event, ClientLeft):
            unanswered = self._plan.transfer_ids[len(self._tried)] if self.stage is Stage.PREFILL else None
            return self._end([] if unanswered is None else [Abandon(transfer_id=unanswered)])
        match self.stage:
            case Stage.PREFILL:
                return self._in_prefill(event)
            case Stage.DECODE:
                return self._in_decode(event)
            case Stage.ANSWERING if isinstance(event, AnswerPassed):
                return self._end([])
            case Stage.ANSWERING if isinstance(event, StreamBroke):
                message = f"decode instance {event.instance} broke off its answer: {event.detail}"
                return self._end([EndStream(message=message)])
        raise LocalProtocolError(f"{type(event).__name__} cannot come while {self.stage.value}")

    def _in_prefill(self, event: Event) -> list[Action]:
        match event:
            case LegAnswered(status=status) if 400 <= status < 500:
                return self._end([PassAnswer()])
            case LegAnswered(status=status, params=params) if 200 <= status < 300 and params is not None:
                self._params = params
                return self._to_decode("remote")
        failure = self._note_failure("prefill", event)
        if failure.reason != "no_instance" and len(self._tried) < limits.LEG_ATTEMPTS:
            next_id = self._plan.transfer_ids[len(self._tried)]
            return self._retry("prefill", failure, AskPrefill(transfer_id=next_id, avoid=self._tried))
        if self._plan.on_prefill_unavailable == "local":
            return self._to_decode("local_fallback")
        return self._end([self._error("prefill")])

    def _in_decode(self, event: Event) -> list[Action]:
        match event:
            case LegAnswered(status=status) if 400 <= status < 500:
                return self._end([PassAnswer()])
            case LegAnswered(status=status) if 200 <= status < 300:
                self.stage = Stage.ANSWERING
                return [PassAnswer()]
        failure = self._note_failure("decode", event)
        if failure.reason != "no_instance" and len(self._tried) < limits.LEG_ATTEMPTS:
            return self._retry("decode", failure, AskDecode(params=self._params, avoid=self._tried))
        return self._end([self._error("decode")])

    def _to_decode(self, pd_mode: PdMode) -> list[Action]:
        self.stage = Stage.DECODE
        self.pd_mode = pd_mode
        self._tried = ()
        self._failure = None
        return [AskDecode(params=self._params, avoid=())]

    def _note_failure(self, leg: Leg, event: Event) -> _Failure:
        """Take `event` as the failure of an attempt; without any other instance the failure before it still stands."""
        failure: _Failure
        match event:
            case LegAnswered(instance=instance, status=status):
                self._tried += (instance,)
                failure = _failed_answer(leg, instance, status)
            case LegLost(instance=instance, reason=reason, detail=detail):
                self._tried += (instance,)
                failure = _Failure(reason=reason, text=f"{leg} instance {instance} is lost ({reason}): {detail}")
            case NoInstance():
                failure = _Failure(reason="no_instance", text=f"no {leg} instance is available")
            case _:
                raise LocalProtocolError(f"{type(event).__name__} cannot come while {self.stage.value}")
        if self._failure is None or failure.reason != "no_instance":
            self._failure = failure
        return failure

    def _retry(self, leg: Leg, failure: _Failure, ask: AskPrefill | AskDecode) -> list[Action]:
        return [CountRetry(leg=leg, reason=failure.reason), ask]

    def _error(self, leg: Leg) -> AnswerError:
        assert self._failure is not None, "an error is answered only after a failure"
        return AnswerError(
            status=_STATUS_OF_FAILURE.get(self._failure.reason, 502),
            kind=f"{leg}_unavailable",
            message=f"{self._failure.text}; instances asked: {len(self._tried)}",
        )

    def _end(self, actions: list[Action]) -> list[Action]:
        """The only way out: whatever ended the exchange before decode started, prefill's KV is let go."""
        unread = self._params if self.stage is Stage.DECODE else None
        self.stage = Stage.ENDED
        return [Release(params=unread), *actions] if unread is not None else actions


def _failed_answer(leg: Leg, instance: str, status: int) -> _Failure:
    if 200 <= status < 300:
        assert leg == "prefill", "a 2xx of decode is no failure"
        text = f"prefill instance {instance} answered without kv_transfer_params; does it run MooncakeConnectorV1 as producer?"
        return _Failure(reason="no_params", text=text)
    return _Failure(reason="status", text=f"{leg} instance {instance} answered {status}")
