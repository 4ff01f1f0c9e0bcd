"""Draw the pictures of the documentation: python docs/pictures.py.

The first two are drawn from the tables below. The timelines and the histogram are drawn
from traces.json, which this writes from traces of `hpcaccum train`, in one directory:

    mpiexec -n 4 hpcaccum train --strategy agn --straggler 3:20 --trace agn.json
    python docs/pictures.py --traces DIRECTORY

The picture of a loss is drawn from losses.json, which losses.py writes.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
STRATEGIES = ("cross-shard", "sync-replicas", "drop-stale", "agn")
# From Okabe and Ito's palette, distinguishable with color blindness.
COLORS = dict(
    zip(STRATEGIES, ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), strict=True)
)
GROUP, BOX, LINE = "#f3f5f8", "#ffffff", "#39475a"

# Name, left, top, width, height, and lines of text; the first is bold. A name that
# begins with "(" is a frame around boxes.
PACKAGES = """
cli | 300 20 360 44 | cli, __main__ | the command hpcaccum
launch | 300 90 360 44 | launch/ | doctor, run, sbatch
bench | 120 160 300 44 | bench/ | hpcaccum bench
train | 540 160 300 44 | train/ | hpcaccum train
plan | 285 235 225 62 | plan/ | hpcaccum plan | uses accumulator/, server/
hpcaccum | 540 235 400 44 | hpcaccum/__init__.py | the public names
jax | 20 310 150 62 | jax/ | averages inside jit, | optax on a server
torch | 180 310 180 62 | torch/ | torch.optim as | an update rule
tracing | 420 310 200 62 | tracing.py | the file of all spans; | uses mpi/
checkpoint | 720 310 220 62 | checkpoint.py, stopping.py | use device/, nodes/, mpi/ | \
and modules of one file
optimizers | 20 405 640 62 | optimizers/ | update rules and snapshots | \
cross-shard, sync-replicas, drop-stale, AGN, local steps
server | 20 500 300 62 | server/ | admission of single gradients, | updates, parameters
reducer | 420 500 200 62 | reducer/ | allreduce of named | arrays; schedules
accumulator | 20 595 300 62 | accumulator/ | rounds: admission, slots, | takes; on a \
device, too
nodes | 20 690 200 62 | nodes/ | agents: messages and | sums between nodes
rows | 250 690 170 62 | rows/ | gradients that have | some rows only
mpi | 20 785 450 62 | mpi/ | job, talk: groups; memory: windows; life: heartbeat
device | 500 785 160 62 | device/ | CuPy arrays, kernels, | copies, NCCL
modules | 20 865 920 44 | modules of one file | errors, spans, deadline, layout, \
summation, ...: below all packages; arguments, overlap: above device/
"""
IMPORTS = """
cli launch; launch bench; launch train; bench plan; bench hpcaccum; train hpcaccum
bench torch; hpcaccum tracing; hpcaccum checkpoint; jax optimizers; torch optimizers
optimizers server; optimizers reducer; server accumulator
accumulator nodes; accumulator rows; nodes mpi; rows mpi; rows device
reducer mpi; reducer device
"""

GRADIENT = """
(one | 20 20 960 305 | On one node
rank1 | 45 60 190 92 | a rank | optimizers/one_sided.py | server/client.py: push
buffer1 | 400 60 240 92 | its gradient buffer | shared memory of the node | \
accumulator/storage.py
words1 | 400 195 240 92 | words of the node | step, round, records | \
accumulator/protocol.py
server1 | 740 60 215 92 | the server, a thread | server/loop.py | \
optimizers/rules.py
copies1 | 45 195 240 92 | two copies of parameters | shared memory of the node | \
server/double_buffer.py
(far | 20 345 455 440 | Another node
(host | 525 345 455 440 | The host's node
rank2 | 45 385 190 92 | a rank | optimizers/one_sided.py | server/client.py: push
buffer2 | 255 515 200 92 | its gradient buffer | shared memory of the node | \
accumulator/storage.py
agent2 | 260 655 190 92 | the agent of the node | nodes/agent.py | nodes/parts.py: \
sending
copies2 | 45 655 170 92 | two copies | shared memory | double_buffer.py
agent3 | 550 385 195 92 | the agent | accumulator/ | host_calls.py
words3 | 550 515 195 92 | words of the node | step, round, records | \
accumulator/protocol.py
parts3 | 550 655 195 92 | the same agent | nodes/parts.py: | collecting
server3 | 790 655 170 92 | the server | server/loop.py | server/publisher.py
"""
# From, to, where each end is (a side, and how far along it in percent), the label.
WAYS = """
rank1 buffer1     | right 50 left 50    | 1 write
rank1 words1      | right 80 left 20    | 2 admit
words1 server1    | right 50 bottom 20  | 3 take
buffer1 server1   | right 50 left 50    | 3 sum
server1 copies1   | bottom 50 bottom 50 | 4 update, publish
copies1 rank1     | top 39.6 bottom 50    | 5 pull
rank2 buffer2     | right 75 top 50     | 1 write
rank2 agent3      | right 30 left 30    | 2 admit
agent3 words3     | bottom 50 top 50    | 2
words3 server3    | right 50 top 50     | 3 take
buffer2 agent2    | bottom 50 top 50    | 3
agent2 parts3     | right 50 left 50    | 3 sum
parts3 server3    | right 50 left 50    | 3
server3 parts3    | bottom 50 bottom 50 | 4 update, publish
parts3 agent2     | left 80 right 80    | 4 send
agent2 copies2    | left 50 right 50    | 4
copies2 rank2     | top 55.9 bottom 50    | 5 pull
"""
LABELS = {  # Where the middle between two ends is no good place for the label.
    ("rank1", "words1"): (345, 155),
    ("words1", "server1"): (740, 222),
    ("rank2", "buffer2"): (305, 445),
    ("server1", "copies1"): (600, 318),
    ("server3", "parts3"): (761, 778),
    ("parts3", "agent2"): (500, 746),
}


class Picture:
    """An SVG of some size, to which shapes are added in order."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size = width, height
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" font-family="Helvetica, Arial, sans-serif" '
            'font-size="14">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="arrow" markerWidth="9" markerHeight="8" refX="8" '
            'refY="4" orient="auto">'
            f'<path d="M0,0 L9,4 L0,8 z" fill="{LINE}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str, **more: str
    ) -> None:
        """Add a rectangle."""
        extra = "".join(f' {key}="{value}"' for key, value in more.items())
        self.lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" '
            f'fill="{fill}"{extra}/>'
        )

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        """Add a line of text; without a style it is centered."""
        style = style or 'text-anchor="middle"'
        self.lines.append(f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>')

    def path(self, points: list[tuple[float, float]]) -> None:
        """Add an arrow."""
        path = " L".join(f"{x:g},{y:g}" for x, y in points)
        self.lines.append(
            f'<path d="M{path}" fill="none" stroke="{LINE}" stroke-width="1.5" '
            'marker-end="url(#arrow)"/>'
        )

    def legend(self, x: float, y: float, text: str, fill: str, **more: str) -> None:
        """Add a small box and what its color means."""
        self.rect(x, y - 14, 22, 14, fill, **more)
        self.text(x + 30, y - 2, text, 'text-anchor="start"')

    def line(self, x: float, y: float, width: float, text: str) -> None:
        """Add a line across a chart, and its value."""
        self.rect(x, y, width, 1, "#dddddd")
        self.text(x - 8, y + 5, text, 'text-anchor="end"')

    def save(self, name: str) -> None:
        """Write the file."""
        (HERE / name).write_text("\n".join([*self.lines, "</svg>", ""]))


Box = tuple[float, float, float, float]


def draw_boxes(picture: Picture, table: str) -> dict[str, Box]:
    """Draw the boxes of a table; return where they are."""
    boxes = {}
    for line in table.strip().splitlines():
        name, place, *texts = (cell.strip() for cell in line.split(" |"))
        x, y, w, h = boxes[name] = tuple(map(float, place.split()))
        frame = name.startswith("(")
        look = {"rx": "6"} if frame else {"rx": "6", "stroke": LINE}
        picture.rect(x, y, w, h, GROUP if frame else BOX, **look)
        if frame:
            picture.text(x + 25, y + 26, texts[0], 'font-weight="bold" font-size="16"')
            continue
        top = y + h / 2 - 9 * len(texts) + 14
        for number, text in enumerate(texts):
            bold = "" if number else ' font-weight="bold"'
            picture.text(
                x + w / 2, top + 18 * number, text, f'text-anchor="middle"{bold}'
            )
    return boxes


def end(box: Box, side: str, percent: float) -> tuple[float, float]:
    """Return a point on a side of a box."""
    x, y, w, h = box
    if side in ("left", "right"):
        return x + (w if side == "right" else 0), y + h * percent / 100
    return x + w * percent / 100, y + (h if side == "bottom" else 0)


def draw_packages() -> None:
    """Draw who imports whom."""
    picture = Picture(960, 925, "The packages of hpcaccum, and which imports which")
    boxes = draw_boxes(picture, PACKAGES)
    for pair in IMPORTS.replace("\n", ";").split(";"):
        if not pair.strip():
            continue
        (x1, y1, w1, h1), (x2, y2, w2, _) = (boxes[name] for name in pair.split())
        # Vertical if the boxes overlap, else from center to center.
        left, right = max(x1, x2), min(x1 + w1, x2 + w2)
        middle = (left + right) / 2
        ends = (middle, middle) if right - left > 20 else (x1 + w1 / 2, x2 + w2 / 2)
        picture.path([(ends[0], y1 + h1), (ends[1], y2)])
    picture.save("packages.svg")


def draw_gradient() -> None:
    """Draw the path of a gradient."""
    picture = Picture(1000, 805, "The path of a gradient: rank, node, server, and back")
    boxes = draw_boxes(picture, GRADIENT)
    for line in WAYS.strip().splitlines():
        pair, ends, label = (cell.strip() for cell in line.split("|"))
        first, last = pair.split()
        side1, at1, side2, at2 = ends.split()
        a, b = end(boxes[first], side1, float(at1)), end(boxes[last], side2, float(at2))
        points = [a, b]
        if side1 == side2:  # around the outside
            points = [a, (a[0], b[1] + 15), (b[0], b[1] + 15), b]
        elif {side1, side2} == {"right", "top"}:
            points = [a, (b[0], a[1]), b]
        picture.path(points)
        x, y = (a[0] + b[0]) / 2, (a[1] + b[1]) / 2
        flat = abs(a[1] - b[1]) < 9
        x, y = LABELS.get((first, last), (x, y - 8) if flat else (x + 8, y + 5))
        anchor = "middle" if flat or (first, last) in LABELS else "start"
        picture.text(x, y, label, f'text-anchor="{anchor}" fill="#9c3d00"')
    picture.save("gradient.svg")


# Timelines

ROWS = ("rank 0", "rank 1", "rank 2", "rank 3", "server")
SPANS = {  # In the order in which they are drawn.
    "pull": "#b7d3e8",
    "reduce": "#b7d3e8",
    "copy": "#b7d3e8",
    "take": "#b7d3e8",
    "wait": "#d9d9d9",
    "compute": "#0072B2",
    "update": "#E69F00",
}
PUSHED, DROPPED = "#009E73", "#d00000"
LENGTH_MS = 100


def cut(folder: Path) -> None:
    """Write traces.json: of each trace, a short piece, and all lags."""
    found = {}
    for strategy in STRATEGIES:
        events = json.loads((folder / f"{strategy}.json").read_text())["traceEvents"]
        names = {
            e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"
        }
        rows = {k: "server" if "server" in v else v for k, v in names.items()}
        spans = [e for e in events if e["ph"] == "X" and rows[e["tid"]] in ROWS]
        decided = [e for e in spans if e["name"] == "admission"]
        facts = [each["args"] for each in decided]
        lags = {
            word: sorted(
                Counter(f["lag"] for f in facts if f["accepted"] is is_in).items()
            )
            for word, is_in in (("accepted", True), ("dropped", False))
        }
        if not decided:  # An allreduce drops nothing.
            reduced = sum(e["name"] == "reduce" for e in spans)
            lags = {"accepted": [(0, reduced)], "dropped": []}
        # Half of the piece is before an admission of the last rank, if it has any.
        last = [e for e in spans if rows[e["tid"]] == "rank 3"]
        late = [e["ts"] for e in last if e["name"] == "admission"]
        late = late or [e["ts"] for e in last if e["name"] == "compute"]
        start = late[len(late) // 2] - 600 * LENGTH_MS
        piece = [
            [rows[e["tid"]], e["name"], round(e["ts"] - start), round(e["dur"])]
            + ([int(e["args"]["accepted"])] if e["name"] == "admission" else [])
            for e in spans
            if (e["name"] in SPANS or e["name"] == "admission")
            and -e["dur"] < e["ts"] - start < 1000 * LENGTH_MS
            and e["dur"] >= 20
        ]
        found[strategy] = {"lags": lags, "spans": piece}
    lines = ",\n".join(
        f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}"
        for k, v in found.items()
    )
    (HERE / "traces.json").write_text(f"{{\n{lines}\n}}\n")


def draw_timelines(traces: dict) -> None:
    """Draw a piece of the trace of each strategy."""
    left, width, height = 90, 880, 20
    scale = width / (1000 * LENGTH_MS)
    picture = Picture(
        1020, 700, "Timelines of the four strategies, one rank 20 ms late"
    )
    top = 30
    for x, label, color in (
        (90, "computes", SPANS["compute"]),
        (215, "waits", SPANS["wait"]),
        (315, "moves data", SPANS["pull"]),
        (450, "update", SPANS["update"]),
        (560, "gradient dropped", DROPPED),
        (735, "gradient accepted (AGN only)", PUSHED),
    ):
        picture.legend(x, top, label, color)
    for strategy in STRATEGIES:
        top += 34
        picture.text(left, top, strategy, 'font-weight="bold" font-size="16"')
        spans = traces[strategy]["spans"]
        rows = [row for row in ROWS if any(span[0] == row for span in spans)]
        for number, row in enumerate(rows):
            y = top + 8 + number * (height + 4)
            picture.text(left - 8, y + 15, row, 'text-anchor="end"')
            picture.rect(left, y, width, height, "#f6f6f6")
            for name, color in SPANS.items():
                path = ""
                shown = (span for span in spans if span[:2] == [row, name])
                for _, _, start, length, *_ in shown:
                    x1, x2 = max(0, start), min(1000 * LENGTH_MS, start + length)
                    if x2 > x1:
                        x, w = left + x1 * scale, (x2 - x1) * scale
                        path += f"M{x:.1f} {y}h{w:.1f}v{height}h-{w:.1f}z"
                picture.lines.append(f'<path d="{path}" fill="{color}"/>')
            decided = (span for span in spans if span[:2] == [row, "admission"])
            for _, _, start, _, accepted in decided:
                pushed = accepted and strategy == "agn"
                if (pushed or not accepted) and 0 <= start < 1000 * LENGTH_MS:
                    x, color = left + start * scale - 2, PUSHED if pushed else DROPPED
                    picture.rect(x, y - 2, 4, height + 4, color)
        top += 8 + len(rows) * (height + 4)
    for ms in range(0, LENGTH_MS + 1, 20):
        picture.text(left + 1000 * ms * scale, top + 18, f"{ms} ms")
    picture.save("timelines.svg")


def draw_lags(traces: dict) -> None:
    """Draw how many gradients of each strategy had which lag."""
    bins = {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3": (3, 3), "4-7": (4, 7)}
    bins |= {"8-15": (8, 15), "16-30": (16, 30), "31+": (31, 10**9)}
    picture = Picture(1000, 390, "Gradients by lag, for the four strategies")
    left, bottom, wide, tall = 70, 320, 112, 250
    for percent in (0, 25, 50, 75, 100):
        y = bottom - tall * percent / 100
        picture.line(left, y, wide * len(bins), f"{percent} %")
    for number, strategy in enumerate(STRATEGIES):
        lags = traces[strategy]["lags"]
        total = sum(count for found in lags.values() for _, count in found)
        color = COLORS[strategy]
        picture.legend(left + 190 * number, 36, strategy, color)
        for place, (low, high) in enumerate(bins.values()):
            y, x = float(bottom), left + wide * place + 10 + 23 * number
            for word in ("accepted", "dropped"):
                count = sum(c for lag, c in lags[word] if low <= lag <= high)
                h = tall * count / total
                look = {"stroke": color} if word == "dropped" else {}
                y -= h
                if count:
                    picture.rect(
                        x, y, 20, max(h, 1), "white" if look else color, **look
                    )
    picture.legend(left + 760, 36, "dropped", "white", stroke="#555555")
    for place, name in enumerate(bins):
        picture.text(left + wide * (place + 0.5), bottom + 20, name)
    picture.text(
        500, bottom + 48, "lag: updates admitted since the parameters of the gradient"
    )
    picture.save("lags.svg")


# The loss of a rank


def draw_losses(columns: dict[str, list[int]]) -> None:
    """Draw the updates over time of runs that lose a rank."""
    title = "Updates per second, before and after a rank is killed"
    left, width, tall, killed = 90, 880, 110, "#d00000"
    picture = Picture(1000, 495, title)
    for number, (name, counts) in enumerate(columns.items()):
        bottom = 150 + 155 * number
        wide = width / len(counts)
        # Columns of 100 ms.
        most = 10 * max(counts)
        picture.text(left, bottom - tall - 12, name, 'font-weight="bold"')
        for rate in (0, most // 2, most):
            picture.line(left, bottom - tall * rate / most, width, f"{rate}/s")
        for place, count in enumerate(counts):
            h = 10 * tall * count / most
            x = left + wide * place
            picture.rect(x + 1, bottom - h, wide - 2, h, COLORS["cross-shard"])
        picture.rect(left + width / 3 - 1, bottom - tall - 8, 2, tall + 8, killed)
        style = f'fill="{killed}"'
        picture.text(left + width / 3 + 8, bottom - tall - 2, "rank 3 is killed", style)
    style = 'text-anchor="end"'
    picture.text(left + width, 28, "updates per second", style)
    for second in (-1, 0, 1, 2):
        x = left + width * (second + 1) / 3
        picture.text(x, bottom + 22, f"{second} s")
    picture.save("losses.svg")


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, help="directory with new traces")
    options = parser.parse_args()
    if options.traces:
        cut(options.traces)
    draw_packages()
    draw_gradient()
    traces = json.loads((HERE / "traces.json").read_text())
    draw_timelines(traces)
    draw_lags(traces)
    draw_losses(json.loads((HERE / "losses.json").read_text()))


if __name__ == "__main__":
    main()
