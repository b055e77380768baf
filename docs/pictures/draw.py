"""Draw the pictures of README.md and docs/: `make pictures`.

The same data give the same bytes: the table of docs/gradients.md, and call_costs.json, which
`make call-costs` writes. A picture brings its own background, light or dark as the reader's system.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).parent

STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1f2328}
.small{font-size:11px}.soft{fill:#59636e}.bold{font-weight:600}.code{font-family:ui-monospace,Menlo,Consolas,monospace}
.end{text-anchor:end}.mid{text-anchor:middle}
.ground{fill:#ffffff}.box{fill:#f6f8fa;stroke:#d1d9e0}.yours{fill:#ddf4ff;stroke:#54aeff}
.line{stroke:#59636e;stroke-width:1.5;fill:none}.head{fill:#59636e}.grid{stroke:#ffffff;stroke-width:1;fill:none}
.right{fill:#2b83ba}.error{fill:#fdae61}.refused{fill:#d1d5da}.wrong{fill:#b2182b}.zero{fill:#67001f}
.ours{fill:#2b83ba}.theirs{fill:#fdae61}.bare{fill:#8c959f}
@media(prefers-color-scheme:dark){
text{fill:#e6edf3}.soft{fill:#9198a1}.ground{fill:#0d1117}.box{fill:#151b23;stroke:#3d444d}
.yours{fill:#0c2d4a;stroke:#1f6feb}.line{stroke:#9198a1}.head{fill:#9198a1}.grid{stroke:#0d1117}
.refused{fill:#3d444d}.wrong{fill:#f0566b}.zero{fill:#ff2d55}}
"""


class Picture:
    """An SVG that grows by shapes."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.title = title
        self.size = width, height
        self.parts: list[str] = []
        self.rect(0, 0, width, height, "ground", radius=8)

    def rect(self, x: float, y: float, width: float, height: float, kind: str, radius: int = 0) -> None:
        corner = f' rx="{radius}"' if radius else ""
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{corner}/>')

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def path(self, d: str, kind: str) -> None:
        self.parts.append(f'<path class="{kind}" d="{d}"/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A line with a head, to the right or downwards."""
        self.path(f"M{x:g} {y:g}L{to_x:g} {to_y:g}", "line")
        across = y == to_y
        dx, dy = (-7, 4) if across else (4, -7)
        other = (dx, -dy) if across else (-dx, dy)
        self.path(f"M{to_x:g} {to_y:g}l{dx} {dy}L{to_x + other[0]:g} {to_y + other[1]:g}z", "head")

    def box(self, x: float, y: float, width: float, height: float, lines: Sequence[str], kind: str = "box") -> None:
        """A box with a title and smaller lines below it, all centred."""
        self.rect(x, y, width, height, kind, radius=6)
        top = y + height / 2 - 8 * (len(lines) - 1) + 4
        for i, line in enumerate(lines):
            self.text(x + width / 2, top + 16 * i, line, "mid bold" if i == 0 else "mid small soft")

    def svg(self) -> str:
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' role="img">\n<title>{escape(self.title)}</title>\n<style>{STYLE}</style>'
        )
        return "\n".join([head, *self.parts, "</svg>\n"])


# The heat map of gradients --------------------------------------------------------------------------------------

#: The symbols of docs/gradients.md, in the order of the legend.
KINDS = {".": "right", "!": "error", "-": "refused", "0": "zero", "x": "wrong"}
MEANING = {
    ".": "right",
    "!": "raises an error",
    "-": "the op or its formula cannot be registered",
    "0": "zeros, silently",
    "x": "another wrong value, silently",
}
#: Width and height of a cell.
CELL, ROW = 10, 12


def read_table(page: str) -> tuple[dict[str, list[str]], dict[str, list[int]]]:
    """The rows of docs/gradients.md, a string of symbols for each library; and the counts below them."""
    block = next(block for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL) if "torch.library" in block)
    rows, counts, _ = block.split("\n\n", 2)
    _, letters, *lines = rows.splitlines()
    ours, theirs = (match.start() for match in re.finditer(r"\S+", letters))
    width = len(letters[theirs:])
    table = {line[:ours].strip(): [line[at : at + width] for at in (ours, theirs)] for line in lines}
    totals = {line[0]: [int(word) for word in line.split()[1:3]] for line in counts.splitlines()}
    return table, totals


