"""Tables and JSON that commands print."""

import json

from rich.console import Console
from rich.table import Table

console = Console(highlight=False)


def print_json(value):
    print(json.dumps(value, indent=1))


class JsonRows:
    """A JSON list, each element printed as soon as it is known: with JsonRows() as say: say(text,
    rows); the text is for people."""

    def __enter__(self):
        self._before = "[\n"
        return self

    def __call__(self, text, rows):
        for row in rows:
            print(self._before + json.dumps(row), end="", flush=True)
            self._before = ",\n"

    def table(self, columns, lines, rows):
        self(None, rows)

    def __exit__(self, kind, error, traceback):
        if self._before != "[\n":
            print("\n]", flush=True)
        elif kind is None:
            print("[]", flush=True)


class Text:
    """Says what is found as text, where JsonRows prints rows; rows without a text as tables."""

    def __call__(self, text, rows):
        if text is None:
            print_figures(rows)
        else:
            console.print(text, soft_wrap=True, markup=False)

    def table(self, columns, lines, rows):
        print_table(columns, lines)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def print_figures(rows):
    """Rows of {case, metric, value, unit}: a table a case."""
    for case in dict.fromkeys(r["case"] for r in rows):
        console.print(case, style="bold", soft_wrap=True)
        print_table(
            ["", ">", ""],
            [
                (
                    "  " + r["metric"],
                    "" if r["value"] is None else f"{r['value']:.5g}",
                    r["unit"],
                )
                for r in rows
                if r["case"] == case
            ],
        )


def print_table(columns, rows):
    """columns: names; one that starts with > is right-aligned."""
    table = Table(
        box=None,
        pad_edge=False,
        header_style="bold",
        show_header=any(c.strip(" >") for c in columns),
    )
    for name in columns:
        table.add_column(
            name.lstrip(">"), justify="right" if name.startswith(">") else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)


def rate(amount, seconds, unit):
    """An amount a second in the prefix that fits: "1.23 TFLOP/s", "84.1 GB/s"."""
    value = amount / seconds if seconds else 0.0
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}/s"
    return f"{value:.3g} {unit}/s"
