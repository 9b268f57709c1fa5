"""The peers of `bench pd`: connectors that come with vLLM. Decides; starts nothing, installs nothing (`peers_install`).

    MooncakeConnector   of vLLM, over the Mooncake installed here. On a machine without an accelerator it raises at one call;
                        there it is run by way of `peers_in_tree`, which makes that call harmless. vLLM's example proxy asks
                        both engines at once; prefill first is measured too.
    NixlConnector       of vLLM, over NIXL, which the bench installs into a folder of its own.

The bench asks the engines itself, prefill and decode, so no proxy costs a peer anything. Ports are chosen here because these
connectors take them from the environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from vllm_mooncake_ascend.cli import processes
from vllm_mooncake_ascend.cli.bench.pd_asking import Handover
from vllm_mooncake_ascend.cli.bench.pd_subjects import Side, Subject

IN_TREE = "in-tree Mooncake"
IN_TREE_AT_ONCE = f"{IN_TREE}, both at once"
IN_TREE_CONNECTOR = "MooncakeConnector"
IN_TREE_MODULE = "vllm_mooncake_ascend.cli.bench.peers_in_tree"
NIXL = "NIXL"
NIXL_CONNECTOR = "NixlConnector"
HOST = "127.0.0.1"
UCX_TRANSPORTS = "tcp,cma,posix,sysv,self"
"""Of one host without RDMA; others are not asked for, so that what is here decides nothing."""

_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def in_tree() -> Subject:
    """vLLM's own connector for Mooncake, in both orders of asking."""
    ports = {role: processes.free_port(HOST) for role in _ROLES}
    url = f"http://{HOST}:{ports['prefill']}"
    sides = {
        role: Side(
            transfer_config=_config(IN_TREE_CONNECTOR, role, {"mooncake_protocol": "tcp"}, module=IN_TREE_MODULE),
            environment={"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port)},
        )
        for role, port in ports.items()
    }
    return Subject(
        name=IN_TREE,
        prefill=sides["prefill"],
        decode=sides["decode"],
        handover=Handover(
            prefill={"do_remote_decode": True, "do_remote_prefill": False},
            decode={"do_remote_prefill": True, "do_remote_decode": False, "remote_bootstrap_addr": url},
        ),
        flows={IN_TREE: "prefill first", IN_TREE_AT_ONCE: "both at once"},
        bootstrap_url=url,
        remarks=(
            "vLLM's MooncakeConnector. As shipped it does not start on CPU (torch.accelerator.current_device_index() "
            "raises); measured with that one call made harmless, over TCP, asked by the bench without a proxy.",
        ),
    )


def nixl(folder: Path, version: str, search_path: str) -> Subject:
    """vLLM's connector for NIXL.

    Args:
        folder: where NIXL is installed.
        search_path: PYTHONPATH of this process.
    """
    places = f"{folder.resolve()}:{search_path}" if search_path else str(folder.resolve())
    sides = {
        role: Side(
            transfer_config=_config(NIXL_CONNECTOR, role, {}),
            environment={
                "PYTHONPATH": places,
                "UCX_TLS": UCX_TRANSPORTS,
                "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(processes.free_port(HOST)),
            },
        )
        for role in _ROLES
    }
    return Subject(
        name=NIXL,
        prefill=sides["prefill"],
        decode=sides["decode"],
        handover=Handover(prefill={"do_remote_decode": True, "do_remote_prefill": False}),
        flows={NIXL: "prefill first"},
        remarks=(
            f"vLLM's NixlConnector, NIXL {version} with UCX_TLS={UCX_TRANSPORTS}, otherwise "
            "untuned; asked by the bench without a proxy.",
        ),
    )


def _config(connector: str, role: str, extra: Mapping[str, object], *, module: str = "") -> str:
    config: dict[str, object] = {"kv_connector": connector, "kv_role": _ROLES[role]}
    if module:
        config["kv_connector_module_path"] = module
    if extra:
        config["kv_connector_extra_config"] = dict(extra)
    if connector == NIXL_CONNECTOR:
        config["kv_buffer_device"] = "cpu"
    return json.dumps(config)
