"""What is read of vLLM's requests: real Request objects, no engine."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request, RequestStatus

from vllm_mooncake_ascend.connectors import requests
from vllm_mooncake_ascend.errors import RemoteProtocolError
from vllm_mooncake_ascend.wire.params import RemoteDecode


def make_request(tokens: list[int] | None = None, *, transfer: object = None, **options: object) -> Request:
    extra = {"kv_transfer_params": transfer} if transfer is not None else None
    sampling = SamplingParams(max_tokens=1, extra_args=extra)
    return Request(
        request_id="r1",
        prompt_token_ids=[1, 2, 3] if tokens is None else tokens,
        sampling_params=sampling,
        pooling_params=None,
        **options,
    )


def test_the_digest_is_of_tokens_adapter_and_salt() -> None:
    """Goal: two prompts share a digest exactly if their KV is interchangeable. Method: change one thing at a time."""
    adapter = LoRARequest(lora_name="a", lora_int_id=1, lora_path="nowhere")
    digests = [
        requests.prompt_digest(request)
        for request in (
            make_request(),
            make_request([1, 2, 4]),
            make_request([1, 2]),
            make_request(cache_salt="s"),
            make_request(cache_salt="a"),
            make_request(lora_request=adapter),
        )
    ]

    assert len(digests) == len(set(digests))
    assert requests.prompt_digest(make_request()) == digests[0]


def test_a_request_without_params_asks_nothing() -> None:
    """Goal: ordinary requests pass untouched. Method: no kv_transfer_params."""
    assert requests.wish(make_request(), secret=None, now_s=0.0) is None


def test_a_request_to_prefill_is_understood() -> None:
    """Goal: do_remote_decode reaches us through vLLM's extra args. Method: a real request that carries it."""
    wish = requests.wish(make_request(transfer={"do_remote_decode": True}), secret=None, now_s=0.0)

    assert RemoteDecode(transfer_id=None) == wish


def test_params_that_are_no_object_are_an_error_of_the_client() -> None:
    """Goal: any JSON value may stand there. Method: a list."""
    with pytest.raises(RemoteProtocolError):
        requests.wish(make_request(transfer=[1]), secret=None, now_s=0.0)


def test_a_request_id_too_long_for_a_peer_is_not_sent_to_one() -> None:
    """Goal: clients choose ids, and one that cannot be encoded would look like a silent peer. Method: a long one."""
    request = make_request(transfer={"do_remote_decode": True})
    request.request_id = "x" * 1_000

    with pytest.raises(RemoteProtocolError, match="X-Request-Id"):
        requests.wish(request, secret=None, now_s=0.0)


@pytest.mark.parametrize(
    ("status", "has_kv"),
    [
        (RequestStatus.FINISHED_LENGTH_CAPPED, True),
        (RequestStatus.FINISHED_STOPPED, True),
        (RequestStatus.FINISHED_ABORTED, False),
        (RequestStatus.FINISHED_ERROR, False),
    ],
)
def test_only_length_and_stop_leave_kv(status: RequestStatus, *, has_kv: bool) -> None:
    """Goal: a prefill that ended by a stop has its KV. Method: each final status."""
    request = make_request()
    request.status = status

    assert has_kv == requests.ended_with_kv(request)
