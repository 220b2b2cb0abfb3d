"""The doctor sees what is wrong and says what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jdynoff import cli, doctor
from jdynoff.doctor import Finding, healthy


def test_a_healthy_machine_passes_and_its_bandwidth_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JDYNOFF_SPILL_DIR", str(tmp_path))
    assert cli.main(["doctor", "--json", "--size-mib", "32"]) == 0
    told = json.loads(capsys.readouterr().out)
    findings = {finding["name"]: finding for finding in told["findings"]}
    assert told["healthy"]
    for name in ("python", "jax", "jdynoff", "backend", "memory", "free space", "direct I/O"):
        assert findings[name]["value"]
    assert str(tmp_path) in findings["spill directory"]["value"]
    assert "came back" in findings["handlers"]["value"]
    assert "MB/s" in findings["disk, plain copy"]["value"]
    assert "MB/s" in findings["disk, through a step"]["value"]
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_broken_and_the_other_checks_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JDYNOFF_SPILL_DIR", str(tmp_path / "missing"))
    assert cli.main(["doctor", "--size-mib", "1"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "broken" in printed
    assert "JDYNOFF_SPILL_DIR" in printed
    assert "handlers" in printed


@pytest.mark.parametrize("failure", [AssertionError(), KeyError("a"), OSError(5, "I/O error")])
def test_whatever_a_check_raises_is_a_finding_with_advice(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*_: int) -> Iterator[Finding]:
        raise failure
        yield

    checks = ("versions", "backend", "memory", "handlers", "disk")
    for name in checks:
        monkeypatch.setattr(doctor, f"_{name}", check)
    findings = doctor.examine(1 << 20)
    assert [finding.name for finding in findings] == list(checks)
    for finding in findings:
        assert finding.state == "broken"
        assert type(failure).__name__ in finding.value
        assert finding.advice


def test_a_platform_that_is_not_there_is_broken_and_the_other_checks_go_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jdynoff", "doctor", "--json", "--size-mib", "1"],
        env={**os.environ, "JAX_PLATFORMS": "nowhere", "JDYNOFF_SPILL_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["backend"]["state"] == "broken"
    assert "JAX_PLATFORMS=cpu" in findings["backend"]["advice"]
    assert findings["jax"]["state"] == "ok"
    assert findings["free space"]["state"] == "ok"


def test_warnings_do_not_make_a_machine_unfit() -> None:
    assert healthy([Finding("a", "b", "warning", "c")])
    assert not healthy([Finding("a", "b", "broken", "c")])


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    assert stopped.value.code == 2
    assert "doctor" in capsys.readouterr().err
