"""What the doctor says of this machine."""

from __future__ import annotations

from pathlib import Path

from slipstream.cluster.doctor import _leftovers
from slipstream.cluster.staging import LOCK, PREFIX, staging


def test_weights_of_a_run_that_goes_on_are_no_leftovers(tmp_path: Path) -> None:
    with staging("alive-1", tmp_path):
        assert _leftovers(tmp_path) == []
        dead = tmp_path / f"{PREFIX}dead-2"
        dead.mkdir()
        (dead / LOCK).touch()
        (dead / "bucket").write_bytes(bytes(3 * 2**20))
        (finding,) = _leftovers(tmp_path)
    assert finding.level == "note" and "3 MiB" in finding.what and str(dead) in finding.what and "alive" not in finding.what
    with staging("next-3", tmp_path):
        assert _leftovers(tmp_path) == [] and not dead.exists(), "as the doctor said"
