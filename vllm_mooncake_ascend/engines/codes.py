"""What Mooncake Transfer Engine's return codes mean: one table, from (call, code) to an outcome and words for a person.

Sources, Mooncake v0.3.13.post1:
- names and numbers: `mooncake-transfer-engine/include/error.h`;
- what the Python calls make of them: `mooncake-integration/transfer_engine/transfer_engine_py.cpp`. Its batch transfers
  answer 0 or -1 and nothing else: a bad argument, an unreachable peer, a rejected descriptor and a timeout all are -1,
  and with most of them the rest of the batch is still under way. Hence the rule of this table: **a data read that did not
  answer 0 is UNKNOWN**, whatever the number. What is certain (REFUSED, FAILED) is decided before a byte is asked for.

Rows are only added for codes that were seen or that `error.h` names; an unlisted code takes the worst outcome its call can
have. The codes actually observed are recorded per version in `tests/contract/observed_codes.json`.
"""

from __future__ import annotations

import enum

import msgspec

from vllm_mooncake_ascend.types import Outcome


class Call(enum.Enum):
    """Which call of the engine answered."""

    INITIALIZE = "initialize"
    REGISTER = "batch_register_memory"
    OPEN = "open segment"
    """A batch read of no descriptors: it makes the engine fetch the peer's segment and moves no byte."""
    READ = "batch_transfer_sync_read"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    outcome: Outcome
    meaning: str
    remedy: str


_NAMES = {
    -1: "ERR_INVALID_ARGUMENT",
    -2: "ERR_TOO_MANY_REQUESTS",
    -3: "ERR_ADDRESS_NOT_REGISTERED",
    -4: "ERR_BATCH_BUSY",
    -6: "ERR_DEVICE_NOT_FOUND",
    -7: "ERR_ADDRESS_OVERLAPPED",
    -101: "ERR_DNS",
    -102: "ERR_SOCKET",
    -103: "ERR_MALFORMED_JSON",
    -104: "ERR_REJECT_HANDSHAKE",
    -200: "ERR_METADATA",
    -201: "ERR_ENDPOINT",
    -202: "ERR_CONTEXT",
    -300: "ERR_NUMA",
    -301: "ERR_CLOCK",
    -302: "ERR_MEMORY",
    -303: "ERR_NOT_IMPLEMENTED",
}
"""`error.h`. -1 is also what the Python layer answers to anything that went wrong, so its name is not shown for transfers."""

_DONE = Verdict(outcome=Outcome.DONE, meaning="", remedy="")

_TABLE: dict[tuple[Call, int], Verdict] = {
    (Call.INITIALIZE, -1): Verdict(
        outcome=Outcome.FAILED,
        meaning="no port could be bound, or a transport could not be set up",
        remedy="check MC_MIN_RPC_PORT and MC_MAX_RPC_PORT (default 15000 to 17000, two ports an engine, two engines a "
        "worker) and read Mooncake's own lines above with MC_LOG_LEVEL=INFO",
    ),
    (Call.REGISTER, -1): Verdict(
        outcome=Outcome.FAILED,
        meaning="the transport took one of the regions for invalid",
        remedy="register whole tensor storages of more than 0 bytes",
    ),
    (Call.REGISTER, -7): Verdict(
        outcome=Outcome.FAILED,
        meaning="a region overlaps memory that something else in this process has registered with the engine",
        remedy="register each storage once, through one engine",
    ),
    (Call.REGISTER, -202): Verdict(
        outcome=Outcome.FAILED,
        meaning="the device refused to map the memory",
        remedy="check `ulimit -l` (RDMA pins memory) and the memory location given for the device",
    ),
    (Call.OPEN, -1): Verdict(
        outcome=Outcome.FAILED,
        meaning="the peer's engine could not be reached, or did not answer the exchange of segments",
        remedy="check that the peer is alive, that its address is one this host can reach, and that no firewall blocks "
        "its MC_MIN_RPC_PORT to MC_MAX_RPC_PORT",
    ),
    (Call.READ, -1): Verdict(
        outcome=Outcome.UNKNOWN,
        meaning="a descriptor was rejected or failed, the peer was lost, or MC_TRANSFER_TIMEOUT passed; the other "
        "descriptors of the call may still be under way",
        remedy="check that the peer is alive and has the memory registered",
    ),
}

_UNLISTED = {
    Call.INITIALIZE: Outcome.FAILED,
    Call.REGISTER: Outcome.FAILED,
    Call.OPEN: Outcome.FAILED,
    Call.READ: Outcome.UNKNOWN,
}


def verdict(call: Call, code: int) -> Verdict:
    """What `code`, returned by `call`, says about the call's effect; unlisted codes get the worst outcome of the call."""
    if code == 0:
        return _DONE
    known = _TABLE.get((call, code))
    if known is not None:
        return known
    name = _NAMES.get(code, "a code this package does not know")
    return Verdict(outcome=_UNLISTED[call], meaning=name, remedy="read Mooncake's own lines above with MC_LOG_LEVEL=INFO")


def explain(call: Call, code: int) -> str:
    """One sentence for logs and errors: call, code, meaning and what to do."""
    found = verdict(call, code)
    if found.outcome is Outcome.DONE:
        return f"{call.value} succeeded"
    return f"{call.value} returned {code}: {found.meaning}; {found.remedy}"