def runs(row: str) -> Iterator[tuple[str, int, int]]:
    """The symbols of a row, where each run of one begins, and how long it is."""
    for symbol, group in groupby(enumerate(row), key=lambda pair: pair[1]):
        places = [place for place, _ in group]
        yield symbol, places[0], len(places)


def gradients() -> Picture:
    page = (HERE.parent / "gradients.md").read_text(encoding="utf-8")
    table, totals = read_table(page)
    columns = len(next(iter(table.values()))[0])
    left, top, gap, wide, high = 150, 56, 24, columns * CELL, len(table) * ROW
    picture = Picture(left + 2 * wide + gap + 16, top + high + 92, "Gradients: customops and torch.library")
    picture.text(
        left, 22, "Every way to differentiate (rows) and every shape of op (columns), compared with plain torch"
    )
    for side, name in enumerate(("customops", "torch.library.custom_op")):
        x = left + side * (wide + gap)
        picture.text(x, 46, name, "bold")
        picture.text(x + wide, 46, f"{totals['.'][side]} of {columns * len(table)} right", "end soft")
        for i, halves in enumerate(table.values()):
            for symbol, begin, length in runs(halves[side]):
                picture.rect(x + begin * CELL, top + i * ROW, length * CELL, ROW, KINDS[symbol])
        across = "".join(f"M{x} {top + i * ROW}h{wide}" for i in range(len(table) + 1))
        down = "".join(f"M{x + i * CELL} {top}v{high}" for i in range(columns + 1))
        picture.path(across + down, "grid")
    for i, name in enumerate(table):
        picture.text(left - 8, top + i * ROW + 10, name, "small end")
    _legend(picture, left, top + high + 26, totals)
    return picture


