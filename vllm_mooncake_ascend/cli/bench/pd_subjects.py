"""The subjects of `bench pd`: which engines make a set, and in which ways it is asked. Decides, starts nothing.

All engines of a set have the same options, and every set has the same places: on a host of few cores decode is kept to the
upper half of them, as `launch` does it. A plain engine stands beside every set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from vllm_mooncake_ascend.cli import servers
from vllm_mooncake_ascend.cli.bench import pd_measures
from vllm_mooncake_ascend.cli.bench.pd_asking import MODEL_NAME, Flow, Handover
from vllm_mooncake_ascend.cli.processes import Placement

BLOCK_SIZE = 128
MAX_BATCHED_TOKENS = 512
KV_CACHE_GIB = 1
ROOM_TOKENS = 64
"""Of an engine's context, beside the prompt."""
MIN_CONTEXT = 4096
"""For the requests that run on decode."""
SIDES = ("prefill", "decode")


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two engines."""

    transfer_config: str
    """JSON, for vLLM's `--kv-transfer-config`."""
    environment: dict[str, str] = {}


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A set of engines, and how it is asked."""

    name: str
    prefill: Side
    decode: Side
    handover: Handover
    flows: Mapping[str, Flow]
    """By the name that its figures get. With a proxy: one URL."""
    proxy_flow: str = ""
    """Of our proxy; empty: none, the bench asks both engines."""
    bootstrap_url: str = ""
    """Where a prefill engine tells its id, for peers whose decode must be told it."""
    remarks: tuple[str, ...] = ()
    """What a reader must know of it."""

    @property
    def is_ours(self) -> bool:
        return bool(self.proxy_flow)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Of the engines of every set."""

    model: Path
    dtype: str
    max_tokens: int
    """Of the longest prompt."""

    @property
    def arguments(self) -> tuple[str, ...]:
        context = max(self.max_tokens + ROOM_TOKENS, MIN_CONTEXT)
        return (
            *("--served-model-name", MODEL_NAME, "--dtype", self.dtype, "--enforce-eager", "--block-size", str(BLOCK_SIZE)),
            *("--max-model-len", str(context), "--max-num-batched-tokens", str(MAX_BATCHED_TOKENS), "--max-num-seqs", "8"),
        )


def after_prefill() -> Subject:
    """Ours as it is by default: decode is asked when prefill has answered."""
    return _ours(pd_measures.AFTER_PREFILL, "after_prefill", "sequential")


def stream() -> Subject:
    """Ours, decode reads while prefill computes."""
    return _ours(pd_measures.STREAM, "stream", "concurrent")


def _ours(name: str, transfer_mode: str, proxy_flow: str) -> Subject:
    extra = {"transfer_mode": transfer_mode}
    return Subject(
        name=name,
        prefill=Side(transfer_config=servers.transfer_config("prefill", extra)),
        decode=Side(transfer_config=servers.transfer_config("decode", extra)),
        handover=Handover(prefill={"do_remote_decode": True}),
        flows={name: "one url"},
        proxy_flow=proxy_flow,
    )


def engine_specs(subject: Subject, options: Options, *, cpus: frozenset[int]) -> list[servers.ServerSpec]:
    """Prefill, decode, and the plain engine beside them."""
    placed = servers.placements(cpus, len(SIDES))
    sides = {"prefill": subject.prefill, "decode": subject.decode}
    specs = [_engine(role, side, options, placed.get(role)) for role, side in sides.items()]
    return [*specs, _engine(pd_measures.COLOCATED, None, options, None)]


def _engine(name: str, side: Side | None, options: Options, placement: Placement | None) -> servers.ServerSpec:
    connector = () if side is None else ("--kv-transfer-config", side.transfer_config)
    # The role is none of ours, so that the connector is the one given here.
    return servers.engine(
        name,
        f"{name} side",
        str(options.model),
        arguments=(*options.arguments, *connector),
        environment={
            **servers.cpu_environment(os.environ, kv_cache_gib=KV_CACHE_GIB),
            **(side.environment if side is not None else {}),
        },
        placement=placement,
    )


def vocabulary(model: Path) -> range:
    """Token ids to draw prompts from: real ones, and none of the special ones that stand at the ends."""
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    return range(size // 8, size // 2)
