"""cli.bench.peers: the engines of the peers and what they are told; cli.bench.peers_install. Engines: `bench pd` itself."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from vllm_mooncake_ascend.cli.bench import pd_measures, pd_report, pd_sets, peers, peers_install


def test_the_peer_in_vllm_is_loaded_with_one_call_made_harmless() -> None:
    """Goal: the table says what was changed, and no more is. Method: configs, remark, assignments of the module."""
    subject = peers.in_tree()
    configs = [json.loads(side.transfer_config) for side in (subject.prefill, subject.decode)]
    assert [("MooncakeConnector", peers.IN_TREE_MODULE)] * 2 == [
        (config["kv_connector"], config["kv_connector_module_path"]) for config in configs
    ]
    assert "current_device_index" in subject.remarks[0]
    module = Path(peers.__file__).with_name("peers_in_tree.py").read_text()
    changed = [ast.unparse(node.targets[0]) for node in ast.walk(ast.parse(module)) if isinstance(node, ast.Assign)]
    assert ["__all__", "torch.accelerator.current_device_index"] == changed


def test_the_peer_in_vllm_is_asked_in_both_orders() -> None:
    """Goal: its own proxy's order, and the one that costs less here; decode is told where prefill registers."""
    subject = peers.in_tree()
    assert {"prefill first", "both at once"} == set(subject.flows.values())
    assert subject.bootstrap_url.endswith(f":{subject.prefill.environment['VLLM_MOONCAKE_BOOTSTRAP_PORT']}")
    assert subject.bootstrap_url == subject.handover.decode_params("t", {})["remote_bootstrap_addr"]


def test_nixl_is_found_in_its_own_folder_only(tmp_path: Path) -> None:
    """Goal: the product's environment stays as it is; what the user has on the path stays, too."""
    subject = peers.nixl(tmp_path, "1.5.1", "mine")
    ports = {side.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for side in (subject.prefill, subject.decode)}
    assert 2 == len(ports)
    assert f"{tmp_path}:mine" == subject.decode.environment["PYTHONPATH"]
    assert not subject.is_ours


def test_what_is_installed_is_not_installed_again(tmp_path: Path) -> None:
    """Goal: no network on a second run. Method: a package that no registry has, in a folder said to be whole."""
    (tmp_path / "installed").touch()
    assert tmp_path == peers_install.installed(tmp_path, ("no such package",))


def test_a_package_that_cannot_be_installed_is_told(tmp_path: Path) -> None:
    """Goal: the run goes on without this peer. Method: a name that pip refuses before it asks anybody."""
    with pytest.raises(peers_install.PeerMissing, match="could not be installed"):
        peers_install.installed(tmp_path / "peer", ("no such package",))
    assert not (tmp_path / "peer" / "installed").exists()


def test_a_peers_wrong_answers_are_told_but_no_fault_of_ours() -> None:
    """Goal: no goals for peers; what they do wrong stands in the notes."""
    outcome = pd_sets.Outcome(broken="answered 500")
    assert "in-tree Mooncake: broke off: answered 500" in list(pd_report.notes_of(peers.in_tree(), outcome))
    assert None is pd_measures.all_first_tokens_ratio(1025, peers.IN_TREE).goal
