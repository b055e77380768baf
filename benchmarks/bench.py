"""Time the cases of cases.py: calls of ops, and the alternatives to each.

    python benchmarks/bench.py                           all groups
    python benchmarks/bench.py --group calls serving     some groups
    python benchmarks/bench.py --only "no gradient"      the cases with that text in their names
    python benchmarks/bench.py --check                   compare the results of the contenders and time nothing

The contenders of a case take turns, so that a disturbance of the machine affects all of them. A cell shows the median,
half the distance of the quartiles in percent of the median, and the ratio of the first contender to this one. Times are
processor time in microseconds, unless the name of the case gives another unit.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from datetime import date
from itertools import groupby
from pathlib import Path

import torch
from cases import GROUPS, Case, table

# Timing ---------------------------------------------------------------------------------------------------------


class Times:
    """The measurements of one case: for each contender, one number a round."""

    def __init__(self, rounds: dict[str, list[float]]) -> None:
        self.rounds = rounds

    def median(self, contender: str) -> float:
        return statistics.median(self.rounds[contender])

    def spread(self, contender: str) -> float:
        """Return half the distance of the quartiles, in percent of the median."""
        if len(self.rounds[contender]) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.rounds[contender], n=4)
        return 50 * (high - low) / self.median(contender)

    def ratio(self, contender: str) -> float:
        """Return how many times longer the first contender takes than this one."""
        return self.median(next(iter(self.rounds))) / self.median(contender)

    def cell(self, contender: str) -> str:
        return f"{self.median(contender):9.2f} ±{self.spread(contender):3.0f}%"


def take_turns(meters: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call each meter once a round. Each round begins with another meter."""
    found: dict[str, list[float]] = {contender: [] for contender in meters}
    order = list(meters)
    for i in range(-min(3, rounds // 10), rounds):  # negative rounds warm up
        first = i % len(order)
        for contender in order[first:] + order[:first]:
            measured = meters[contender]()
            if i >= 0:
                found[contender].append(measured)
    return found


def time_case(case: Case, quick: bool = False) -> Times:
    """Measure all contenders of a case."""
    meters = {name: contender.meter(case) for name, contender in case.contenders.items()}
    rounds = min(case.rounds, max(2, case.rounds // 10)) if quick else case.rounds
    with case.context():
        return Times(take_turns(meters, rounds))


# Results --------------------------------------------------------------------------------------------------------


def print_group(group: str, times: dict[Case, Times]) -> None:
    """Print one table. Its longer side goes down the page: the cases or the contenders."""
    contenders = list(dict.fromkeys(contender for each in times.values() for contender in each.rounds))
    cells = {}
    for case, each in times.items():
        for i, contender in enumerate(each.rounds):
            cells[case.label, contender] = each.cell(contender) + (f" {each.ratio(contender):6.2f}" if i else " " * 7)
    rows, columns = [case.label for case in times], contenders
    if len(columns) > len(rows):
        rows, columns = columns, rows
        cells = {(contender, case): cell for (case, contender), cell in cells.items()}
    left, width = max(map(len, rows)), max(24, *(len(column) + 2 for column in columns))
    print(f"\n{group}\n{'':{left}}" + "".join(f"{column:>{width}}" for column in columns))
    for row in rows:
        line = "".join(f"{cells.get((row, column), ''):>{width}}" for column in columns)
        print(f"{row:{left}}{line}".rstrip(), flush=True)


def figures(case: Case, times: Times) -> dict[str, dict[str, float]]:
    """Return the numbers of a case for the JSON file. The key of the measurement is its unit."""
    return {
        name: {case.unit: times.median(name), "spread": times.spread(name), "ratio": times.ratio(name)}
        for name in times.rounds
    }


def over_limit(case: Case, times: Times) -> bool:
    """Return whether the first contender takes longer than the limit of the case allows."""
    return case.limit is not None and max(map(times.ratio, times.rounds)) > case.limit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", nargs="+", choices=GROUPS, default=list(GROUPS), help="only these groups")
    parser.add_argument("--only", metavar="TEXT", default="", help="only the cases with TEXT in their names")
    parser.add_argument("--check", action="store_true", help="compare the results of the contenders; time nothing")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--limits", action="store_true", help="fail if a ratio is above the limit of its case")
    options = parser.parse_args()
    if torch.__version__ < (2, 13):
        parser.error(f"torch {torch.__version__} has no custom_op for ops that work in place; use 2.13 or newer")
    torch.set_num_threads(1)
    cases = list(table(options.group, options.only))
    if not cases:
        parser.error(f"no case has {options.only!r} in its name")

    if options.check:
        for case in cases:
            case.verify()
        print(f"{len(cases)} cases: the contenders agree")
        return

    print(f"torch {torch.__version__}, Python {platform.python_version()}, one thread")
    times: dict[Case, Times] = {}
    for group, members in groupby(cases, key=lambda case: case.group):
        found: dict[Case, Times] = {}
        for case in members:
            case.verify()
            found[case] = time_case(case, options.quick)
        print_group(group, found)
        times |= found
    if any(each.spread(name) > 20 for each in times.values() for name in each.rounds):
        print("\nThe machine is busy: do not trust figures that spread by more than 20%.")
    if options.json is not None:
        measured = {"torch": torch.__version__, "python": platform.python_version(), "date": date.today().isoformat()}
        by_case = {case.name: figures(case, each) for case, each in times.items()}
        options.json.write_text(json.dumps(measured | {"cases": by_case}, indent=1) + "\n", encoding="utf-8")
    slow = [case.name for case, each in times.items() if over_limit(case, each)]
    if options.limits and slow:
        raise SystemExit(f"over the limit: {', '.join(slow)}")


if __name__ == "__main__":
    main()
