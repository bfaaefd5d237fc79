"""`make demo` where nvFuser cannot be installed: the shipped traces tell the same story."""

from __future__ import annotations

import re
from pathlib import Path

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
    assert out.count("Before: The peak of a step, ") == len(demo.SHOWS)
    assert all(f"    {line}\n" in out for line in demo.RECIPE)
    assert "traces that ship with the project, not live ones" in out
    assert all((tmp_path / demo.OUT / item.picture).stat().st_size > 10_000 for item in demo.SHOWS)


def test_demo_and_readme_recommend_the_same():
    """The closing recipe is README's, line by line and in its order."""
    readme = (Path(demo.__file__).parent.parent / "README.md").read_text()
    places = [readme.index(f"\n{line}\n") for line in demo.RECIPE]
    assert places == sorted(places)
