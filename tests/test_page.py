"""The HTML page: complete in itself, safe with hostile names, and alive in a real browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from thunder_fusionfix.explain import explain_trace
from thunder_fusionfix.page import hover_texts, page
from thunder_fusionfix.simulate import Prices
from thunder_fusionfix.sources import Source, sources
from thunder_fusionfix.views import explanation_blocks

TRACE = """\
def computation(a):
  # a: "cuda:0 f32[1024, 1024]"
  t1 = torch.exp(a)  # t1: "cuda:0 f32[1024, 1024]"
  [t2] = nvFusion0(t1)
    # t2 = prims.neg(t1)  # t2: "cuda:0 f32[1024, 1024]"
  del t1
  t3 = torch.sum(t2)  # t3: "cuda:0 f32[]"
  return t3
"""
HOSTILE = TRACE.replace("torch.exp(a)", "torch.exp(a, '</script><script>document.title = 1</script>')")


def page_of(*traces: str) -> str:
    found: list[Source] = [source for trace in traces for source in sources(trace)]
    return page(found, explanation_blocks(explain_trace(traces[0])[0]), "two timelines")


def without_plotly(text: str) -> str:
    """The page without the one script that is Plotly's own."""
    from plotly.offline import get_plotlyjs

    assert get_plotlyjs() in text
    return text.replace(get_plotlyjs(), "")


def test_page_holds_everything_and_asks_no_server() -> None:
    """Plotly is in the page once; apart from it there is no address, stylesheet, image or script from elsewhere."""
    ours = without_plotly(page_of(TRACE, TRACE))
    assert not re.search(r"https?://|//cdn|<link|<img|\ssrc=|@import|url\(", ours)


def test_page_data_is_the_trace_and_its_places() -> None:
    """The data behind the clicks gives, for each op of each trace, the lines that the text has there."""
    ours = without_plotly(page_of(TRACE, TRACE))
    (data,) = re.findall(r'<script type="application/json" id="traces">(.*?)</script>', ours, re.DOTALL)
    traces = json.loads(data)
    assert [trace["title"] for trace in traces] == ["computation (<text>:1)"] * 2
    first, last = traces[0]["ops"][1]
    assert traces[0]["lines"][first - 1 : last] == TRACE.splitlines()[3:5]


def test_page_of_a_hostile_trace_has_no_markup_of_the_traces() -> None:
    """What a trace says stands in the page as data: it can end no element and start none."""
    ours = without_plotly(page_of(HOSTILE))
    assert "document.title = 1" in ours and "<script>document" not in ours
    assert ours.count("</script>") == without_plotly(page_of(TRACE)).count("</script>")


def test_hover_names_the_op_and_the_largest_live_tensors() -> None:
    """Each op's hover has its callee, the live bytes there, and what holds them, largest first."""
    (source,) = sources(TRACE)
    prices = Prices(source.graph)
    texts = hover_texts(source, prices, prices.timeline().live_bytes)
    assert len(texts) == len(source.graph.ops)
    head, *tensors = texts[1].split("<br>")
    assert head == "<b>nvFusion0</b> op 1, 12.6 MB"
    assert [line.split() for line in tensors] == [["4.2", name] for name in ("a", "t1", "t2")]


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.mark.skipif(BROWSER is None, reason=f"no headless browser here: none of {', '.join(BROWSERS)} is installed")
def test_page_in_a_real_browser_draws_hovers_and_shows_lines(tmp_path: Path) -> None:
    """Opened offline in Chromium, the page draws both timelines, and the chosen op has its hover and its lines."""
    path = tmp_path / "page.html"
    path.write_text(page_of(TRACE, HOSTILE))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    # no name resolves: whatever the page needed from a server would be missing
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=8000", "--dump-dom"]
    command = [BROWSER or "", *flags, f"file://{path}#op=1:1"]
    dom = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    body = dom[dom.rindex("<body>") :]
    assert len(re.findall(r'class="trace scatter', body)) == 2
    assert "<title>two timelines</title>" in dom  # a script in the trace would have changed it
    (hover,) = re.findall(r'<g class="hovertext".*?data-unformatted="(.*?)"', body, re.DOTALL)
    assert html.unescape(hover).startswith("<b>nvFusion0</b> op 1, 12.6 MB<br>")
    (lines,) = re.findall(r'<pre id="lines">(.*?)</pre>', body, re.DOTALL)
    assert html.unescape(lines).splitlines() == TRACE.splitlines()[3:5]
    (place,) = re.findall(r'id="place">(.*?)</p>', body)
    assert html.unescape(place) == "computation (<text>:1), op 1, lines 4 to 5"
