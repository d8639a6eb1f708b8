"""The tables and the picture of the norms' benchmark."""

import math

from model.training.picture import new_figure
from scripts.bench import norm_report


def test_the_report_has_a_table_of_shares_and_one_of_ratios():
    def row(norm, width, median=0.0, **more):
        timed = {"median_us": median, "quartiles_us": [median, 1.5 * median], "gb_per_s": 2.0, "share": 20 / median}
        return {"pass": "forward", "mode": "graph", "width": width, "rows": 8, "norm": norm} | timed | more

    refused = {"pass": "forward", "mode": "graph", "width": 64, "rows": 8, "norm": "mine", "refused": "Error: no"}
    rows = [row("copy", 32, 20.0), row("mine", 32, 40.0), row("triton", 32, 25.0)]
    rows += [row("copy", 64, 20.0), refused, row("triton", 64, 50.0, same_function=False, distance=0.25)]
    lines = [" ".join(line.split()) for line in norm_report.report(rows)]
    shares = lines.index("forward, graph")
    assert lines[shares + 1 : shares + 4] == [
        "D rows copy mine triton*",
        "32 8 2.0 GB/s 20.0 ±25% 50% 40.0 ±25% 80% 25.0 ±25%",
        "64 8 2.0 GB/s 20.0 ±25% refused 40% 50.0 ±25%",
    ]
    ratios = lines.index("forward, graph: time over that of triton")
    assert lines[ratios + 1 : ratios + 4] == ["D rows mine triton*", "32 8 1.60 1.00", "64 8 refused 1.00"]
    assert lines[-2:] == [
        "* triton is another function: its y is 25% off",
        "mine refused forward, graph, 8 x 64: Error: no",
    ]


def test_the_picture_has_the_last_mode_and_the_most_rows(tmp_path, monkeypatch):
    results, shares = [], iter(range(100))
    for width in (32, 64):
        for rows in (8, 16):
            for pass_name in ("forward", "backward", "add_forward", "add_backward"):
                for mode in ("eager", "graph"):
                    where = {"width": width, "rows": rows, "pass": pass_name, "mode": mode}
                    results += [where | {"norm": "mine", "share": next(shares)}, where | {"norm": "broken"}]
    figure = new_figure(9, 6.4)
    monkeypatch.setattr(norm_report, "new_figure", lambda width, height: figure)
    norm_report.plot(results, tmp_path / "norm.png")
    assert (tmp_path / "norm.png").read_bytes().startswith(b"\x89PNG")
    drawn = [[list(line.get_ydata()) for line in axes.lines[:2]] for axes in figure.axes]
    assert [mine for mine, _ in drawn] == [[9, 25], [11, 27], [13, 29], [15, 31]]
    assert all(math.isnan(share) for _, broken in drawn for share in broken)
