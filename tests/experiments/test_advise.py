"""Which methods apply: the methods' own refusals, wishes of the parties, bytes of a run."""

import re

import pytest

from experiments import advise
from experiments.advise import AdviseSettings, main, report
from experiments.lib import runner
from experiments.lib.command import parse
from jaxfedmvc import METHODS
from jaxfedmvc.algorithms.reveals import KINDS, reveals
from tests.helpers import binaries


def test_somebody_has_said_what_every_methods_messages_tell():
    for name, method in METHODS.items():
        told = reveals(name, method)
        assert told.kind != "unknown", f"{name} has no entry in jaxfedmvc/algorithms/reveals.py"
        assert told.kind in KINDS and told.text.endswith(".")
    for name, topology in (("fmcsc", "horizontal"), ("mgcd", "vertical"), ("lmvsc", "pooled")):
        assert METHODS[name].topology == topology


@pytest.mark.parametrize(
    ("options", "name", "peers", "why"),
    [
        ({"holds": "rows"}, "mgcd", None, "is for vertical data"),
        ({"holds": "views"}, "mgcd", False, ""),
        ({"holds": "all"}, "fmcsc", None, "is for horizontal data"),
        ({"at_most": "sums"}, "fmcsc", None, "sends networks and centres"),
        ({"at_most": "models"}, "fmcsc", False, ""),
        ({"server": False}, "mgcd", False, "needs a server"),
        ({"server": False}, "vertcohirf", True, ""),
        ({"server": False}, "local_kmeans", False, ""),
        ({"at_most": "codes"}, "lmvsc", None, "sends rows as they are"),
    ],
)
def test_wishes_of_the_parties(options, name, peers, why):
    told = reveals(name, METHODS[name])
    assert AdviseSettings(**options).excludes(name, told, peers) == why


def test_what_is_true_of_several_methods_is_said_once_and_bytes_without_exponents():
    row = {"MB up": 1767.2, "MB down": 9.2e-05, "sends": "rows", "which reveals": "All rows."}
    fits = [{"method": name} | row for name in ("a", "b")]
    lines = report(fits, [("c", "is vertical"), ("d", "is pooled"), ("e", "is vertical")])
    lines = lines.splitlines()
    assert lines[1].split() == ["a", "1767", "0.000092", "rows"]
    assert lines[4:] == ["a, b: All rows.", "", "do not apply:", *lines[-2:]]
    assert lines[-2:] == ["  c, e: is vertical", "  d: is pooled"]


def test_what_nobody_knows_of_is_left_out_only_where_something_is_asked():
    told = reveals("new", METHODS["fmcsc"])
    assert told.kind == "unknown"
    assert AdviseSettings(holds="rows").excludes("fmcsc", told) == ""
    why = AdviseSettings(at_most="codes").excludes("fmcsc", told)
    assert why == "sends what jaxfedmvc/algorithms/reveals.py does not say"


@pytest.mark.ci
def test_what_applies_is_listed_with_the_bytes_of_a_run(monkeypatch):
    applies = {"e_fkmvc", "fedhk_tucker", "local_kmeans"}
    methods = {name: METHODS[name] for name in (*applies, "fmcsc", "mgcd", "lmvsc")}
    monkeypatch.setattr(advise, "METHODS", methods)
    code, out, err = binaries.launch(
        main, "--dataset=digits", "--holds=rows", "--at_most=sums", "--noprogress"
    )
    assert code == 0, err
    table, reasons = out.split("do not apply:")
    lines = {line.split()[0]: line.split() for line in table.splitlines() if line.strip()}
    # The last needs all views: nobody has asked for clients that lack some.
    assert applies <= set(lines) and not (methods.keys() - applies) & set(lines)
    assert "  fmcsc: sends networks and centres" in reasons
    command = parse(["--algorithm=e_fkmvc", "--dataset=digits"])
    steps = runner.steps_of(runner.prepare(command))
    steps.programs()
    times = {"setup": 1, "round": command.rounds, "finish": 1}
    up = sum(n * steps.traffic()[stage].up for stage, n in times.items())
    assert float(lines["e_fkmvc"][4]) == pytest.approx(up / 1e6, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "dataset: none is given"),
        (("--dataset=nosuch.csv",), "nosuch.csv: no such file"),
        (("--dataset={own}",), "the column 'who' of view 0 has cells such as 'p0'.*id=who"),
        (("--dataset={own}", "--id=who"), "n_clusters: none is given, and there are no labels"),
        (("--dataset=digits", "--n_clusters=auto"), "n_clusters: is auto; .* give a number"),
        (("--dataset=digits", "--output_dir=x"), "output_dir: is no flag here"),
    ],
)
def test_what_is_wrong_with_the_data_is_said_once(tmp_path, arguments, said):
    own = tmp_path / "own.csv"
    own.write_text("who,hb,wbc\n" + "".join(f"p{i},{i}.5,{i * i}\n" for i in range(8)))
    code, out, err = binaries.launch(main, *(a.format(own=own) for a in arguments), "--noprogress")
    assert code == 2 and not out
    assert re.fullmatch(f"error: .*{said}.*\n", err)


@pytest.mark.slow
def test_nothing_may_travel():
    code, out, err = binaries.launch(
        main, "--dataset=digits", "--holds=rows", "--at_most=nothing", "--noprogress"
    )
    assert code == 0, err
    assert "local_kmeans" in out.split("do not apply:")[0]
    assert re.search("  e_fkmvc.*: sends sums over rows", out)
