"""`make demo` where nvFuser cannot be installed: the shipped traces tell the same story."""

from __future__ import annotations

import re

from thunder_fusionfix import demo


def test_demo_without_nvfuser_shows_the_shipped_traces(monkeypatch, tmp_path, capsys):
    """Both programs are shown with a lower peak after the passes, pictures are written, and it is said what they are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "has_nvfuser", lambda: False)
    assert demo.main() == 0
    out = capsys.readouterr().out
    peaks = re.findall(r"^ +peak, MB +([\d,.]+) +([\d,.]+)$", out, flags=re.MULTILINE)
    assert len(peaks) == len(demo.SHOWS)
    assert all(float(after.replace(",", "")) < float(before.replace(",", "")) for before, after in peaks)
    assert out.count("is in the backward of") == len(demo.SHOWS)
    assert "traces that ship with the project, not live ones" in out
    assert all((tmp_path / demo.OUT / item.picture).stat().st_size > 10_000 for item in demo.SHOWS)
