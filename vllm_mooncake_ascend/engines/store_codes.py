"""What Mooncake Store's return codes mean: one table, from (call, code) to an outcome and words for a person.

Sources, Mooncake v0.3.13.post1:
- names and numbers: `mooncake-store/include/types.h`, `enum class ErrorCode`;
- what a get makes of them: `mooncake-store/src/real_client.cpp`, `batch_get_into_multi_buffers_internal`, and
  `mooncake-store/src/client_service.cpp`, `Client::BatchGet`. It asks the master for all keys first, submits all transfers,
  waits 60 s for them (`transfer_task.cpp`, hard-coded), and looks at the object leases last. So -703, -704, -702 and -600
  come before a byte was asked for, and -707 only when all bytes of *that* key had come. -800 says that something of the
  key is still under way, or may be: bytes were seen to land 60 s later; -801 comes after all bytes of the key;
- what a put makes of them: `client_service.cpp`, `Client::BatchPut`: "exists already" is answered with 0;
- what a remove makes of them: `mooncake-store/src/master_service.cpp`, `MasterService::Remove`: first "is there", then "has no
  object lease", then "nobody is writing it".

- what a get of an object on an SSD makes of them: `real_client.cpp`, `batch_get_into_offload_object_internal`. The owner reads
  the file into memory of its own and answers; the bytes are copied from there; last it is asked whether that took longer than
  the owner keeps its memory. So -10, -1101 and -1102, which are the owner's answers, come before a byte was on its way, and
  -706 when all had come.

-900 and -901 are UNKNOWN for data although a plain get asks the master before it moves anything: with an SSD tier the owner
is asked as well, and then bytes are on their way. Which of the two did not answer, these codes do not tell.

Rows are only added for codes that were seen or read in these sources; an unlisted code is UNKNOWN. The codes actually
observed are recorded per version in `tests/contract/observed_store_codes.json`.
"""

from __future__ import annotations

import enum

import msgspec

from vllm_mooncake_ascend.engines.base import KeyOutcome, KeyResult


class StoreCall(enum.Enum):
    """Which call of the store answered."""

    PUT = "batch_put_from_multi_buffers"
    GET = "batch_get_into_multi_buffers"
    EXISTS = "batch_is_exist"
    REMOVE = "batch_remove"


MOVES_BYTES = frozenset({StoreCall.PUT, StoreCall.GET})
"""Calls behind which, when they are UNKNOWN, bytes may still move."""


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    outcome: KeyOutcome
    meaning: str
    remedy: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What one code means, for a person."""

    calls: tuple[str, ...]
    """Which calls answer with it: put, get, exists, or any."""
    meaning: str
    remedy: str


CHECKSUM_MISMATCH = -801
"""Mooncake's name for it, where MOONCAKE_STORE_CHECKSUM is set; a seal that does not fit says the same."""
_LOST = frozenset({-900, -901})
"""RPC_FAIL, RPC_TIMEOUT: the master does not answer."""

_NAMES = {
    -1: "INTERNAL_ERROR",
    -10: "BUFFER_OVERFLOW",
    -101: "SEGMENT_NOT_FOUND",
    -103: "CLIENT_NOT_FOUND",
    -400: "INVALID_KEY",
    -500: "WRITE_FAIL",
    -601: "ILLEGAL_CLIENT",
    -700: "INVALID_WRITE",
    -701: "INVALID_READ",
    -705: "OBJECT_ALREADY_EXISTS",
    -706: "OBJECT_HAS_LEASE",
    -710: "REPLICA_NOT_FOUND",
    -712: "REPLICA_IS_GONE",
    -714: "OBJECT_REPLICA_BUSY",
    -1010: "UNAVAILABLE_IN_CURRENT_STATUS",
    -1011: "UNAVAILABLE_IN_CURRENT_MODE",
    -1103: "FILE_WRITE_FAIL",
}
"""Codes that have a name but no certain meaning for our calls."""

