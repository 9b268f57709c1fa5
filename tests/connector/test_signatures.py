"""Our connector against vLLM's base class: a change of the contract fails here first, and by name."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from vllm_mooncake_ascend.connectors.p2p import MooncakeConnectorV1

OURS = {name for one in MooncakeConnectorV1.__mro__ if one.__module__.startswith("vllm_mooncake_ascend") for name in vars(one)}

LEFT_TO_VLLM = {
    # Questions whose default answer is right for a connector that moves whole requests peer to peer.
    "clear_connector_metadata",
    "finish_forward",
    "get_finished_count",
    "get_kv_connector_kv_cache_events",
    "get_loaded_kv_cache_group_ids",
    "get_mem_pool_context",
    "get_required_kvcache_layout",
    "handle_preemptions",
    "has_connector_metadata",
    "prefer_cross_layer_blocks",
    "register_cross_layers_kv_cache",
    "register_finished_partial_tail",
    "requires_kv_delivery",
    "requires_piecewise_for_cudagraph",
    "reset_capture_state",
    "role",
    "set_host_xfer_buffer_ops",
    "supports_divergent_local_hybrid_hits",
    # 0.33
    "restore_kv_caches",
    "unregister_kv_caches",
}


def public_hooks(of_class: type) -> set[str]:
    return {name for name in dir(of_class) if not name.startswith("_")}


def test_every_hook_of_this_vllm_is_answered_or_left_on_purpose() -> None:
    """Goal: a new hook is looked at before it is ignored. Method: the base class's public names."""
    ours = {name for name in public_hooks(KVConnectorBase_V1) if name in OURS}

    unknown = public_hooks(KVConnectorBase_V1) - ours - LEFT_TO_VLLM

    assert set() == unknown


def test_no_abstract_hook_is_missing() -> None:
    """Goal: the class can be built. Method: Python's own record of abstract methods."""
    assert frozenset() == MooncakeConnectorV1.__abstractmethods__


@pytest.mark.parametrize("base", [KVConnectorBase_V1, SupportsHMA])
def test_hooks_take_what_vllm_passes(base: type) -> None:
    """Goal: every call vLLM may make by the base's signature binds to ours. Method: bind by position and by name."""
    for name in public_hooks(base) & OURS:
        declared, own = getattr(base, name), getattr(MooncakeConnectorV1, name)
        if not callable(declared):
            continue
        names = [
            parameter.name
            for parameter in inspect.signature(declared).parameters.values()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        signature = inspect.signature(own)
        signature.bind(*[object()] * len(names))
        if not inspect.ismethod(declared):
            signature.bind(object(), **{each: object() for each in names[1:]})


def test_the_constructor_takes_the_cache_config_by_name() -> None:
    """Goal: vLLM refuses external connectors that do not. Method: its own question."""
    from vllm.utils.func_utils import supports_kw

    assert supports_kw(MooncakeConnectorV1, "kv_cache_config")


def test_sleep_mode_is_refused() -> None:
    """Goal: vLLM 0.33 asks before it unmaps memory that peers may read. Method: the class's answer."""
    assert not MooncakeConnectorV1.supports_sleep_mode()


def test_hybrid_memory_allocation_stays_on() -> None:
    """Goal: the marker class is there, or vLLM would turn its hybrid allocator off. Method: isinstance on the class."""
    assert issubclass(MooncakeConnectorV1, SupportsHMA)
