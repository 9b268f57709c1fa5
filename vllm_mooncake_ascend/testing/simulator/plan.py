"""Plans: what happens in one simulated world. Data only: `themes` draws them from seeds, `world` carries them out.

A plan says which engines there are, which jobs clients send, how bad the network and the reads are, and which accidents
come when. It is a value so that a failing one can be made smaller by leaving parts out.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

TOKENS_PER_BLOCK = 4
FOREVER_S = 1e9
AccidentKind = Literal["kill", "freeze", "stop", "partition", "clog", "revoke", "disconnect"]


@dataclasses.dataclass(frozen=True, slots=True)
class Child:
    """One decode request of a job."""

    decode: int
    """Which engine decodes it."""
    delay_s: float
    """After the moment its leg may start."""
    num_local_blocks: int = 0
    """Blocks of the prompt it finds in its own prefix cache."""
    is_other_prompt: bool = False
    """Its prompt is not the job's: a prompt list, or a template that differs."""
    leaves_at_s: float | None = None
    """When the client goes, after the child's arrival."""
    is_preempted_at_s: float | None = None
    """When vLLM preempts it, after its arrival, if it runs then."""
    is_careless: bool = False
    """Its scheduler allocates without waiting for the connector's answer."""
    drops_match: bool = False
    """Its scheduler drops the connector's match and computes locally (prompt log probabilities)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One client request: a prefill leg and its decode children."""

    at_s: float
    prefill: int
    num_tokens: int
    mode: Literal["sequential", "concurrent"]
    children: tuple[Child, ...]
    transfer_id: str | None
    """What the proxy minted; None: prefill mints one."""
    step_s: float
    """Time of one prefill step of one block."""
    end: Literal["kv", "aborted", "never"] = "kv"
    """How the prefill ends; `never`: the engine never admits it."""
    lingers: bool = False
    """It generates one token more than the first: its KV is whole a step before it ends."""
    admitted_after_s: float = 0.0
    is_preempted_after: int | None = None
    """Prefill steps after which it is preempted, once."""
    same_prompt_as: int | None = None
    """Another job whose prompt it repeats: prefill finds what is still there of its blocks in the prefix cache."""
    proxy_leaves_at_s: float | None = None
    """When the proxy sends a Release of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Accident:
    """Something that befalls an engine, or the link from one engine to another."""

    kind: AccidentKind
    at_s: float
    engine: int
    other: int = 0
    seconds: float = 0.0
    """How long it lasts (kill: until the next start, FOREVER_S: there is none)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hog:
    """Requests of others that hold blocks of an engine for a while."""

    at_s: float
    engine: int
    num_blocks: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """How bad the side channel is."""

    delay_s: float = 0.001
    """Longest delay of an ordinary message."""
    loss: float = 0.0
    losses_left: int = 1_000_000
    """Messages that may be lost in all."""
    duplication: float = 0.0
    reorders: bool = False
    tail: float = 0.0
    """Share of messages that take up to `tail_s`."""
    tail_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class ReadFaults:
    """How bad engine calls are; shares of calls."""

    slow: float = 0.0
    slow_s: float = 9.0
    """How long a slow call takes at most; below the engine's own timeout."""
    refused: float = 0.0
    failed: float = 0.0
    failed_landed: float = 0.0
    """Failed with some of the bytes landed."""
    unknown: float = 0.0
    """Unknown, and the bytes land later."""
    unplannable: float = 0.0
    """Orders that a worker cannot plan."""
    stuck: float = 0.0
    """The worker tells the end of a read only minutes later."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One world."""

    seed: int
    num_engines: int
    """Engine 0 .. n-1; any may be asked for either role (kv_both)."""
    num_ranks: int
    num_blocks: int
    """Of the pool of each engine, the null block included."""
    max_pinned_blocks: int
    lease_ttl_s: float
    lease_max_s: float
    fails_on_load_error: bool
    reports_unknown_at_once: bool
    streaming: tuple[int, ...]
    """Engines that offer, and read, blocks of prefills that still run."""
    is_lazy: bool
    """Idle engines run no hook: what the machines ask of the scheduler thread waits for the next request."""
    jobs: tuple[Job, ...]
    accidents: tuple[Accident, ...] = ()
    network: Network = Network()
    reads: ReadFaults = ReadFaults()
    hogs: tuple[Hog, ...] = ()
    read_wait_s: float = 60.0
    odd_engine: int | None = None
    """An engine whose KV fits nobody's."""
    lying_engine: int | None = None
    """An engine that now and then offers fewer blocks than tokens."""
    num_strangers: int = 0
    """Messages from nobody we know, about anything."""
    is_gentle: bool = False
    """Nothing in it excuses a failed load: every child that may succeed must."""