_RPC_FAIL = _Row(
    outcome=KeyOutcome.UNKNOWN,
    meaning="the master could not be reached, or for a get the owner of an SSD",
    remedy="check that mooncake_master runs at the configured address; clients connect again by themselves",
)
_RPC_TIMEOUT = _Row(
    outcome=KeyOutcome.UNKNOWN,
    meaning="the master, or for a get the owner of an SSD, did not answer within MC_RPC_TIMEOUT_MS",
    remedy="check that mooncake_master and mooncake_client are neither stopped nor short of CPU or disk",
)
_TRANSFER_FAIL = _Row(
    outcome=KeyOutcome.UNKNOWN,
    meaning="the process that owns the memory was lost or silent, or its value has another length; the rest may still be "
    "under way",
    remedy="check that all owners of pool memory are alive; a dead one is forgotten after the master's client_ttl",
)
_FILE_FAIL = _Row(
    outcome=KeyOutcome.FAILED,
    meaning="its owner could not read it from its SSD",
    remedy="look at the SSD and its folder on that machine; a mooncake_client that is started anew scans it",
)
_QUOTA = _Row(
    outcome=KeyOutcome.FULL,
    meaning="the tenant's quota does not allow it",
    remedy="raise the quota of this tenant, or start mooncake_master without --enable_multi_tenants",
)

_TABLE: dict[tuple[StoreCall, int], _Row] = {
    (StoreCall.GET, -703): _Row(outcome=KeyOutcome.MISSING, meaning="another client is still writing it", remedy=""),
    (StoreCall.GET, -704): _Row(outcome=KeyOutcome.MISSING, meaning="there is no such object", remedy=""),
    (StoreCall.GET, -600): _Row(
        outcome=KeyOutcome.FAILED,
        meaning="the value is longer than the buffers",
        remedy="this key was written by something else, or by a version with other objects; use another namespace",
    ),
    (StoreCall.GET, -702): _Row(
        outcome=KeyOutcome.FAILED,
        meaning="no replica can be read",
        remedy="nothing; it is gone soon",
    ),
    (StoreCall.GET, -707): _Row(
        outcome=KeyOutcome.FAILED,
        meaning="the object lease ended before the call did, so the bytes may be of another object",
        remedy="start mooncake_master with a larger --default_kv_lease_ttl (30000 is advised)",
    ),
    (StoreCall.GET, -706): _Row(
        outcome=KeyOutcome.FAILED,
        meaning="copying it from its owner's SSD took longer than the owner keeps what it has read, so the bytes may be of "
        "another object",
        remedy="start mooncake_client with a larger MOONCAKE_OFFLOAD_CLIENT_BUFFER_GC_TTL_MS (5000 if unset)",
    ),
    (StoreCall.GET, -10): _Row(
        outcome=KeyOutcome.FAILED,
        meaning="its owner had no memory left to read it from its SSD into",
        remedy="start mooncake_client with a larger MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES (1.25 GiB if unset)",
    ),
    (StoreCall.GET, -1101): _FILE_FAIL,
    (StoreCall.GET, -1102): _FILE_FAIL,
    (StoreCall.GET, -800): _TRANSFER_FAIL,
    (StoreCall.GET, CHECKSUM_MISMATCH): _Row(
        outcome=KeyOutcome.FAILED,
        meaning="its bytes are not those that were put: something changed them in its owner's memory or on its SSD",
        remedy="nothing: it is taken out of the pool and computed anew; many of them after a process was stopped or lost are "
        "bytes of puts that had failed",
    ),
    (StoreCall.GET, -900): _RPC_FAIL,
    (StoreCall.GET, -901): _RPC_TIMEOUT,
    (StoreCall.PUT, -200): _Row(
        outcome=KeyOutcome.FULL,
        meaning="no segment has room for it now",
        remedy="nothing, if it comes now and then: eviction runs behind; else lend more memory to the pool",
    ),
    (StoreCall.PUT, -600): _Row(
        outcome=KeyOutcome.FAILED,
        meaning="the client refused its arguments",
        remedy="report it as a bug of this package, with Mooncake's lines above",
    ),
    (StoreCall.PUT, -800): _TRANSFER_FAIL,
    (StoreCall.PUT, -900): _RPC_FAIL,
    (StoreCall.PUT, -901): _RPC_TIMEOUT,
    (StoreCall.PUT, -1700): _QUOTA,
    (StoreCall.PUT, -1701): _QUOTA,
    (StoreCall.EXISTS, -900): _RPC_FAIL,
    (StoreCall.EXISTS, -901): _RPC_TIMEOUT,
    (StoreCall.REMOVE, -704): _Row(outcome=KeyOutcome.MISSING, meaning="there is no such object", remedy=""),
    (StoreCall.REMOVE, -706): _Row(
        outcome=KeyOutcome.IN_USE,
        meaning="somebody has looked it up or read it within the object lease",
        remedy="try again when the master's default_kv_lease_ttl has passed",
    ),
    (StoreCall.REMOVE, -703): _Row(
        outcome=KeyOutcome.IN_USE,
        meaning="another client is still writing it",
        remedy="try again later; the master discards what a dead client began after put_start_discard_timeout_sec",
    ),
    (StoreCall.REMOVE, -900): _RPC_FAIL,
    (StoreCall.REMOVE, -901): _RPC_TIMEOUT,
}

