"""Plugins of the test servers."""

from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="session")
def with_faults(tmp_path_factory):
    """Returns a function that makes a server's environment, in which a file names the fault (``sglang_sabotage``)."""
    metadata = tmp_path_factory.mktemp("plugins") / "rljax_faults-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rljax-faults\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nfaults = sglang_sabotage:register\n")

    def environment(fault: Path) -> dict[str, str]:
        fault.write_text("off -")
        return {"PYTHONPATH": f"{metadata.parent}:{SUPPORT}", "RLJAX_TEST_FAULT": str(fault)}

    return environment
