"""Appendix C.2's claim on coordinate descent: the experiment runs, goes on where it was, and judges what it found."""

import pytest

from patchbayes_reproduce import registry, summary
from patchbayes_reproduce.claims import CLAIMS
from patchbayes_reproduce.experiment import Workspace, reproduce
from patchbayes_reproduce.turns_of_training import pays_where_k_is_large, tables


def test_the_experiment_at_smoke_scale_goes_on_where_it_was(tmp_path):
    pytest.importorskip("accelerate")
    found = registry.experiment("coordinate-descent")
    setting = Workspace(work_dir=tmp_path / "work")
    result = reproduce(found, "smoke", setting, tmp_path)["result"]
    assert len(result["rows"]) == 2 * 2 * 2
    for row in result["rows"]:
        assert len(row["objective"]) == len(row["seconds"]) == 4
        assert row["seconds"] == sorted(row["seconds"])
        assert row["objective"][-1] < row["objective"][0]
    (tmp_path / "work" / "coordinate-descent-smoke" / "turns-3-1.json").unlink()
    finished = found.run("smoke", Workspace(work_dir=tmp_path / "work", finished=True))
    assert finished["rows"] == result["rows"][:-1]
    again = found.run("smoke", setting)
    assert again["rows"][:-1] == result["rows"][:-1]
    assert again["rows"][-1]["objective"] == result["rows"][-1]["objective"]
    assert all(summary.markdown(table) for table in found.tables(result).values())


def record(turns_seconds, reached=True):
    """Plain training needs 4 s to its half-way objective of 1.0; turns as long as said, by K."""
    rows = []
    for components, seconds in turns_seconds.items():
        for seed in range(5):
            wobble = 1 + 0.01 * seed
            rows.append(
                {
                    "components": components,
                    "kind": "plain",
                    "seed": seed,
                    "objective": [3, 1, 0.9, 0.8],
                    "seconds": [2, 4, 6, 8],
                }
            )
            objective = [2, 1.5, 1.2, 1.0 if reached else 1.1]
            steps = [seconds * wobble * part / 4 for part in (1, 2, 3, 4)]
            rows.append(
                {"components": components, "kind": "turns", "seed": seed, "objective": objective, "seconds": steps}
            )
    return {
        "plan": {"components": list(turns_seconds), "model": "m", "data": "d", "epochs": 4, "turn": 1.0},
        "rows": rows,
    }


@pytest.mark.parametrize(
    ("turns_seconds", "verdict"),
    [
        ({5: 4.0, 50: 2.0}, "confirmed"),
        ({5: 4.0, 50: 6.0}, "contradicted"),
        ({5: 2.0, 50: 2.0}, "not confirmed"),  # pays, but not most where K is large
    ],
)
def test_the_claim_follows_from_the_times(turns_seconds, verdict):
    (claim,) = [claim for claim in CLAIMS if claim.experiments == ("coordinate-descent",)]
    finding = claim.judge(record(turns_seconds))
    assert finding.verdict == verdict
    assert f"{turns_seconds[50] / 4:.1f}"[:3] in finding.evidence


def test_an_objective_that_turns_never_reach_counts_as_a_lower_bound():
    (table,) = tables(record({5: 8.0, 50: 8.0}, reached=False)).values()
    assert [row[1] for row in table[1]] == ["0 of 5", "0 of 5"]
    assert table[1][0][2].startswith("> 2.00 > 2.02")


def test_one_seed_is_no_verdict():
    content = record({5: 4.0, 50: 2.0})
    content["rows"] = [row for row in content["rows"] if row["seed"] == 0]
    assert pays_where_k_is_large(content).verdict == "not tested here"