def _legend(picture: Picture, x: int, y: int, totals: dict[str, list[int]]) -> None:
    for i, (symbol, kind) in enumerate(KINDS.items()):
        at_x, at_y = x + (i % 2) * 360, y + (i // 2) * 22
        picture.rect(at_x, at_y - 10, 12, 12, kind)
        ours, theirs = totals[symbol]
        picture.text(at_x + 20, at_y, f"{MEANING[symbol]}: {ours} and {theirs}", "small")


# What a call costs ----------------------------------------------------------------------------------------------

#: The cases of call_costs.json that are drawn -> their labels in the picture.
COSTS = {
    "no gradient": "no gradient",
    "forward": "requires grad, forward",
    "forward and backward": "forward and backward",
    "mutates, returns None": "writes an argument",
    "lists of tensors": "lists of tensors",
    "defaults, by keyword": "defaults, by keyword",
}
CONTENDERS = {"Library": ("bare", "bare Library, no checks"), "customops": ("ours", "customops, all checks on")} | {
    "custom_op": ("theirs", "torch.library.custom_op")
}


def call_costs() -> Picture:
    figures: dict[str, Any] = json.loads((HERE / "call_costs.json").read_text(encoding="utf-8"))
    cases = figures["cases"]
    most = max(cases[case][who]["us"] for case in COSTS for who in CONTENDERS if who in cases[case])
    left, scale, top = 168, 440 / most, 62
    picture = Picture(720, top + 62 * len(COSTS) + 6, "What a call of an op costs")
    where = f"torch {figures['torch']}, tensors of 4 elements, one thread"
    picture.text(16, 24, f"Processor time of a call in µs: {where}", "bold")
    x = 16.0
    for kind, label in CONTENDERS.values():
        picture.rect(x, 38, 12, 12, kind)
        picture.text(x + 18, 48, label, "small")
        x += 200
    for i, (case, label) in enumerate(COSTS.items()):
        y = top + 62 * i
        picture.text(left - 10, y + 32, label, "end")
        bars = [(who, cases[case][who]) for who in CONTENDERS if who in cases[case]]
        for j, (who, numbers) in enumerate(bars):
            at, length = y + 6 + 17 * j + (8 if len(bars) == 2 else 0), scale * numbers["us"]
            picture.rect(left, at, length, 14, CONTENDERS[who][0], radius=2)
            picture.text(left + length + 6, at + 11, _cost(numbers), "small")
    return picture


def _cost(numbers: dict[str, float]) -> str:
    """The time, and how it compares with that of customops."""
    times = 1 / numbers["ratio"]
    return f"{numbers['us']:.1f}" + ("" if times == 1 else f"  ({times:.1f} times)")


# Figures --------------------------------------------------------------------------------------------------------


def from_hints_to_op() -> Picture:
    picture = Picture(760, 250, "From type hints to an operator")
    picture.box(16, 20, 220, 56, ["typed function", "hints, defaults, mutates_args"], "yours")
    picture.box(270, 20, 220, 56, ["Schema", "(Tensor x, float by=2.0) -> Tensor"])
    picture.box(524, 20, 220, 56, ["operator in the dispatcher", "torch.ops.mylib.f"])
    picture.arrow(236, 48, 268, 48)
    picture.arrow(490, 48, 522, 48)
    picture.arrow(634, 76, 634, 104)
    picture.box(524, 106, 220, 56, ["CustomOpDef", "the object that you call"])
    picture.text(16, 128, "Rules that you register on it:", "bold")
    names = ["kernel", "fake", "autograd", "jvp", "vmap", "autocast", "samples"]
    for i, name in enumerate(names):
        picture.box(16 + i * 104, 190, 96, 38, [name], "yours")
        picture.path(f"M{64 + i * 104} 190V176H634", "line")
    picture.path("M634 176V162", "line")
    return picture


def from_reference_to_rules() -> Picture:
    picture = Picture(760, 222, "From a reference to the rules of an op")
    picture.box(16, 20, 220, 56, ["kernel", "CUDA, C++, Triton, NumPy, ..."], "yours")
    picture.box(270, 20, 220, 56, ["reference", "the same, in plain PyTorch"], "yours")
    picture.box(524, 20, 220, 56, ["check", "compares both"])
    picture.path("M236 34H250V6H634", "line")
    picture.arrow(634, 6, 634, 18)
    picture.arrow(490, 48, 522, 48)
    rules = [
        ("fake impl", "compile, export"),
        ("gradients", "both modes, any order"),
        ("vmap", "batches"),
        ("FLOPs", "flop_counter"),
    ]
    picture.text(16, 128, "What follows, unless you register it by hand:", "bold")
    for i, (name, what) in enumerate(rules):
        picture.box(16 + i * 186, 154, 170, 52, [name, what])
        picture.path(f"M{101 + i * 186} 154V140H380", "line")
    picture.path("M380 140V76", "line")
    return picture


#: The dispatch keys of a call, from the first: key, what is done there, and the rule of yours that it runs.
KEYS = [
    ("FuncTorchBatched", "torch.vmap: one batched call, or one an element", "register_vmap"),
    ("AutocastCPU, CUDA, …", "casts the inputs under torch.autocast", "register_autocast"),
    ("Autograd", "makes a node of the autograd graph", "register_autograd, register_jvp"),
    ("ADInplaceOrView", "version counters and views, of ops that write", "mutates_args, tags"),
    ("Python", "modes and subclasses: tracing, FakeTensorMode", "register_torch_dispatch"),
    ("BackendSelect", "factories: the device of an argument", "device_types"),
    ("CPU, CUDA, …", "runs the kernel and checks its results", "register_kernel"),
    ("Meta", "instead of the kernel, for tensors without data", "register_fake"),
]


def dispatch_keys() -> Picture:
    picture = Picture(760, 62 + 52 * len(KEYS), "The dispatch keys of a call")
    for x, label in ((16, "dispatch key, first to last"), (246, "what happens there"), (568, "what you register")):
        picture.text(x, 26, label, "bold")
    for i, (key, done, rule) in enumerate(KEYS):
        y = 40 + 52 * i
        picture.rect(16, y, 208, 38, "box", radius=6)
        picture.text(120, y + 24, key, "mid bold")
        picture.text(246, y + 24, done, "small")
        picture.rect(556, y, 190, 38, "yours", radius=6)
        picture.text(651, y + 24, rule, "mid small code" if "," not in rule else "mid small")
        if i + 2 < len(KEYS):
            picture.arrow(120, y + 38, 120, y + 51)
    return picture


def backward() -> Picture:
    picture = Picture(760, 250, "Forward and backward of an op")
    rows = [
        (
            "op(x)",
            [
                (["Autograd key", "are gradients needed?"], "box"),
                (["kernel", "without autograd"], "yours"),
                (["setup_context", "ctx.save_for_backward"], "yours"),
                (["autograd node", "of the output"], "box"),
            ],
        ),
        (
            "y.backward()",
            [
                (["autograd node", "unpacks what was saved"], "box"),
                (["checks", "versions, lost gradients"], "box"),
                (["backward", "a gradient per argument"], "yours"),
                (["checks", "number, shape, dtype"], "box"),
            ],
        ),
    ]
    for i, (label, boxes) in enumerate(rows):
        y = 44 + 108 * i
        picture.text(16, y - 12, label, "bold code")
        for j, (lines, kind) in enumerate(boxes):
            picture.box(16 + 186 * j, y, 164, 56, lines, kind)
            if j:
                picture.arrow(16 + 186 * j - 22, y + 28, 16 + 186 * j - 2, y + 28)
    picture.rect(16, 224, 12, 12, "yours")
    picture.text(36, 234, "yours", "small")
    picture.rect(90, 224, 12, 12, "box")
    picture.text(110, 234, "customops", "small")
    return picture


#: Where the kernel of a call is looked for, in this order; what sets it; and which kernels these are.
ASKED = [
    ("kept choice", "key=", "the one that ran for such dtypes, sizes and strides, or such a key"),
    ("preferred", "prefer", "op.prefer(...), customops.prefer({...}), the environment, a file of names"),
    ("tuned", "autotune, tuned", "measured to be the fastest for this hardware, torch and bucket of sizes"),
    ("priority", "register_kernel", "the highest first, then those of the device, then the newest"),
    ("reference", "reference=", "the plain function, where there is one"),
]


def choice() -> Picture:
    picture = Picture(820, 116 + 62 * len(ASKED), "Which kernel of several runs")
    picture.text(16, 26, "in this order", "bold")
    picture.text(186, 26, "the first kernel without when=, or whose when= returns True, runs", "bold")
    for i, (title, below, about) in enumerate(ASKED):
        y = 40 + 62 * i
        picture.box(16, y, 150, 44, [title, below], "box" if i == 0 else "yours")
        picture.text(186, y + 27, about, "small")
        picture.arrow(91, y + 44, 91, y + 61)
        picture.text(100, y + 56, "no", "small soft")
        picture.text(608, y + 18, "yes", "small soft")
        picture.arrow(602, y + 24, 636, y + 24)
    end = 40 + 62 * len(ASKED)
    picture.box(16, end, 150, 44, ["NoKernelError", "each kernel, and why not"])
    seen = ["the kernel", "mylib::norm[rows] in", "profiles, logs, graphs,", "explain, describe"]
    picture.box(640, 40, 164, end - 58, seen)
    note = "The choice is kept. Compilers choose once, with fake tensors, and guard what was read."
    picture.text(186, end + 27, note, "small")
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "gradients": gradients,
    "call_costs": call_costs,
    "from_hints_to_op": from_hints_to_op,
    "from_reference_to_rules": from_reference_to_rules,
    "dispatch_keys": dispatch_keys,
    "backward": backward,
    "choice": choice,
}


