"""The doctor sees what is wrong and says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jdynoff import cli
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


def test_warnings_do_not_make_a_machine_unfit() -> None:
    assert healthy([Finding("a", "b", "warning", "c")])
    assert not healthy([Finding("a", "b", "broken", "c")])


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    assert stopped.value.code == 2
    assert "doctor" in capsys.readouterr().err
