"""One HTML page of memory timelines that opens offline: hover shows an op and the largest live tensors, click its lines.

The page holds everything that it needs, Plotly's script (about 4.8 MB) among it, so that it can be attached to an issue or
mailed. Plotly, because a step of a large model has thousands of ops: its zoom finds one of them, and its hover and click tell
which one it is. The only script besides is the one below that shows lines; ``page.html#op=12`` opens with op 12 of the first
trace chosen, ``#op=1:12`` of the second.

A trace is text from strangers: it goes into the page as data, never as markup.
"""

from __future__ import annotations

import html
import json
from bisect import insort
from collections.abc import Iterable, Sequence
from itertools import islice

from thunder_fusionfix.document import MB, Block, Code, Heading, Line, Table, megabytes
from thunder_fusionfix.errors import UsageError
from thunder_fusionfix.explain import live_storages
from thunder_fusionfix.simulate import Prices
from thunder_fusionfix.sources import Source

NUM_LARGEST = 8  # live tensors that a hover lists
DIV_ID = "timeline"
_COLOURS = ("#c2410c", "#1d4ed8")

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 1280px; padding: 0 1rem; color: #1c1917; }
h1 { font-size: 1.25rem; margin: 0 0 .5rem; } h2 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
table { border-collapse: collapse; font-size: .87rem; } td, th { padding: .12rem .9rem .12rem 0; text-align: left; }
td.right, th.right { text-align: right; font-variant-numeric: tabular-nums; } th { color: #78716c; font-weight: 500; }
td, pre { font-family: ui-monospace, monospace; } pre { background: #f5f5f4; padding: .7rem; overflow-x: auto; font-size: .8rem; }
p { margin: .15rem 0; } .good { color: #15803d; } .bad { color: #b91c1c; } .faint { color: #78716c; } mark { background: #fde68a; }
"""

_SCRIPT = """
const traces = JSON.parse(document.getElementById("traces").textContent);
const plot = document.getElementById("timeline");
function choose(number, pos) {
  const trace = traces[number];
  if (!trace || !trace.ops[pos]) return;
  const [first, last] = trace.ops[pos];
  const place = first === last ? `, line ${first}` : `, lines ${first} to ${last}`;
  document.getElementById("place").textContent = `${trace.title}, op ${pos}${trace.isText ? place : ""}`;
  document.getElementById("lines").textContent = trace.lines.slice(first - 1, last).join("\\n");
}
plot.on("plotly_click", event => choose(event.points[0].curveNumber, event.points[0].pointNumber));
const wanted = /^#op=(?:(\\d+):)?(\\d+)$/.exec(location.hash);
if (wanted) {
  const [number, pos] = [Number(wanted[1] || 0), Number(wanted[2])];
  choose(number, pos);
  Plotly.Fx.hover(plot, [{curveNumber: number, pointNumber: pos}]);
}
"""


def page(traces: Sequence[Source], blocks: Iterable[Block], title: str) -> str:
    """The page as text.

    Args:
        traces: one or two traces whose timelines are drawn.
        blocks: the report that stands below them.
        title: of the page.

    Raises:
        UsageError: Plotly is not installed.
    """
    try:
        from plotly import graph_objects  # type: ignore[import-untyped]
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise UsageError("the HTML page needs plotly: pip install plotly") from error
    figure = graph_objects.Figure(layout=_LAYOUT)
    for source, colour in zip(traces, _COLOURS):
        prices = Prices(source.graph)
        timeline = prices.timeline()
        figure.add_scatter(
            x=list(range(len(timeline.live_bytes))),
            y=[nbytes / MB for nbytes in timeline.live_bytes],
            mode="lines+markers" if len(timeline.live_bytes) < 400 else "lines",
            marker={"size": 4},
            line={"shape": "hv", "color": colour, "width": 1.6},
            name=html.escape(source.title),
            hovertext=hover_texts(source, prices, timeline.live_bytes),
            hovertemplate="%{hovertext}<extra></extra>",
        )
        figure.add_annotation(
            x=timeline.peak_pos,
            y=timeline.peak_bytes / MB,
            text=f"{megabytes(timeline.peak_bytes)} MB",
            font={"color": colour},
            arrowcolor=colour,
        )
    if max((len(source.graph.ops) for source in traces), default=0) < 20:
        figure.update_xaxes(dtick=1)  # there is no op 0.5
    drawing = figure.to_html(full_html=False, include_plotlyjs=False, div_id=DIV_ID, config=_CONFIG)
    data = [
        {"title": source.title, "lines": source.lines, "ops": source.op_lines, "isText": source.is_text}
        for source in traces
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n<script>{get_plotlyjs()}</script>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n{drawing}\n"
        '<p class="faint" id="place">click the line to see an op of the trace; drag to zoom, double-click to zoom out</p>\n'
        '<pre id="lines"></pre>\n'
        f"{''.join(map(_block, blocks))}"
        f'<script type="application/json" id="traces">{_as_script_data(data)}</script>\n<script>{_SCRIPT}</script>\n'
        "</body>\n</html>\n"
    )


_CONFIG = {
    "displaylogo": False,
    "responsive": True,
    # named one by one: others would send the data to a server
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
}
_LAYOUT = {
    "template": "plotly_white",
    "height": 460,
    "margin": {"l": 70, "r": 20, "t": 30, "b": 50},
    "xaxis": {"title": {"text": "op, in trace order"}},
    "yaxis": {"title": {"text": "live GPU memory, MB"}, "rangemode": "tozero"},
    "hovermode": "closest",
    "hoverlabel": {"align": "left", "font": {"family": "monospace", "size": 12}, "bgcolor": "white"},
    "legend": {"orientation": "h", "y": 1.08},
    "showlegend": True,
}


def hover_texts(source: Source, prices: Prices, live_bytes: Sequence[int]) -> list[str]:
    """What a hover over each op says, escaped: the op, the live bytes, the largest live tensors."""
    starts: dict[int, list[tuple[int, str]]] = {}
    ends: dict[int, list[tuple[int, str]]] = {}
    for one in live_storages(prices):
        starts.setdefault(one.start, []).append((-one.nbytes, one.name))
        ends.setdefault(one.end, []).append((-one.nbytes, one.name))
    alive: list[tuple[int, str]] = []  # largest first
    texts = []
    for pos, op in enumerate(source.graph.ops):
        for entry in ends.get(pos, ()):
            alive.remove(entry)
        for entry in starts.get(pos, ()):
            insort(alive, entry)
        temporaries = prices.temporaries[pos]
        inside = [
            (-nbytes, f"{name} (inside)") for name, nbytes in (temporaries.at_peak if temporaries is not None else ())
        ]
        largest = sorted([*islice(alive, NUM_LARGEST), *inside])[:NUM_LARGEST]
        lines = [f"<b>{html.escape(op.id)}</b> op {pos}, {megabytes(live_bytes[pos])} MB"]
        lines += [f"{megabytes(-size):>10} {html.escape(_short(name))}" for size, name in largest]
        texts.append("<br>".join(lines))
    return texts


def _short(name: str, width: int = 48) -> str:
    """A name whose end is what tells it apart, as in the parameters of ThunderFX."""
    return name if len(name) <= width else "..." + name[-width:]


def _block(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h2>{html.escape(block.text)}</h2>\n"
    if isinstance(block, Line):
        return f'<p class="{block.tone}">{html.escape(block.text)}</p>\n'
    if isinstance(block, Code):
        lines = [html.escape(line) for line in block.lines]
        if block.marked is not None:
            lines[block.marked] = f"<mark>{lines[block.marked]}</mark>"
        return "<pre>" + "\n".join(lines) + "</pre>\n"
    return _table(block)


def _table(table: Table) -> str:
    classes = [' class="right"' if column in table.right else "" for column in range(len(table.header))]

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}{c}>{html.escape(cell)}</{tag}>" for c, cell in zip(classes, cells)) + "</tr>\n"

    return f"<table>\n{row(table.header, 'th')}{''.join(row(cells, 'td') for cells in table.rows)}</table>\n"


def _as_script_data(data: object) -> str:
    """JSON that cannot end the script element that it stands in."""
    return json.dumps(data, ensure_ascii=True).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