README = HERE.parents[1] / "README.md"
#: The cases of call_costs.json that README.md has, by what it calls them.
IN_README = {
    "no gradient is needed": "no gradient",
    "in inference mode": "inference mode",
    "forward, with a gradient formula": "forward",
    "forward and backward": "forward and backward",
    "writes to an argument": "mutates, returns None",
    "an out variant, by `out=`": "out variant",
    "lists of tensors": "lists of tensors",
    "arguments by keyword": "defaults, by keyword",
}


def readme(text: str) -> str:
    """README.md with the table of what calls cost."""
    figures: dict[str, Any] = json.loads((HERE / "call_costs.json").read_text(encoding="utf-8"))
    rows = [
        f"torch {figures['torch']}, Python {figures['python']}, one machine, {figures['date']}:",
        "",
        "| a call, in µs of processor time | bare `Library` | `customops` | `torch.library.custom_op` |",
        "|---|---|---|---|",
    ]
    for label, case in IN_README.items():
        costs = (f"{figures['cases'][case][who]['us']:.1f}" for who in ("Library", "customops", "custom_op"))
        rows.append(f"| {label} | {' | '.join(costs)} |")
    begin, end = "<!-- costs: make pictures -->\n", "<!-- end of costs -->"
    return text[: text.index(begin) + len(begin)] + "\n".join(rows) + "\n" + text[text.index(end) :]


def main() -> None:
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw().svg(), encoding="utf-8", newline="\n")
    README.write_text(readme(README.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
