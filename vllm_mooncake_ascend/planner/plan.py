"""PeerPlan: the planner's front door. Built once per peer, asked once per read.

`build` checks the layouts, pairs planes, finds runs and proves the cover: whatever is wrong between two engines shows here.
After that a read is arithmetic on its block ids, and no id, however wrong, becomes an address outside the registered memory
of either side.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from vllm_mooncake_ascend.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from vllm_mooncake_ascend.layout.plane import RankLayout, Region
from vllm_mooncake_ascend.layout.regions import RegionMap
from vllm_mooncake_ascend.layout.validity import flaws, rank_flaws
from vllm_mooncake_ascend.planner.batch import CopyBatch
from vllm_mooncake_ascend.planner.bounds import CopyBounds
from vllm_mooncake_ascend.planner.cover import cover_faults, region_faults
from vllm_mooncake_ascend.planner.instantiate import Joined, concatenated, join, split_calls
from vllm_mooncake_ascend.planner.pairing import PlanePair, pair
from vllm_mooncake_ascend.planner.permute import Part, Round, find_parts, staged_rounds
from vllm_mooncake_ascend.planner.pieces import GroupGeometry, Pieces, ReadRange, find_pieces
from vllm_mooncake_ascend.planner.template import Runs, find_runs
from vllm_mooncake_ascend.types import Session

_SHOWN_FLAWS = 3


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SourcePlan:
    """What one peer rank serves of one KV cache group."""

    source_index: int
    session: Session
    geometry: GroupGeometry
    pairs: tuple[PlanePair, ...]
    runs: tuple[Runs, ...]
    parts: tuple[Part, ...] | None
    """The same bytes as whole parts of blocks, for the staged copy; None where that is impossible."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """One source's share of one read, before any descriptor is written down."""

    plan: SourcePlan
    pieces: list[Pieces]
    joined: list[Joined]

    @property
    def num_descriptors(self) -> int:
        return sum(len(one) for one in self.joined)

    @property
    def is_better_staged(self) -> bool:
        """Whether whole parts of blocks are fewer than runs. Runs cut only because they are long do not count as many."""
        if self.plan.parts is None:
            return False
        num_uncut_runs = sum(len(runs.lengths_bytes) for runs in self.plan.runs) * sum(len(one) for one in self.pieces)
        num_remote_blocks = len(np.unique(np.concatenate([one.remote.blocks for one in self.pieces])))
        return len(self.plan.parts) * num_remote_blocks < min(self.num_descriptors, num_uncut_runs)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PeerPlan:
    """How one local rank reads from all ranks of one peer. Immutable; safe to share between threads."""

    source_plans: tuple[SourcePlan, ...]
    bounds: CopyBounds

    @classmethod
    def build(cls, local: RankLayout, remote_ranks: Sequence[RankLayout], *, bounds: CopyBounds | None = None) -> PeerPlan:
        """Plan all reads of `local` from a peer.

        Raises:
            RemoteProtocolError: the peer's layout is wrong in itself.
            ConfigError: the two layouts do not fit.
            LocalProtocolError: our own layout is wrong, or the plan does not cover it (our bug).
        """
        _refuse(islice(rank_flaws(local), _SHOWN_FLAWS), "our own KV layout", LocalProtocolError)
        _refuse(islice(flaws(remote_ranks), _SHOWN_FLAWS), "the peer's KV layout", RemoteProtocolError)
        pairs = pair(local, remote_ranks)
        source_plans: list[SourcePlan] = []
        for group_index in sorted({plane.group_index for plane in local.planes}):
            of_group = [one for one in pairs if one.target.group_index == group_index]
            source_plans.extend(_plan_group(group_index, of_group, local, remote_ranks))
        return cls(tuple(source_plans), bounds or CopyBounds())

    @property
    def sources(self) -> tuple[Session, ...]:
        """Sessions of the peer's ranks that this rank reads from, each once."""
        return tuple(dict.fromkeys(plan.session for plan in self.source_plans))

    def calls(
        self,
        first_token: int,
        end_token: int,
        local_block_ids: Sequence[Sequence[int]],
        remote_block_ids: Sequence[Sequence[int]],
    ) -> list[tuple[Session, CopyBatch]]:
        """Engine calls that bring tokens [first_token, end_token); block tables are per KV cache group, from token 0 on, or all
        of them and the tokens from a block's edge on that is one in every group of both sides.

        Raises:
            LocalProtocolError, RemoteProtocolError: see `pieces.find_pieces`.
            ConfigError: only a staged copy would keep to the descriptor budget.
        """
        wanted = ReadRange(
            first_token=first_token,
            end_token=end_token,
            local_block_ids=local_block_ids,
            remote_block_ids=remote_block_ids,
        )
        return [call for one in self.rounds(wanted, staging=None) for call in one.calls]

    def rounds(self, wanted: ReadRange, *, staging: Region | None) -> list[Round]:
        """The same as rounds; with `staging` memory, shares that would pass the descriptor budget go through it."""
        reads = self._reads(wanted)
        num_descriptors = sum(read.num_descriptors for read in reads)
        if num_descriptors <= self.bounds.max_request_descriptors:
            return self._direct_round(reads)
        staged = [read for read in reads if read.is_better_staged]
        if staged and staging is None:
            raise ConfigError(
                f"reading {wanted.end_token - wanted.first_token} tokens takes {num_descriptors} descriptors, the limit is"
                f" {self.bounds.max_request_descriptors}: the KV layouts of the two engines cut blocks too differently, and"
                " copying whole blocks to permute them on the device is not supported yet; use equal tensor parallel sizes"
                " and cache layouts"
            )
        rounds = self._direct_round([read for read in reads if not read.is_better_staged])
        for read in staged:
            assert staging is not None
            assert read.plan.parts is not None
            plan = read.plan
            rounds.extend(staged_rounds(plan.session, read.plan.parts, plan.geometry, read.pieces, staging, self.bounds))
        return rounds

    def _reads(self, wanted: ReadRange) -> list[_Read]:
        pieces_of_group: dict[int, list[Pieces]] = {}
        reads = []
        for plan in self.source_plans:
            group_index = plan.geometry.group_index
            if group_index not in pieces_of_group:
                pieces_of_group[group_index] = find_pieces(plan.geometry, wanted)
            pieces = pieces_of_group[group_index]
            joined = [one for some in pieces for runs in _runs_from(plan, some) for one in join(runs, some, self.bounds)]
            if pieces:
                reads.append(_Read(plan, pieces, joined))
        return reads

    def _direct_round(self, reads: Iterable[_Read]) -> list[Round]:
        """One round with the descriptors of each session together, so that its calls are full."""
        by_session: dict[Session, list[CopyBatch]] = defaultdict(list)
        for read in reads:
            by_session[read.plan.session].extend(one.batch() for one in read.joined)
        calls = [
            (session, call)
            for session, batches in by_session.items()
            for call in split_calls(concatenated(batches), self.bounds)
        ]
        return [Round(tuple(calls), ())] if calls else []


