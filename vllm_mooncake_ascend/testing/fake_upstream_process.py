"""The doubles of vLLM's HTTP surface as a process of their own: a prefill instance and a decode instance, for loads.

    python -m vllm_mooncake_ascend.testing.fake_upstream_process --num-events 16

It prints one line of JSON, `{"prefill": URL, "decode": URL}`, and ends when its stdin does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from aiohttp import web

from vllm_mooncake_ascend.proxy.exchange import Leg
from vllm_mooncake_ascend.testing.fake_upstream import FakeVllm, Seen


class BusyVllm(FakeVllm):
    """Remembers nothing of what it was asked, and serves routers that mint no transfer id.

    Args:
        num_events: tokens of a streamed answer, an event each.
    """

    def __init__(self, role: Leg, *, num_events: int) -> None:
        super().__init__(role)
        tokens = [json.dumps({"choices": [{"index": 0, "text": f" word {number}"}]}) for number in range(num_events)]
        self._answer_events = [f"data: {line}\n\n".encode() for line in (*tokens, "[DONE]")]

    async def _remember(self, request: web.Request) -> Seen:
        seen = await super()._remember(request)
        self.seen.clear()
        return seen

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        params = body.get("kv_transfer_params") or {}
        return super()._completion({"kv_transfer_params": {"transfer_id": params.get("transfer_id") or "minted"}})

    def _events(self, body: dict[str, Any]) -> list[bytes]:  # noqa: ARG002
        return self._answer_events


async def serve(num_events: int) -> None:
    """Until stdin ends."""
    async with BusyVllm("prefill", num_events=num_events) as prefill, BusyVllm("decode", num_events=num_events) as decode:
        sys.stdout.write(json.dumps({"prefill": prefill.url, "decode": decode.url}) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-events", type=int, required=True)
    asyncio.run(serve(parser.parse_args().num_events))


if __name__ == "__main__":
    main()
