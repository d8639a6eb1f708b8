"""The verdicts of a league as a table and as a picture."""

from __future__ import annotations

from pathlib import Path

from model.training.picture import new_figure
from scripts.judging.judge import PASSES, Verdict

FLOORS = {"forward": 4, "backward": 6, "add": 8}  # bytes an element that must move, in bfloat16
# What fails, in words. The other checks' names will do.
WORDS = {
    "values_are_the_formula": "values",
    "any_width": "widths",
    "rows_too_large_for_float32_give_zero": "overflowing rows",
    "half_precision_rounds_in_the_order_of_the_form": "rounding order",
    "statistics_are_float32_in_half_precision": "float32 statistics",
    "zero_row_gives_zero_and_a_finite_gradient": "zero rows",
    "gradients_are_those_of_the_formula": "gradients",
    "dweight_is_summed_in_float32": "sum of dweight",
    "dweight_is_made_of_what_the_weight_multiplies": "rounding of dweight",
    "result_and_gradients_keep_their_dtypes": "mixed dtypes",
    "strides_change_nothing": "strides",
    "gradient_of_a_sum_arrives_expanded": "expanded dy",
    "nothing_gives_an_empty_tensor": "no rows",
    "inputs_are_left_as_they_were": "dy is overwritten",
    "a_frozen_weight_changes_no_other_gradient": "frozen weight",
    "repeated_runs_have_the_same_bits": "repeatable bits",
    "adds_in_forward": "add",
    "add_rms_norm_is_the_two_steps": "add",
    "add_rms_norm_takes_any_strides": "strides of the add",
}


def what_fails(verdict: Verdict) -> str:
    """The failed checks in words: of several cases how many, and * where memory outside of the tensors is touched."""
    words: dict[str, list[bool]] = {}
    for check, arguments, found in (failure for failures in verdict.failed.values() for failure in failures):
        float64 = "float64" in arguments or "float64" in check
        word = "float64" if float64 else WORDS.get(check, check.replace("_", " "))
        if "not to have been used in the gr" in found or "not have been used in the gr" in found:
            word = "no dweight"
        words.setdefault(word, []).append("outside the tensors" in found)
    return "; ".join(f"{word}{'*' * any(strays)} {len(strays)}" for word, strays in words.items())


def table(verdicts: list[Verdict]) -> str:
    """The verdicts as a Markdown table."""
    lines = [
        "| norm | form | forward | backward | add | fails (cases) | "
        + " | ".join(f"{pass_name}, floor {FLOORS[pass_name]}" for pass_name in PASSES)
        + " |",
        "|---" * 9 + "|",
    ]
    for verdict in verdicts:
        name = f"{verdict.norm} {verdict.version}".strip()
        if verdict.why_not:
            lines.append(f"| {name} | {verdict.form} | can't run: {verdict.why_not} |||||||")
            continue
        scores = []
        for pass_name in PASSES:
            passed, failed = verdict.passed.get(pass_name, 0), len(verdict.failed.get(pass_name, []))
            scores.append(f"{passed}/{passed + failed}" if passed + failed else "-")
        figures = []
        for pass_name in PASSES:
            found = verdict.table.get(pass_name, "-")
            if isinstance(found, str):
                figures.append("-" if found == "-" else "fails")
            else:
                figures.append("{:.2f} + {:.2f}; {:.0f}".format(*found))
        lines.append("| " + " | ".join([name, verdict.form, *scores, what_fails(verdict), *figures]) + " |")
    return "\n".join(lines)


def draw(verdicts: list[Verdict], path: Path) -> None:
    """A picture of the bytes moved over the floor: a row for each norm, a column for each width."""
    import numpy as np

    # in the first form that each claims
    firsts = list({verdict.norm: verdict for verdict in reversed(verdicts) if not verdict.why_not}.values())[::-1]
    widths = sorted({width for verdict in firsts for moved in verdict.moved.values() for width in moved})
    figure = new_figure(13, 1.2 + 0.27 * len(firsts))
    panels = figure.subplots(1, 3, sharey=True)
    for panel, pass_name in zip(panels, PASSES, strict=True):
        ratios = np.full((len(firsts), len(widths)), np.nan)
        for row, verdict in enumerate(firsts):
            for column, width in enumerate(widths):
                moved = verdict.moved.get(pass_name, {}).get(width, "-")
                word = "" if moved == "-" else "fails"
                if isinstance(moved, float):
                    ratio = moved / FLOORS[pass_name]
                    word = f"{ratio:.2f}" if ratio > 0.99 else "a part"  # of x: it leaves out the rest
                    ratios[row, column] = ratio if ratio > 0.99 else np.nan
                panel.text(column, row, word, ha="center", va="center", fontsize=8)
        panel.imshow(ratios, cmap="RdYlGn_r", vmin=0.4, vmax=2.6, aspect="auto")
        panel.set_facecolor("0.92")
        panel.set_xticks(range(len(widths)), [str(width) for width in widths], fontsize=8)
        panel.set_title(f"{pass_name}: bytes moved / floor of {FLOORS[pass_name]} an element", fontsize=9)
        panel.set_xlabel("D")
    panels[0].set_yticks(range(len(firsts)), [f"{v.norm} {v.version}".strip() for v in firsts], fontsize=8)
    figure.savefig(path, dpi=110)