def _runs_from(plan: SourcePlan, pieces: Pieces) -> tuple[Runs, ...]:
    """The template, or for a range that starts inside a piece runs found for the rest of it (rare, so not kept)."""
    if pieces.first_token == 0:
        return plan.runs
    return find_runs(plan.pairs, plan.geometry, first_token=pieces.first_token)


def _plan_group(
    group_index: int, pairs: list[PlanePair], local: RankLayout, remote_ranks: Sequence[RankLayout]
) -> list[SourcePlan]:
    geometry = _geometry(group_index, pairs, local, remote_ranks[0])
    plans = []
    for source_index in sorted({one.source_index for one in pairs}):
        of_source = tuple(one for one in pairs if one.source_index == source_index)
        plans.append(
            SourcePlan(
                source_index=source_index,
                session=Session(remote_ranks[source_index].session),
                geometry=geometry,
                pairs=of_source,
                runs=find_runs(of_source, geometry, first_token=0),
                parts=find_parts(of_source),
            )
        )
    _prove(plans, local, remote_ranks)
    return plans


def _geometry(group_index: int, pairs: Sequence[PlanePair], local: RankLayout, remote: RankLayout) -> GroupGeometry:
    local_group, remote_group = local.groups[group_index], remote.groups[group_index]
    return GroupGeometry(
        group_index=group_index,
        local=local_group,
        remote=remote_group,
        num_local_blocks=min(one.target.num_blocks for one in pairs) // local_group.kernel_blocks_per_block,
        num_remote_blocks=min(one.source.num_blocks for one in pairs) // remote_group.kernel_blocks_per_block,
    )


def _prove(plans: Sequence[SourcePlan], local: RankLayout, remote_ranks: Sequence[RankLayout]) -> None:
    geometry = plans[0].geometry
    planes = [plane for plane in local.planes if plane.group_index == geometry.group_index]
    all_runs = [runs for plan in plans for runs in plan.runs]
    faults = list(cover_faults(planes, all_runs, geometry))
    local_regions = RegionMap.of(local)
    for plan in plans:
        faults.extend(region_faults(plan.runs, geometry, local_regions, RegionMap.of(remote_ranks[plan.source_index])))
    _refuse(faults, f"our plan for KV cache group {geometry.group_index}", LocalProtocolError)


def _refuse(found: Iterable[str], what: str, fault: type[LocalProtocolError] | type[RemoteProtocolError]) -> None:
    reasons = "; ".join(found)
    if reasons:
        raise fault(f"{what} cannot be used: {reasons}")