_REMEDY = "read Mooncake's own lines above with MC_LOG_LEVEL=INFO"
"""For a code that has a name only, or none."""

COUNTED_CALLS = (StoreCall.PUT, StoreCall.GET, StoreCall.EXISTS)
"""What engines call; their errors are counted by code."""
ERROR_CODES = frozenset(_NAMES) | {
    code for (call, code), row in _TABLE.items() if call in COUNTED_CALLS and row.outcome is not KeyOutcome.MISSING
}
"""Every code of an error of these that this package can name."""

_DONE = KeyResult(outcome=KeyOutcome.DONE, code=0, reason="")
_ACCEPTED = KeyResult(outcome=KeyOutcome.ACCEPTED, code=0, reason="")
_ABSENT = KeyResult(outcome=KeyOutcome.MISSING, code=0, reason="")


def explain(code: int) -> tuple[Explanation, ...]:
    """What one of `ERROR_CODES` means; calls for which that is the same stand together."""
    calls: dict[tuple[str, str], list[str]] = {}
    for (call, listed), row in _TABLE.items():
        if listed == code and call in COUNTED_CALLS:
            calls.setdefault((row.meaning, row.remedy), []).append(call.name.lower())
    if not calls:
        calls[_NAMES[code], _REMEDY] = ["any"]
    return tuple(Explanation(calls=tuple(names), meaning=meaning, remedy=remedy) for (meaning, remedy), names in calls.items())


def is_lost(code: int) -> bool:
    """Whether `code` says that the master does not answer."""
    return code in _LOST


def put_result(code: int) -> KeyResult:
    """Of one key's code."""
    return _ACCEPTED if code == 0 else _failure(StoreCall.PUT, code)


def get_result(answer: int, *, value_bytes: int) -> KeyResult:
    """Of one key's answer: a number of bytes, or a code."""
    if answer == value_bytes:
        return _DONE
    if answer < 0:
        return _failure(StoreCall.GET, answer)
    reason = f"{StoreCall.GET.value} brought {answer} bytes of a value that should have {value_bytes}"
    return KeyResult(outcome=KeyOutcome.UNKNOWN, code=answer, reason=reason)


def broken_result() -> KeyResult:
    """Of a key whose bytes came and are not those that were put."""
    return _failure(StoreCall.GET, CHECKSUM_MISMATCH)


def exists_result(answer: int) -> KeyResult:
    """Of one key's answer: 1, 0 or a code."""
    if answer == 1:
        return _DONE
    return _ABSENT if answer == 0 else _failure(StoreCall.EXISTS, answer)


def remove_result(code: int) -> KeyResult:
    """Of one key's code."""
    return _DONE if code == 0 else _failure(StoreCall.REMOVE, code)


def refused(reason: str) -> KeyResult:
    """No call was made, because of `reason`."""
    return KeyResult(outcome=KeyOutcome.REFUSED, code=0, reason=reason)


def unanswered(call: StoreCall, num_answers: int, num_keys: int) -> KeyResult:
    """A call that did not answer for each of its keys: of none of them is anything known."""
    reason = f"{call.value} answered for {num_answers} of {num_keys} keys; report it as a bug of this package"
    return KeyResult(outcome=KeyOutcome.UNKNOWN, code=0, reason=reason)


def _failure(call: StoreCall, code: int) -> KeyResult:
    row = _TABLE.get((call, code))
    if row is None:
        name = _NAMES.get(code, "a code this package does not know")
        row = _Row(outcome=KeyOutcome.UNKNOWN, meaning=name, remedy=_REMEDY)
    if row.outcome is KeyOutcome.MISSING:
        return KeyResult(outcome=row.outcome, code=code, reason="")
    return KeyResult(outcome=row.outcome, code=code, reason=f"{call.value} returned {code}: {row.meaning}; {row.remedy}")
