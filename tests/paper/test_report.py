"""The report: its numbers are the runs', what is missing is said."""

from __future__ import annotations

import re

import pytest
from report_runs import (
    METHODS,
    Page,
    around,
    blocks_of,
    items,
    numbers,
    plain,
    read,
    render,
    row_of,
    rows_of,
    several,
    strings,
    table,
    tiny,
)

from benchmarks.paper import figures, report
from benchmarks.paper.orderings import orderings
from benchmarks.paper.page import Document, Figure, Paragraph, Table
from benchmarks.paper.report import PARTS
from benchmarks.paper.tables import TABLES
from benchmarks.paper.tables import Table as Experiment
from fb_core.apps.settings.config import AVERAGE


@pytest.fixture(scope="module")
def single() -> Document:
    return render(tiny())


@pytest.fixture(scope="module")
def runs() -> Document:
    return several()


@pytest.fixture
def undrawn(monkeypatch):
    """Without figures, which take a second each."""
    for name in ("forest", "agreement", "curve", "frontier"):
        monkeypatch.setattr(figures, name, lambda *_: None)


def test_every_number_of_a_table_is_the_runs(single):
    found = tiny()
    allowed = {word for text in strings(found) for word in re.findall(r"\d+(?:\.\d+)?", text)}
    for number in numbers(found):
        for value in (abs(number), abs(100 * number)):
            allowed |= {f"{value:.{digits}f}" for digits in range(5)} | {f"{value:g}"}
    for one in orderings(read(found).results):  # the paper's, and differences that are not paired: tests of their own
        allowed |= set(re.findall(r"\d+\.\d+", one.published + one.shown * (not one.paired)))
    tables = [
        block
        for block in blocks_of(single)
        if isinstance(block, Table) and not {"Changed", "States"} & set(block.caption.split()[:1])
    ]
    words = [word for one in tables for row in one.rows for cell in row for word in plain(cell).split()]
    shown = {number.replace(",", "") for word in words for number in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", word)}
    assert len(shown) > 200
    assert shown <= allowed


def test_rows_of_methods_are_as_found(single):
    found = table(single, "Methods on demo:plans")
    assert rows_of(found)["Published recipe"] == [
        *("95.8 [92.8, 98.8]", "+24.6 [+20.9, +28.3]", "+8.8 [+5.1, +12.5]", "", "1.91", "1.91", "41.8")
    ]
    assert rows_of(found)["GRPO"] == ["see below", *[""] * 6]
    assert "GRPO: no checkpoint given: compare.external." in items(single, "Methods")
    for words in ("SLM demo:plans, LLM demo:plans", "400 problems", "seeds 0, 1", "greedy decoding between events"):
        assert words in found.note
    assert "quantile 0.94, 1.695 nats; 95% bootstrap over problems and training seeds, differences paired" in found.note


@pytest.mark.usefixtures("undrawn")
def test_unequal_problem_counts_are_shown():
    found = tiny()
    found["results"] = found["results"][:2]
    found["results"][0] |= {"problems": 1319}
    shown = table(render(found), "Methods on demo:plans")
    assert shown.head[-1] == "problems"
    assert (rows_of(shown)["Greedy"][-1], rows_of(shown)["Maj@8"][-1]) == ("1,319", "400")
    assert "400 to 1,319 problems" in shown.note


def test_verdicts_follow_the_intervals(single):
    first, *more = items(single, "Methods")
    assert first == (
        "Significantly above greedy: Direct LLM score; R2R; Published recipe; Takeover. Significantly below greedy: "
        "Random choice. Not significantly different from greedy: Maj@8; S2T."
    )
    assert len(more) == 3
    assert "Significantly below greedy: Published recipe at quantile 0.9." in items(single, "Request quantiles")[0]


@pytest.mark.usefixtures("undrawn")
def test_three_sentences_say_what_was_compared_what_won_and_what_is_lost():
    compared, won, lost = items(render(tiny()), "")
    assert compared == "8 methods were compared on demo:plans (400 problems), SLM demo:plans, LLM demo:plans."
    assert won.endswith(
        ": Published recipe on demo:plans, 95.8% with 1.9 LLM tokens per problem "
        "(greedy 71.2% with 0.0, takeover 99.2% with 40.2)."
    )
    nowhere = "nowhere significantly worse than greedy decoding or the direct LLM score or takeover."
    assert lost == f"Published recipe: {nowhere}"
    _, won, lost = items(render(tiny("good"), tiny("bad", 0.5)), "")
    assert "Published recipe on good, demo:plans, 95.8%" in won
    assert "R2R on bad, demo:plans, 90.1%" in won
    assert lost.startswith(
        "Published recipe: significantly worse than greedy decoding on bad, demo:plans (-25.4 [-29.1, -21.7] pp),"
    )
    assert "good, demo:plans" not in lost
    found = tiny()
    takeover = next(row for row in found["results"] if row["key"] == "takeover")
    takeover["minus"]["published"] = [0.034, 0.02, 0.05]  # known from its side alone
    by_key = {row["key"]: row for row in found["results"] if row["table"] == "methods"}
    by_key["direct"] |= {"accuracy": by_key["published"]["accuracy"], "llm_tokens": [1.5, 1.4, 1.6]}
    _, won, lost = items(render(found), "")
    assert "Published recipe: significantly worse than takeover on demo:plans (-3.4 [-5.0, -2.0] pp)." in lost
    assert ": Direct LLM score on demo:plans, 95.8% with 1.5 LLM tokens per problem (" in won  # of equals the cheapest


@pytest.mark.usefixtures("undrawn")
def test_the_frontier_tells_what_is_worth_more_than_taking_over(single):
    rows = rows_of(table(single, "Accuracy and the LLM's work on demo:plans"))
    distance = 95.8 - 71.2 - 1.91 / 40.2 * 28
    last = f"{distance:+.1f} [{distance - 3:+.1f}, {distance + 3:+.1f}]"
    assert rows["Published recipe"] == [
        *("95.8 [92.8, 98.8]", "1.9 [1.8, 2.0]", "1.91 [1.72, 2.10]", "31.9 [31.9, 31.9]"),
        *("0.048, 1.55 [1.50, 1.61] × greedy, fast", last, "+4.6 [+1.6, +7.6]"),
    ]
    assert (rows["Greedy"][-1], rows["Takeover"][-1]) == ("", "")
    takeover, worth, read = items(single, "Accuracy against the LLM's work")
    assert takeover.startswith("Takeover is right on 99.2 [96.2, 100.0]% of the problems with 40.2 [40.1, 40.3] LLM ")
    more, less = worth.split("Significantly worse: ")
    assert more.endswith("LLM tokens: Direct LLM score; R2R; Published recipe. ")
    assert less == "Random choice; S2T. Not significantly different: Maj@8."
    assert read.startswith(
        "Significantly better than takeover on a share of the problems with the same number of LLM pos"
    )
    assert "positions: Published recipe. Significantly worse: " in read
    found = tiny()
    found["results"] = [row | {"llm_tokens": None} for row in found["results"]]
    assert "Accuracy against the LLM's work" not in [section.title for section in render(found).sections]


@pytest.mark.usefixtures("undrawn")
def test_changed_problems_are_counted_and_listed(single):
    counts = table(single, "Changed outcomes by kind of event")
    assert [plain(cell) for cell in counts.head] == ["", "greedy → method", "no event", "digit", "all"]
    assert [[plain(cell) for cell in row] for row in counts.rows] == [
        ["Published recipe", "right → wrong", "2", "1", "3"],
        ["Published recipe", "wrong → right", "13", "14", "27"],
    ]
    shown = table(single, "Changed problems")
    assert [plain(row[0]) for row in shown.rows] == [f"plans/test/{number}" for number in range(23)]


def test_the_deployed_recipe_is_shown_with_its_bounds(single):
    assert items(single, "Deployed recipe") == ["Seed 0: value: the best of 1 of 1 tested recipes."]
    found = table(single, "Certification, seed 0")
    assert rows_of(found)["value"] == ["90.0", "+40.0 [+35.0]", "+10.0 [+5.0]", "2.25", "2.25"]
    assert found.note.endswith("valid together at 95%. A recipe may be deployed if both are above -2.")


def test_scores_are_better_or_worse_than_chance(single):
    (section,) = [one for one in single.sections if one.title == "Agreement with rollouts"]
    texts = [block.text for block in section.blocks if isinstance(block, Paragraph)]
    assert texts[1] == (
        "All events, validation. Better than chance: LLM; Direct-B_16; reranker. Not significantly different from "
        "chance: SLM."
    )
    assert rows_of(table(single, "Agreement with rollouts, mark events"))["SLM"][2] == ""  # known nowhere


@pytest.mark.usefixtures("undrawn")
def test_several_benchmarks_have_an_average_where_all_are_known():
    rows = [row for row in tiny(benchmarks=("x", "y"))["results"] if row["table"] == "methods"]
    rows = [row for row in rows if (row["benchmark"], row["key"]) != ("y", "s2t")]
    greedy = next(row for row in rows if row["key"] == "greedy")
    rows += [greedy | {"benchmark": AVERAGE, "accuracy": around(0.656, 0.02), "problems": 800}]
    document = render({"name": "n", "results": rows})
    found = table(document, "Methods: accuracy, %")
    assert list(found.head) == ["", "x", "y", "average"]
    assert rows_of(found)["Greedy"] == ["71.2 ▽", "71.2 ▽", "65.6 [63.6, 67.6] ▽"]
    assert rows_of(found)["S2T"] == ["69.0 ▽", "", ""]
    assert ": Greedy on average, 65.6%" in items(document, "")[1]  # the primary one alone


def test_several_runs_are_compared(runs):
    titles = [section.title for section in runs.sections]
    assert titles == ["All runs", "tiny", "control", "several", "How to read the numbers"]
    found = table(runs, "Accuracy, % [95%], by run")
    assert list(found.head) == ["", "tiny: demo:plans", "control: demo:plans", "several: gsm8k", "several: math-500"]
    assert rows_of(found)["Published recipe"][:2] == ["95.8 [92.8, 98.8]", "35.8 [32.8, 38.8] ▼▽"]
    assert [row[0] for row in found.rows] == [label for label, *_ in METHODS.values()]
    names = [figure.name for figure in runs.figures()]
    assert len(set(names)) == len(names) > 10
    same = render({"name": "a"}, {"name": "a"})
    assert [section.title for section in same.sections] == ["All runs", "a (1)", "a (2)", "How to read the numbers"]


SHOWN = [(one.title, f"python -m benchmarks.paper tables {name}") for name, one in TABLES.items()]
SHOWN += [(one.title, one.command) for one in PARTS]


@pytest.mark.usefixtures("undrawn")
def test_what_was_not_run_is_named_with_its_command():
    whole = tiny()
    for name, one in TABLES.items():
        left = whole | {"results": [row for row in whole["results"] if row["table"] != name]}
        missing = [f"{one.title}: run python -m benchmarks.paper tables {name}"]
        missing += ["Accuracy against the LLM's work: run python -m benchmarks.paper tables methods"] * (
            name == "methods"
        )
        assert items(render(left), "Not run") == missing
    for name in whole["parts"].keys() - {"offline", "changes"}:
        left = whole | {"parts": {other: part for other, part in whole["parts"].items() if other != name}}
        assert len(items(render(left), "Not run")) == 1
    same = render(whole | {"parts": whole["parts"] | {"changes": []}})
    assert "No problem has another outcome than with greedy decoding." in Page(same.html()).text
    assert "Costs: run python -m benchmarks.paper tables costs" in items(
        render(whole | {"timed": [], "parts": {}}), "Not run"
    )


def test_of_an_empty_run_nothing_is_invented():
    document = render({"name": "bare"})
    assert [section.title for section in document.sections] == ["Not run", "How to read the numbers"]
    text = Page(document.html()).text
    assert all(title in text and command in text for title, command in SHOWN)
    assert not list(document.figures())
    assert not re.search(r"\d", text.replace("95%", "").replace("excludes 0", "").replace("FutureBridge", ""))
    with pytest.raises(ValueError, match="runs: expected one or more, got none"):
        report.render([])


def test_an_experiment_is_shown_as_its_entry_says():
    entry = Experiment("widths", "Widths", "How wide it is.", lambda plan: [], "accuracy", "Dots.")
    row = row_of("widths", "b", "wide", "twice as wide", 0.9, {"greedy": 0.7, "the narrow one": 0.7})
    document = render({"name": "n", "results": [row]}, tables={"widths": entry})
    (section,) = [section for section in document.sections if section.title == "Widths"]
    assert section.brief == "How wide it is."
    assert "minus the narrow one, pp [95%]" in table(document, "Widths on b").head
    assert (type(section.blocks[-1]), section.blocks[-1].caption) == (Figure, "Dots.")


@pytest.mark.usefixtures("undrawn")
def test_a_column_of_published_figures_is_there_where_there_are_some():
    found = tiny()
    assert not [
        head for one in ("Offline stages", "Deployment") for head in table(render(found), one).head if "pub" in head
    ]
    found["parts"]["offline"] += [found["parts"]["offline"][0] | {"stage": "scores", "published": 8.6}]
    shown = table(render(found), "Offline stages")
    assert shown.head[-1] == "published, H200 hours"
    assert (rows_of(shown)["scores"][-1], rows_of(shown)["trajectories"][-1]) == ("8.6", "")
