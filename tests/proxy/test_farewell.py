"""Releases on a real side channel, against the real producer machine."""

from __future__ import annotations

import asyncio

import pytest

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import PeerLost, RemoteProtocolError
from vllm_mooncake_ascend.proxy import farewell
from vllm_mooncake_ascend.proxy.farewell import Farewells
from vllm_mooncake_ascend.runtime.curve import curve_keys
from vllm_mooncake_ascend.testing.side_channel_peer import SideChannelPeer
from vllm_mooncake_ascend.types import Incarnation, RequestId, TransferId
from vllm_mooncake_ascend.wire import messages

SECRET = b"a secret of the cluster, long enough"


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_a_release_frees_the_blocks_of_its_transfer(secret: bytes | None) -> None:
    """Goal: prefill lets go at once, with and without a cluster secret. Method: leases before and after."""
    async with SideChannelPeer(keys=curve_keys(secret)) as engine:
        sender = Farewells(secret)
        params = engine.end_prefill("t1")
        engine.end_prefill("t2")
        before = engine.machine.num_leases
        await sender.release(params)
        await sender.close()

        assert (2, 1) == (before, engine.machine.num_leases)


async def test_a_release_does_not_disturb_a_reader() -> None:
    """Goal: a decode engine that has subscribed reads on. Method: a reader is known; the blocks stay."""
    async with SideChannelPeer() as engine:
        sender = Farewells(None)
        params = engine.end_prefill("t1")
        subscribe = messages.Subscribe(
            incarnation=Incarnation("decode"),
            expected=engine.incarnation,
            transfer_id=TransferId("t1"),
            request_id=RequestId("r"),
        )
        engine.hear(b"reader", subscribe)
        await sender.release(params)
        await sender.close()

        assert 4 == engine.machine.num_pinned_blocks


async def test_a_release_said_twice_is_answered_twice() -> None:
    """Goal: idempotent. Method: the second finds nothing and ends well."""
    async with SideChannelPeer() as engine:
        sender = Farewells(None)
        params = engine.end_prefill("t1")
        await sender.release(params)
        await sender.release(params)
        await sender.close()

        assert 0 == engine.machine.num_pinned_blocks


async def test_many_releases_share_a_socket() -> None:
    """Goal: two thousand leavers do not exhaust the sockets. Method: all at once; one link, and none at the end."""
    async with SideChannelPeer() as engine:
        sender = Farewells(None)
        all_params = [engine.end_prefill(f"t{number}", num_blocks=1) for number in range(300)]
        await asyncio.gather(*map(sender.release, all_params))
        await sender.close()

        assert 0 == engine.machine.num_pinned_blocks
        assert {} == sender.links


async def test_a_restarted_engine_has_nothing_to_release() -> None:
    """Goal: another incarnation on the port is recognised. Method: params of the old one; it ends without waiting."""
    async with SideChannelPeer("new") as engine:
        sender = Farewells(None)
        params = {**engine.end_prefill("t1"), "remote_incarnation": "old"}
        await sender.release(params)
        await sender.close()

        assert (1, 4) == (engine.num_heard, engine.machine.num_pinned_blocks)


async def test_an_unanswered_release_is_repeated_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: bounded. Method: an engine that answers nothing, waits made short."""
    monkeypatch.setattr(limits, "RESEND_S", 0.02)
    async with SideChannelPeer() as engine:
        engine.is_mute = True
        sender = Farewells(None)
        with pytest.raises(PeerLost, match="unanswered"):
            await sender.release(engine.end_prefill("t1"))
        await sender.close()

        assert farewell.SENDS == engine.num_heard


async def test_closing_ends_those_who_wait() -> None:
    """Goal: a stop does not hang on a dead producer. Method: close while a release waits for its answer."""
    async with SideChannelPeer() as engine:
        engine.is_mute = True
        sender = Farewells(None)
        release = asyncio.create_task(sender.release(engine.end_prefill("t1")))
        await engine.heard.wait()
        await sender.close()

        with pytest.raises(PeerLost, match="closed"):
            await release


@pytest.mark.parametrize("params", [{}, {"do_remote_prefill": True}, {"do_remote_decode": True}])
async def test_params_that_name_no_transfer_are_told(params: dict[str, object]) -> None:
    """Goal: another connector's params fail as an error that is counted. Method: three that are not ours."""
    sender = Farewells(None)
    with pytest.raises(RemoteProtocolError):
        await sender.release(params)
    await sender.close()
