"""Jobs and the files of nodes: what is wrong is said in one line."""

import contextlib
import dataclasses
import hashlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from jaxfedmvc.deploy import Job, Node, Server, flower
from jaxfedmvc.deploy.__main__ import main, parser
from jaxfedmvc.deploy.exchanges import Place, Shapes, asked_of, following
from jaxfedmvc.deploy.holding import load
from jaxfedmvc.deploy.plan import Card, Plan, agreement, hashed_ids, participants, skeleton
from jaxfedmvc.deploy.policy import Policy
from jaxfedmvc.deploy.wire import Refused
from jaxfedmvc.engine.run import draw_participants
from tests.deploy import local
from tests.engine import test_run as toys

SETTINGS = {"n_clusters": 3}
PRIVATE = {"method": "private_e_fkmvc", "rounds": 100}


def test_a_job_survives_json_and_toml(tmp_path):
    job = Job("a-1", "fmcsc", 3, SETTINGS | {"hidden": [8, 4], "learning_rate": 1}, rounds=2)
    assert Job.from_json(job.to_json()) == job
    path = tmp_path / "job.toml"
    path.write_text(
        'name="a-1"\nmethod="fmcsc"\nclients=3\nrounds=2\n[settings]\nn_clusters=3\n'
        "hidden=[8, 4]\nlearning_rate=1\n"
    )
    assert Job.from_toml(path) == job
    assert Job.from_toml(path).digest() == job.digest()
    assert dataclasses.replace(job, rounds=0).n_rounds == 0  # setup and finish alone


def test_another_setting_is_another_agreement():
    digests = {Job("a", "e_fkmvc", 2, SETTINGS | {"alpha": x}).digest() for x in (2.0, 3.0)}
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"method": "k_means"}, "method: got 'k_means'"),
        ({"method": ["fmcsc"]}, "method: got ['fmcsc']"),
        ({"method": "dpfmps"}, "method: dpfmps needs a secret that all agents share"),
        ({"method": "dpfmps_p2est"}, "method: dpfmps_p2est needs a secret"),
        ({"name": "../up"}, "name: got '../up'"),
        ({"clients": 0}, "clients: got 0"),
        ({"clients": True}, "clients: got True"),
        ({"rounds": 1.5}, "rounds: got 1.5"),
        ({"seed": -1}, "seed: got -1"),
        ({"keys": "mine"}, "keys: got 'mine'"),
        ({"late": "never"}, "late: got 'never'"),
        ({"deadline": 0}, "deadline: got 0"),
        ({"patience": 60}, "patience: got 60; allowed is 600 or more, the deadline"),
        ({"participation": 2.0}, "participation: got 2.0"),
        ({"fraction_bits": 31}, "fraction_bits: got 31; allowed is a whole number from 0 to 30"),
        ({"fraction_bits": 16, "participation": 0.5}, "fraction_bits: secure sums need all"),
        ({"settings": {}}, "settings: n_clusters is missing"),
        ({"settings": {"n_cluster": 3}}, "got 'n_cluster'; did you mean 'n_clusters'"),
        ({"settings": SETTINGS | {"tau": "x"}}, "settings: tau: got 'x'"),
        ({"settings": SETTINGS | {"tau": 10**400}}, "settings: tau: got 1000"),
        ({"settings": SETTINGS | {"n_restarts": 2.5}}, "settings: n_restarts: got 2.5"),
        ({"settings": SETTINGS | {"colour": 1}}, "settings: got 'colour'"),
        ({"settings": SETTINGS | {"fuzzifier": 0.5}}, "fuzzifier"),
        ({"settings": 3}, "settings: got 3"),
        # Of the run: noise would be calibrated for one round of a hundred, or for other clients.
        (PRIVATE | {"settings": SETTINGS | {"rounds": 1}}, "settings: got 'rounds', which the run"),
        (PRIVATE | {"settings": SETTINGS | {"n_clients": 9}}, "settings: got 'n_clients', which"),
        # Central noise protects secure sums of all clients and nothing less.
        (PRIVATE, "noise: got 'central', which protects nothing but"),
        (PRIVATE | {"participation": 0.5}, "noise: got 'central'"),
        (PRIVATE | {"late": "skip"}, "noise: got 'central'"),
        (PRIVATE | {"robust": {"rule": "median"}}, "noise: got 'central'"),
        (PRIVATE | {"fraction_bits": 16, "in_clear": ["setup[0]"]}, "noise: got 'central'"),
        (PRIVATE | {"fraction_bits": 16, "late": "skip"}, "fraction_bits: secure sums need all"),
        (PRIVATE | {"fraction_bits": 0}, "fraction_bits: got 0; allowed is 5 or more"),
        (PRIVATE | {"settings": SETTINGS | {"dp_epsilon": 1e12}}, "dp_epsilon: got 1000000000000"),
        (PRIVATE | {"settings": SETTINGS | {"dp_epsilon": 1e-300}}, "dp_epsilon: got 1e-300"),
        ({"hours": 3}, "job: got 'hours'"),
        ({"robust": "median"}, "robust: got 'median'"),
        ({"robust": {"rule": "mean"}}, "robust: rule: got 'mean'"),
        ({"robust": {"rule": "median", "share": 0.1}}, "robust: share: got 0.1"),
        ({"robust": {"rule": "trimmed_mean", "share": 0.7}}, "robust: share: got 0.7"),
        ({"robust": {"rule": "median", "ratios": {"round[0]": [0]}}}, "robust: ratios: got"),
        ({"robust": {"rule": "median", "ratios": {"round[7]": [0, 1]}}}, "ratios: got 'round[7]'"),
        (
            {"robust": {"rule": "median", "ratios": {"round[0]": [0, 1, 5.0, 1.0]}}},
            "robust: ratios: round[0]: quorum: got 1.0",
        ),
        ({"robust": {"rule": "median", "unguarded": "all"}}, "robust: unguarded: got 'all'"),
        ({"robust": {"rule": "median"}, "fraction_bits": 8}, "allowed is one of them"),
        ({"method": "vertcohirf", "late": "skip", "settings": {}}, "late: got 'skip'"),
    ],
)
def test_a_wrong_entry_of_a_job_is_named(entries, text):
    right = {"name": "a", "method": "e_fkmvc", "clients": 2, "settings": SETTINGS}
    with pytest.raises(ValueError, match=text.replace("[", r"\[")):
        Job.from_json(right | entries)


def test_noise_of_a_job_is_local_or_in_secure_sums():
    job = Job("a", "private_e_fkmvc", 2, SETTINGS, rounds=100, fraction_bits=16)
    assert job.make(2).done is None
    for more in ({}, {"late": "skip", "participation": 0.5}, {"fraction_bits": 16}):
        Job("a", "private_e_fkmvc", 2, SETTINGS | {"noise": "local"}, rounds=100, **more)


# --- Nodes ----------------------------------------------------------------------------------------

VIEWS = {0: np.arange(12.0).reshape(6, 2), 1: np.ones((6, 1))}


def test_a_node_reads_an_npz(tmp_path):
    holding = load(local.write_node(tmp_path, 3, VIEWS, ["fmcsc"], labels=np.arange(6)))
    assert holding.client == 3 and holding.n_rows == 6
    np.testing.assert_array_equal(holding.views[0], VIEWS[0])
    np.testing.assert_array_equal(holding.labels, np.arange(6))


@pytest.mark.parametrize(("file", "separator"), [("t.csv", ","), ("t.tsv", "\t"), ("T.CSV", ",")])
def test_a_node_reads_a_table(tmp_path, file, separator):
    lines = "id,hb,wbc,img_0,img_1,kind\nx,1,2,3,4,a\ny,5,6,7,8,b\n"
    (tmp_path / file).write_text(lines.replace(",", separator))
    (tmp_path / "node.toml").write_text(
        f'client=0\ndata="{file}"\nids="id"\nlabels="kind"\n'
        '[views]\n0=["hb","wbc"]\n1="img_*"\n'
        '[agrees]\nmethods=["fmcsc"]\n'
    )
    holding = load(tmp_path / "node.toml")
    np.testing.assert_array_equal(holding.views[0], [[1, 2], [5, 6]])
    np.testing.assert_array_equal(holding.views[1], [[3, 4], [7, 8]])
    assert holding.ids.tolist() == ["x", "y"] and holding.labels.tolist() == ["a", "b"]


def test_a_mark_of_a_spreadsheet_is_no_part_of_the_first_name(tmp_path):
    (tmp_path / "t.csv").write_text("id,hb\nx,1\ny,2\n", encoding="utf-8-sig")
    (tmp_path / "node.toml").write_text(
        'client=0\ndata="t.csv"\nids="id"\n[agrees]\nmethods=["fmcsc"]\n'
    )
    holding = load(tmp_path / "node.toml")
    assert holding.ids.tolist() == ["x", "y"] and holding.views[0].shape == (2, 1)


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("hb,wbc,hb\n1,2,3\n4,5,6\n")
    (tmp_path / "node.toml").write_text('client=0\ndata="t.csv"\n[agrees]\nmethods=["fmcsc"]\n')
    with pytest.raises(ValueError, match=r"data: .*t.csv has the column 'hb' twice"):
        load(tmp_path / "node.toml")


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("", "has no row"),
        ("p,kind\nx,a\n", "views: .*t.csv has no column but p, kind"),
        ("p,hb,kind\n", "has no row"),
        ("p;hb;kind\nx;1,5;a\n", "line 2 of .* has 2 cells, where its head has 1; cells are sep"),
        ("p,hb,kind\n\nx,1,a\ny,2\n", "line 4 of .* has 2 cells, where its head has 3"),
        ("p,hb,kind\n\nx,1,a\ny,,b\n", "hb is '' in line 4 of .*; allowed is a number, in every"),
        ('p,hb,kind\n"x\nx",1,a\ny,?,b\n', "hb is '[?]' in line 4"),
        ("p,hb,kind\nx,1,a\ny,1_000,b\n", "hb is '1_000' in line 3 of .*; allowed is a number"),
        ("p,hb,kind\nx,\uff11,a\ny,2,b\n", "hb is '\uff11' in line 2 of .*; allowed is a number"),
        ("p,hb,kind\nx,1,a\n x,2,b\n", "ids: 'x' is there twice in p"),
        ("p,hb,kind\nx,1,a\n ,2,b\n", "ids: one is empty in p"),
        ("p,hb,kind\nx,1,a\ny,2,\n", "labels: 1 rows have none in kind"),
    ],
)
def test_what_is_wrong_with_a_table_is_found_by_its_line(table, text, tmp_path):
    (tmp_path / "t.csv").write_text(table)
    (tmp_path / "node.toml").write_text(
        'client=0\ndata="t.csv"\nids="p"\nlabels="kind"\n'
        '[agrees]\nmethods=["fmcsc"]\nshare_counts=true\n'
    )
    with pytest.raises(ValueError, match=text):
        load(tmp_path / "node.toml")


def test_blanks_and_empty_lines_of_a_table_do_not_count(tmp_path):
    (tmp_path / "t.csv").write_text("p , hb\n x, 1\n\ny ,2 \n\n")
    (tmp_path / "node.toml").write_text(
        'client=0\ndata="t.csv"\nids="p"\n[agrees]\nmethods=["fmcsc"]\n'
    )
    holding = load(tmp_path / "node.toml")
    assert holding.ids.tolist() == ["x", "y"] and holding.views[0].tolist() == [[1], [2]]


def test_ids_and_labels_of_arrays_are_checked_as_those_of_tables(tmp_path):
    path = local.write_node(tmp_path, 0, {0: np.eye(3)}, ["fmcsc"], labels=[0, np.nan, 1])
    with pytest.raises(ValueError, match="labels: 1 rows have none"):
        load(path)
    path.write_text(path.read_text().replace("share_counts = true", "share_counts = false"))
    assert load(path).n_rows == 3  # nobody is sent them
    np.savez(tmp_path / "data0.npz", view_0=np.eye(3), ids=[7, 5, 7])
    with pytest.raises(ValueError, match="ids: '7' is there twice"):
        load(path)


def test_a_node_refuses_a_feature_that_float32_rounds_away(tmp_path):
    rows = "\n".join(f"{i},{1.7e9 + i}" for i in range(9))
    (tmp_path / "t.csv").write_text(f"hb,seconds\n{rows}\n")
    (tmp_path / "node.toml").write_text('client=0\ndata="t.csv"\n[agrees]\nmethods=["fmcsc"]\n')
    with pytest.raises(ValueError, match="column 'seconds': got numbers that float32 rounds"):
        load(tmp_path / "node.toml")


@pytest.mark.parametrize("views", ["", '[views]\n0=["a[b]","ab"]\n', '[views]\n0=["a[b]","a*"]\n'])
def test_a_column_is_found_by_its_name_though_it_reads_as_a_pattern(tmp_path, views):
    (tmp_path / "t.csv").write_text("a[b],ab\n1,2\n3,4\n")
    (tmp_path / "node.toml").write_text(
        f'client=0\ndata="t.csv"\n{views}[agrees]\nmethods=["fmcsc"]\n'
    )
    np.testing.assert_array_equal(load(tmp_path / "node.toml").views[0], [[1, 2], [3, 4]])


def test_columns_of_a_table_have_one_order_on_every_node(tmp_path):
    node = 'client={}\ndata="t{}.csv"\n[views]\n0=["wbc","h*"]\n[agrees]\nmethods=["fmcsc"]\n'
    (tmp_path / "t0.csv").write_text("hb,hc,wbc,age\n1,2,3,40\n4,5,6,50\n")
    (tmp_path / "t1.csv").write_text("age,wbc,hc,hb\n40,3,2,1\n50,6,5,4\n")
    for client in (0, 1):
        (tmp_path / "node.toml").write_text(node.format(client, client))
        found = load(tmp_path / "node.toml").views[0]
        np.testing.assert_array_equal(found, [[3, 1, 2], [6, 4, 5]])
        alone = node.format(client, client).replace('[views]\n0=["wbc","h*"]\n', "")
        (tmp_path / "node.toml").write_text(alone)
        found = load(tmp_path / "node.toml").views[0]
        np.testing.assert_array_equal(found[:, 0], [40, 50])  # without a list by their names
    (tmp_path / "node.toml").write_text(node.format(1, 1).replace("h*", "hbc"))
    with pytest.raises(ValueError, match=r"views: 'hbc' matches no column of .*t1.csv"):
        load(tmp_path / "node.toml")


RANGES = "column,least,most\nwbc,0,20\nhb,-1e0,3\nhc,1.7e9,1700000010\nage,0,99\n"


def table_node(folder, client, rows, views='0=["wbc","h*"]', ranges=RANGES):
    """A node of a table with the columns hb, hc, wbc and age; returns its file."""
    (folder / f"t{client}.csv").write_text(f"hb,hc,wbc,age\n{rows}")
    (folder / f"ranges{client}.csv").write_text(ranges)
    path = folder / f"node{client}.toml"
    path.write_text(
        f'client={client}\ndata="t{client}.csv"\nranges="ranges{client}.csv"\n'
        f'folder="state{client}"\n[views]\n{views}\n'
        '[agrees]\nmethods=["e_fkmvc"]\nshared_keys=true\n'
    )
    return path


def test_columns_are_scaled_by_the_ranges_of_a_file(tmp_path, capsys):
    path = table_node(tmp_path, 0, "1,1700000001,5,40\n0,1700000002,30,50\n")
    (x,) = load(path).views.values()
    np.testing.assert_allclose(x, [[0.25, 0.5, 0.1], [1.5, 0.25, 0.2]], rtol=1e-6)
    assert main(["check", str(path)]) == 0
    told = capsys.readouterr().out
    assert f"columns: wbc, hb, hc (hash {load(path).hashed_columns()[0][:8]})" in told
    assert "outside their ranges: 1 of 6 numbers, most in wbc (1)" in told


def test_ranges_that_are_written_otherwise_have_the_same_hash(tmp_path):
    rows = "1,1700000001,5,40\n0,1700000002,30,50\n"
    texts = (
        RANGES,
        "\ufeffmost , least,column\n99,1,age\n3.0,-1, hb \n\n17.0000001e8,1700000000.0,hc\n"
        '2e1,-0,"wbc"\n1,0,"not, here"\n',  # in another order, with columns of no view
        RANGES.replace("-1e0", "-1.0000001"),
    )
    same, other, changed = (
        load(table_node(tmp_path, i, rows, ranges=text)).hashed_columns()
        for i, text in enumerate(texts)
    )
    assert same == other != changed


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("column,", "columns,"), r"has the columns \['columns', 'least', 'most'\]; allowed are"),
        (("hb,", "hbc,"), "ranges: 'hb' has none; there are those of wbc, hbc, hc, age"),
        (("age,", "hb,"), "ranges: .*ranges0.csv has 'hb' twice"),
        (("0,20", "20,20"), "ranges: 'wbc' is from 20 to 20 in .*; allowed is a least below"),
        (("0,20", "nan,20"), "ranges: 'wbc' is from nan to 20"),
        (("0,20", "0,inf"), "ranges: 'wbc' is from 0 to inf"),
        (("0,20", "0,high"), "ranges: most is 'high' in line 2 of"),
        (("0,20", "0"), "ranges: line 2 of .* has 2 cells"),
    ],
)
def test_what_is_wrong_with_a_file_of_ranges_is_named(change, text, tmp_path):
    path = table_node(tmp_path, 0, "1,1,1,1\n2,2,2,2\n", ranges=RANGES.replace(*change))
    with pytest.raises(ValueError, match=text):
        load(path)


def test_arrays_have_no_ranges_and_ranges_are_a_table(tmp_path):
    path = local.write_node(tmp_path, 0, VIEWS, ["fmcsc"])
    text = path.read_text()
    (tmp_path / "ranges.csv").write_text(RANGES)
    for name, told in (
        ("ranges.csv", "ranges: are of a table's columns"),
        ("ranges.txt", "ranges: got .*ranges.txt.; allowed is a .csv or .tsv file"),
        ("other.csv", "ranges: .*other.csv is not there"),
    ):
        path.write_text(f'ranges = "{name}"\n{text}')
        with pytest.raises(ValueError, match=told):
            load(path)


@pytest.mark.parametrize(
    "change", [{"views": '0=["hc","wbc","hb"]'}, {"ranges": RANGES.replace("20", "10")}]
)
def test_nodes_of_other_columns_or_ranges_make_no_plan(change, tmp_path):
    rows = "".join(f"{i % 3},{1_700_000_000 + i},{i},{i}\n" for i in range(6))
    job = local.job_of("e_fkmvc", 2, small={"n_restarts": 1}, patience=0.5, deadline=0.1)
    for other, is_alike in (({}, True), (change, False)):
        folder = tmp_path / str(is_alike)
        folder.mkdir()
        paths = {0: table_node(folder, 0, rows), 1: table_node(folder, 1, rows, **other)}
        server = Server(
            job, local.Local(local.nodes_of(paths)), folder / "s", say=lambda line: None
        )
        server._register()
        if is_alike:
            server._make_plan()
        else:
            with pytest.raises(ValueError, match="client 1: view 0 has columns of other names, in"):
                server._make_plan()


@pytest.mark.parametrize("name", ["ids", "labels"])
def test_a_misspelt_column_of_ids_or_labels_is_no_feature_instead(name, tmp_path):
    (tmp_path / "t.csv").write_text("a,diagnosis\n1,0\n2,1\n")
    (tmp_path / "node.toml").write_text(
        f'client=0\ndata="t.csv"\n{name}="diagnose"\n[agrees]\nmethods=["fmcsc"]\n'
    )
    with pytest.raises(ValueError, match=f"{name}: 'diagnose' is no array or column of .*t.csv"):
        load(tmp_path / "node.toml")


@pytest.mark.parametrize("name", ["ids", "labels"])
def test_a_pattern_takes_neither_ids_nor_labels_for_features(name, tmp_path):
    (tmp_path / "t.csv").write_text(f"hb,{name}\n1,2\n4,5\n")
    (tmp_path / "node.toml").write_text(
        'client=0\ndata="t.csv"\n[views]\n0="*"\n[agrees]\nmethods=["fmcsc"]\n'
    )
    with pytest.raises(ValueError, match=rf"views: .* match the columns \['hb', '{name}'\]"):
        load(tmp_path / "node.toml")


def test_a_node_reads_an_npy(tmp_path):
    np.save(tmp_path / "x.npy", VIEWS[0])
    (tmp_path / "node.toml").write_text(
        'client=0\ndata="x.npy"\n[views]\n1=""\n[agrees]\nmethods=["fmcsc"]\n'
    )
    assert load(tmp_path / "node.toml").views.keys() == {1}


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("client = 3", "client = -1", "client: got -1"),
        ("client = 3", f"client = {2**29}", f"allowed is a whole number from 0 to {2**29 - 1}"),
        ("client = 3", "", "client is missing"),
        ("client = 3", "client = 3\ncolour = 1", "got 'colour'"),
        ("client = 3", "client = ", "no TOML"),
        ('"fmcsc"', '"k_means"', "agrees.methods"),
        ('methods = ["fmcsc"]', "", "agrees.methods is missing"),
        ('methods = ["fmcsc"]', 'methods = "fmcsc"', "agrees.methods: got 'fmcsc'"),
        ('methods = ["fmcsc"]', 'methods = [["fmcsc"]]', r"agrees.methods: got \[\['fmcsc'\]\]"),
        ("least_clients = 2", 'in_clear = "setup[2]"', r"agrees.in_clear: got 'setup\[2\]'"),
        ("least_clients = 2", "in_clear = 2", "agrees.in_clear: got 2"),
        ("least_clients = 2", "least_clients = 0", "agrees.least_clients: got 0"),
        ("least_clients = 2", "most_jobs = 0", "agrees.most_jobs: got 0"),
        ("share_counts = true", "share_counts = 1", "agrees.share_counts: got 1"),
        ("share_counts = true", "share_count = true", "agrees: got 'share_count'"),
        ("[agrees]", '[views]\n0 = "rows"\n[agrees]', "wanted are"),
        ("[agrees]", '[views]\nx = "rows"\n[agrees]', "views: got"),
        ("data3.npz", "data3.txt", "data: got"),
        ("data3.npz", "data4.npz", "data: .*data4.npz is not there"),
        ("client = 3", 'client = 3\nids = "patient"', "ids: 'patient' is no array or column of"),
        ("share_counts = true", "settings = {tau = 3}", "agrees.settings.tau: got 3"),
        ("share_counts = true", "settings = {ronds = {most = 2}}", "agrees.settings: got 'ronds'"),
        ("share_counts = true", "secure = true", "identity is missing, which secure sums need"),
    ],
)
def test_a_wrong_entry_of_a_node_is_named(before, after, text, tmp_path):
    path = local.write_node(tmp_path, 3, VIEWS, ["fmcsc"])
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(ValueError, match=text):
        load(path)


@pytest.mark.parametrize("damage", ["pickle", "text", "cut", "nan", "rows", "words"])
def test_damaged_data_is_named(damage, tmp_path):
    path = local.write_node(tmp_path, 0, VIEWS, ["fmcsc"])
    file = tmp_path / "data0.npz"
    if damage == "pickle":
        np.savez(file, view_0=np.array([{}, {}], object), allow_pickle=True)
    elif damage == "text":
        file.write_text("view_0")
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-40])
    elif damage == "nan":
        np.savez(file, view_0=np.full((2, 2), np.nan))
    elif damage == "rows":
        np.savez(file, view_0=np.ones((2, 2)), view_1=np.ones((3, 2)))
    else:
        np.savez(file, view_0=np.array([["a"], ["b"]]))
    with pytest.raises(ValueError, match=r"data|view"):
        load(path)


def test_a_job_that_asks_for_more_is_refused_with_a_reason(tmp_path):
    more = "[agrees.settings]\nupload_noise = {least = 0.5}\nlocal_epochs = {most = 20}"
    path = local.write_node(
        tmp_path, 0, VIEWS, ["fmcsc"], shared="false", least=3, more="least_rows = 6\n" + more
    )
    policy = load(path).policy
    fine = SETTINGS | {"upload_noise": 1.0, "local_epochs": 5}

    def refusal(method="fmcsc", clients=3, rows=6, keys="own", **changed):
        job = Job(
            "a", method, clients, (fine if method == "fmcsc" else SETTINGS) | changed, keys=keys
        )
        with pytest.raises(Refused) as refused:
            policy.check(job, clients, rows)
        return str(refused.value)

    policy.check(Job("a", "fmcsc", 3, fine), 3, 6)
    assert refusal("e_fkmvc").startswith("method: e_fkmvc")
    assert refusal(clients=2).startswith("clients: 2")
    assert refusal(rows=5).startswith("rows: ")
    assert refusal(keys="shared").startswith("keys: shared")
    assert refusal(upload_noise=0.1).startswith("upload_noise: 0.1")
    assert refusal(upload_noise="none").startswith("upload_noise: none")
    assert refusal(local_epochs=100).startswith("local_epochs: 100")


def test_bounds_hold_for_what_a_run_is_and_spends():
    """Known answers: 3 + rounds releases of multiplier z spend epsilon(z / sqrt(3 + rounds))."""
    bounds = {"dp_epsilon": {"most": 8}, "rounds": {"most": 10}, "n_clients": {"least": 3}}
    policy = Policy(("private_e_fkmvc", "e_fkmvc"), settings=bounds, shared_keys=True)
    others = {"noise": "local"}

    def refusal(clients=3, method="private_e_fkmvc", rounds=5, keys="own", **changed):
        settings = SETTINGS | (others if method == "private_e_fkmvc" else {}) | changed
        job = Job("a", method, clients, settings, rounds=rounds, keys=keys)
        with pytest.raises(Refused) as refused:
            policy.check(job, clients, 6)
        return str(refused.value)

    for fine in ({}, {"dp_epsilon": 1}, {"noise_multiplier": 2.0, "dp_epsilon": 9}):
        policy.check(Job("a", "private_e_fkmvc", 3, SETTINGS | others | fine, rounds=5), 3, 6)
    assert refusal(dp_epsilon=9).startswith("dp_epsilon: 8.99")
    # What is spent is eight releases' of multiplier sqrt(2): one's of 1 / 2, and not a budget's.
    assert refusal(noise_multiplier=2**0.5).startswith("dp_epsilon: 9.99")
    assert refusal(noise_multiplier=1e-6).startswith("dp_epsilon: 4")
    assert refusal(noise_multiplier=0).startswith("dp_epsilon: inf")
    # Whoever knows the job's seed draws the noise again.
    assert refusal(keys="shared", dp_epsilon=1).startswith("dp_epsilon: inf")
    assert refusal(rounds=11).startswith("rounds: 11")
    assert refusal(clients=2).startswith("n_clients: 2")
    # Those that take part count, and not how many the job says that there are.
    with pytest.raises(Refused, match="n_clients: 2; this node wants 3"):
        policy.check(Job("a", "private_e_fkmvc", 3, SETTINGS | others, rounds=5), 2, 6)
    assert refusal(method="e_fkmvc").startswith("e_fkmvc has no setting 'dp_epsilon'")
    Policy(("e_fkmvc",), settings={"rounds": {"most": 50}}).check(
        Job("a", "e_fkmvc", 3, SETTINGS), 3, 6
    )


def test_nan_is_within_no_bounds(monkeypatch):
    monkeypatch.setattr(Job, "setting", lambda job, name: float("nan"))
    policy = Policy(("e_fkmvc",), settings={"rounds": {"most": 50}})
    with pytest.raises(Refused, match="rounds: nan; this node wants 50 or less"):
        policy.check(Job("a", "e_fkmvc", 3, SETTINGS), 3, 6)


# --- Plans ----------------------------------------------------------------------------------------


def test_a_plan_is_the_federation_of_the_same_clients():
    cards = [Card(4, {1: 3}, 7), Card(1, {1: 3, 0: 2}, 5), Card(0, {0: 2, 1: 3}, 9)]
    plan = Plan.of_cards([*cards, Card(6, {0: 2}, 1)], False)
    assert [g.view_ids for g in plan.groups] == [(0, 1), (0,), (1,)]
    assert plan.groups[0].clients == (0, 1) and plan.groups[0].capacity == 9
    assert plan.view_dims == (2, 3) and plan.find(1) == (0, 1)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("first", "plan", "text"),
    [
        ({"view_ids": [-1, 0]}, {}, "a view that nobody holds"),
        ({"view_ids": [0, 2]}, {}, "a view that nobody holds"),
        ({}, {"view_dims": [2]}, "a view that nobody holds"),
        ({}, {"view_dims": [2, 3, 4]}, "a view that nobody holds"),
        ({}, {"groups": []}, "a view that nobody holds"),
        ({"clients": []}, {}, "an empty cohort"),
        ({"capacity": 0}, {}, "an empty cohort"),
        ({"capacity": 2**31}, {}, "an empty cohort"),
        ({"clients": [0, 4]}, {}, "a client that is there twice"),
        ({"clients": [1, 0]}, {}, "do not ascend"),
        ({"view_ids": [1, 0]}, {}, "do not ascend"),
        ({"view_ids": [0, 1, 1]}, {}, "do not ascend"),
        ({"clients": [-1, 0]}, {}, "a number that there is not"),
        ({"clients": [0, 2**40]}, {}, "a number that there is not"),
        ({}, {"view_dims": [0, 3]}, "a view without features"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(first, plan, text):
    groups = [{"view_ids": [0, 1], "clients": [0, 1], "capacity": 9}]
    groups += [{"view_ids": [1], "clients": [4], "capacity": 7}]
    told = {"groups": [groups[0] | first, groups[1]], "view_dims": [2, 3], "vertical": False}
    with pytest.raises(ValueError, match=text):
        Plan.from_json(told | plan)


def test_a_skeleton_has_the_rows_and_the_numbers_of_the_clients():
    cards = [Card(4, {1: 3}, 7), Card(1, {0: 2, 1: 3}, 5), Card(0, {0: 2, 1: 3}, 9)]
    plan = Plan.of_cards(cards, False)
    two, one = skeleton(plan, {0: 9, 1: 5, 4: 7}).cohorts
    assert [two.client_ids.tolist(), one.client_ids.tolist()] == [[0, 1], [4]]
    assert two.mask.sum(axis=1).tolist() == [9, 5] and one.mask.sum(axis=1).tolist() == [7]
    ids = [row[row >= 0].tolist() for row in (*two.sample_ids, *one.sample_ids)]
    assert ids == [list(range(9)), list(range(9, 14)), list(range(14, 21))]
    assert [x.shape for x in two.views] == [(2, 9, 2), (2, 9, 3)]
    assert skeleton(plan).cohorts[0].mask.all()
    shared = Plan.of_cards([Card(0, {0: 2}, 3, "a"), Card(1, {1: 3}, 3, "a")], True)
    assert [c.sample_ids.tolist() for c in skeleton(shared).cohorts] == [[[0, 1, 2]]] * 2


def test_a_hash_of_ids_tells_order_and_ids_apart():
    """Known answer: SHA-256 of the ids, a line each."""
    expected = hashlib.sha256(b"10\n2\n33").hexdigest()
    assert hashed_ids(np.array([10, 2, 33])) == hashed_ids(np.array(["10", "2", "33"])) == expected
    assert len({hashed_ids(ids) for ids in ([1, 23], [12, 3], [23, 1])}) == 3


@pytest.mark.parametrize(
    ("rounds", "done", "path"),
    [
        (2, None, "setup00 setup01 round00 round10 finish10"),
        (0, None, "setup00 setup01 finish00"),
        (9, lambda server: server >= 3, "setup00 setup01 round00 finish00"),
    ],
)
def test_exchanges_follow_one_another_until_the_rounds_are_made_or_it_is_done(rounds, done, path):
    method = SimpleNamespace(setup=(0, 0), round=(0,), finish=(0,), done=done)
    made, place = [], None
    # The server's state is the number of exchanges made.
    while (place := following(method, place, rounds, np.int32(len(made)))) and len(made) < 9:
        made.append(f"{place.stage}{place.round}{place.phase}")
    assert " ".join(made) == path


def test_a_phase_that_the_engine_refuses_is_refused_in_a_job():
    plan = Plan.of_cards([Card(0, {0: 1, 1: 2}, 5)], False)
    with pytest.raises(ValueError, match=r"round\[1\]\.who: got 'all'"):
        Shapes(toys.changed("round", 1, who="all"), plan)
    lead = toys.TOY.round[1].client
    shapes = Shapes(toys.changed("round", 1, client=lambda *args: lead(*args)[:2]), plan)
    with pytest.raises(ValueError, match=r"round\[1\]\.client: returned 2 values"):
        shapes.at(Place("round", 0, 1))


def test_a_stack_of_the_leader_is_one_message_and_shapes_follow_those_of_the_server():
    cards = [Card(i, {0: 1, 1: 2}, 5) for i in range(3)] + [Card(3, {1: 2}, 4)]

    def follow(key, server, messages, weights):
        (message,) = messages  # of the first kind alone
        return {"center": server["center"], "leader": message["id"]}, {}

    plan = Plan.of_cards(cards, False)
    shapes, place = Shapes(toys.changed("round", 1, server=follow), plan), Place("round", 0, 1)
    for shape in ((2,), (7,)):  # what the server knows may shrink or grow between rounds
        center = jax.ShapeDtypeStruct(shape, np.float32)
        travels, after = shapes.exchange(place, shapes.start | {"center": center})
        assert list(travels) == [0] and travels[0].sent["center"].shape == shape
        assert travels[0].message["id"].shape == after["leader"].shape == (1,)
        assert after["center"].shape == shape


def test_the_leader_is_the_client_with_the_least_number():
    leader, everyone = toys.TOY.round[1], toys.TOY.round[0]
    assert asked_of(leader, [4, 2, 3]) == [2] and asked_of(everyone, [4, 2, 3]) == [4, 2, 3]


def test_an_agreement_is_of_the_job_and_of_the_plan():
    job = Job("a", "e_fkmvc", 2, SETTINGS)
    plans = [Plan.of_cards([Card(i, {0: 2}, 5) for i in ids], False) for ids in ((0, 1), (0, 2))]
    jobs = [job, dataclasses.replace(job, seed=1)]
    assert len({agreement(job, plan) for job in jobs for plan in plans}) == 4


def test_who_takes_part_is_drawn_from_the_jobs_seed():
    """As the engine draws from the run's key, on a federation of as many clients."""
    plan = Plan.of_cards([Card(3 * i, {0: 2}, 5) for i in range(8)], False)
    drawn = []
    for seed in (0, 5):
        job = Job("a", "e_fkmvc", 8, SETTINGS, participation=0.5, seed=seed)
        (places,) = draw_participants(skeleton(plan), jax.random.key(seed), 0.5)
        drawn.append(participants(job, plan))
        assert drawn[-1] == [[3 * int(k) for k in places]] and len(drawn[-1][0]) == 4
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("cards", "vertical", "text"),
    [
        ([Card(0, {0: 2}, 5), Card(0, {0: 2}, 5)], False, "two nodes"),
        ([Card(0, {0: 2}, 5), Card(1, {0: 3}, 5)], False, "view 0 has 3 features"),
        ([Card(0, {1: 2}, 5)], False, "views: "),
        (
            [Card(0, {0: 2}, 5), Card(1, {0: 2}, 2**30)],
            False,
            r"groups\[0\].capacity: got 1073741824 rows for each of 2 clients, .* allowed are 1000",
        ),
        ([Card(0, {0: 2}, 5, "a"), Card(1, {1: 2}, 5, "b")], True, "samples differ"),
        ([Card(0, {0: 2}, 5, "a"), Card(1, {1: 2}, 6, "a")], True, "samples differ"),
    ],
)
def test_nodes_that_make_no_federation_are_named(cards, vertical, text):
    with pytest.raises(ValueError, match=text):
        Plan.of_cards(cards, vertical)


# --- The page -------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "real-nodes.md").read_text()


def test_the_files_of_the_first_try_fit_each_other(tmp_path):
    part = PAGE[PAGE.index("## A first try") : PAGE.index("## What each party needs")]
    node, job = re.findall(r"```toml\n(.*?)```", part, flags=re.DOTALL)
    columns = [name.strip('"') for name in re.findall(r'"\w+"', node.split("[views]")[1])][:5]
    rows = np.random.default_rng(0).random((8, 5))
    lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    (ranges,) = re.findall(r"```text\n(.*?)```", part, flags=re.DOTALL)
    (tmp_path / "ranges.csv").write_text(ranges)
    (tmp_path / "node.toml").write_text(node)
    (tmp_path / "job.toml").write_text(job)
    holding = load(tmp_path / "node.toml")
    assert [view.shape for view in holding.views.values()] == [(8, 3), (8, 2)]
    asked = Job.from_toml(tmp_path / "job.toml")
    holding.policy.check(asked, asked.clients, len(rows))


def test_the_files_that_the_documentation_shows_are_read(tmp_path):
    blocks = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    node = next(text for text in blocks if "[agrees.settings]" in text)
    (job,) = (text for text in blocks if "clients = 3" in text and text != node)
    others = {"patient": np.arange(6), "diagnosis": np.arange(6)}
    np.savez(tmp_path / "hospital0.npz", blood=VIEWS[0], imaging=VIEWS[1], **others)
    (tmp_path / "node.toml").write_text(node)
    (tmp_path / "job.toml").write_text(job)
    holding = load(tmp_path / "node.toml")
    assert holding.views.keys() == {0, 1} and holding.policy.least_clients == 3
    holding.policy.check(Job.from_toml(tmp_path / "job.toml"), 3, 50)
    (rule,) = (text for text in blocks if "[robust]" in text)
    (tmp_path / "robust.toml").write_text(job + rule)
    assert Job.from_toml(tmp_path / "robust.toml").robust["share"] == 0.4
    names = {field.name for field in dataclasses.fields(Policy)}
    assert {
        line.split()[0]
        for line in node.split("[agrees]")[1].split("[")[0].splitlines()
        if "=" in line
    } <= names


def test_the_commands_that_the_documentation_shows_are_understood():
    text = PAGE.replace("\\\n", " ")
    commands = re.findall(r"^    python -m jaxfedmvc\.deploy (.*)$", text, flags=re.MULTILINE)
    assert {line.split()[0] for line in commands} == {"check", "node", "submit"}
    for line in commands:
        parser().parse_args(shlex.split(line))


def test_a_command_says_what_is_wrong_in_one_line(tmp_path, capsys):
    path = local.write_node(tmp_path, 3, VIEWS, ["fmcsc"])
    assert main(["check", str(path)]) == 0
    said = capsys.readouterr().out
    assert "client 3: 6 rows; ids: none, labels: none" in said
    assert "  view 0: 2 features, from 0 to 11\n" in said
    path.write_text(path.read_text().replace("[agrees]", "[agrees]\nleast_rows = 7"))
    assert main(["check", str(path)]) == 2
    assert capsys.readouterr().err.startswith(
        "agrees.least_rows: got 7, where this node has 6 rows"
    )
    path.write_text("client = ")
    assert main(["check", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "job.toml").write_text("name = 3")
    assert main(["submit", str(tmp_path / "job.toml"), "--superlink=127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.startswith("job: method is missing")
    assert main(["check", str(tmp_path / "no.toml")]) == 2
    assert (
        capsys.readouterr().err == f"file: {tmp_path / 'no.toml'} is not there; allowed is a file\n"
    )
    for name in ("auth_key", "root_certificates"):
        assert main(["node", str(path), "--superlink=127.0.0.1:1", f"--{name}={tmp_path}/no"]) == 2
        assert capsys.readouterr().err.startswith(f"{name}: {tmp_path}/no is not there")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:", ":9092", "hospital:http"])
def test_an_address_needs_a_port(address, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["node", "node.toml", f"--superlink={address}"])
    assert f"--superlink: got '{address}'; allowed is HOST:PORT" in capsys.readouterr().err


def submitted(folder, monkeypatch, code=0, made=False):
    """Submits a job to a Flower that says `code`; returns what it is told, and what comes back."""
    pytest.importorskip("flwr", reason="Flower is not installed: the extra flower")
    folder.mkdir()
    (folder / "ca.crt").touch()
    job, results = folder / "job.toml", folder / "results"
    job.write_text('name = "first"\nmethod = "e_fkmvc"\nclients = 2\nsettings = {n_clusters = 3}\n')
    told = []

    def run(command, env, check):
        given = tomllib.loads(Path(command[command.index("--run-config") + 1]).read_text("utf-8"))
        there = tomllib.loads(Path(env["FLWR_HOME"], "config.toml").read_text("utf-8"))
        told.append((given, there["superlink"]["job"]))
        if made:
            (results / "first").mkdir(parents=True)
            (results / "first" / "summary.json").touch()
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", run)
    command = ["submit", str(job), "--superlink=127.0.0.1:1", f"--folder={results}"]
    found = main([*command, f"--root_certificates={folder / 'ca.crt'}"])
    return told[0], found


def test_who_ends_submit_is_told_that_the_job_goes_on(tmp_path, monkeypatch, capsys):
    pytest.importorskip("flwr", reason="Flower is not installed: the extra flower")
    job = tmp_path / "job.toml"
    job.write_text('name = "a"\nmethod = "e_fkmvc"\nclients = 2\nsettings = {n_clusters = 3}\n')
    monkeypatch.setattr(subprocess, "run", mock.Mock(side_effect=KeyboardInterrupt))
    assert main(["submit", str(job), "--superlink=127.0.0.1:1", f"--folder={tmp_path}"]) == 1
    assert "a job that was submitted goes on, until `flwr stop" in capsys.readouterr().err


def test_any_name_of_a_folder_reaches_flower(tmp_path, monkeypatch):
    folder = tmp_path / 'Klinik "Süd" 😀'
    (given, there), _ = submitted(folder, monkeypatch)
    assert given == {"job": str(folder / "job.toml"), "folder": str(folder / "results")}
    assert there["root-certificates"] == str(folder / "ca.crt")


@pytest.mark.parametrize(("code", "made", "found"), [(0, True, 0), (0, False, 1), (3, True, 3)])
def test_a_job_that_is_not_finished_is_an_error_of_the_command(
    code, made, found, tmp_path, monkeypatch, capsys
):
    assert submitted(tmp_path / "here", monkeypatch, code, made)[1] == found
    assert ("job first: is not finished; submit it again" in capsys.readouterr().err) != made


def test_what_stops_a_job_is_the_last_line_of_its_app(tmp_path, capsys):
    pytest.importorskip("flwr", reason="Flower is not installed: the extra flower")
    (tmp_path / "job.toml").write_text(
        'name = "first"\nmethod = "e_fkmvc"\nclients = 2\nsettings = {n_clusters = 3}\n'
    )
    for file, name, what in (
        ("job.toml", "first", "Not a directory"),
        ("none.toml", tmp_path / "none.toml", "No such file"),
    ):
        given = {"job": str(tmp_path / file), "folder": str(tmp_path / "job.toml")}
        flower.server_app()(None, SimpleNamespace(run_config=given))
        told = capsys.readouterr().out
        assert told.startswith(f"job {name}: stopped: ") and what in told and told.count("\n") == 1


def test_an_app_runs_its_job_in_a_folder_of_its_name_in_full_precision(tmp_path, monkeypatch):
    pytest.importorskip("flwr", reason="Flower is not installed: the extra flower")
    (tmp_path / "job.toml").write_text(
        'name = "first"\nmethod = "e_fkmvc"\nclients = 2\nsettings = {n_clusters = 3}\n'
    )
    made = []

    class Made:
        def __init__(self, job, transport, folder, say):
            made.append((job.clients, folder))

        def run(self):
            made.append(jax.config.jax_default_matmul_precision)

    monkeypatch.setattr(flower, "Server", Made)
    given = {"job": str(tmp_path / "job.toml"), "folder": str(tmp_path / "results")}
    with jax.default_matmul_precision("bfloat16"):
        flower.server_app()(None, SimpleNamespace(run_config=given))
    assert made == [(2, tmp_path / "results" / "first"), "float32"]


def test_a_node_says_what_is_wrong_with_its_key(tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed: the extra flower")
    node = Node(local.write_node(tmp_path, 0, VIEWS, ["fmcsc"]))
    key = ed25519.Ed25519PrivateKey.generate()
    form = serialization.PrivateFormat.OpenSSH
    nothing = serialization.NoEncryption()
    (tmp_path / "other").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, nothing))
    for name, text in (("other", "no ECDSA key"), ("node0.toml", "no private key without a pass")):
        with pytest.raises(ValueError, match=f"^auth_key: {tmp_path / name} is {text}"):
            flower.serve(node, "127.0.0.1:1", key_file=tmp_path / name)
    ecdsa = ec.generate_private_key(ec.SECP384R1())
    (tmp_path / "open").write_bytes(ecdsa.private_bytes(serialization.Encoding.PEM, form, nothing))
    (tmp_path / "open").chmod(0o644)
    with pytest.raises(ValueError, match=r"^auth_key: other users of this machine may open"):
        flower.serve(node, "127.0.0.1:1", key_file=tmp_path / "open")


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [(412, 1, "was there in the last minute"), (401, 1, "its clock is more"), (500, 0, "")],
)
def test_why_no_node_of_a_key_is_taken_is_said_in_a_line(status, code, text, monkeypatch, caplog):
    name = "flwr.supernode.fleet_http_connection"
    fleet = pytest.importorskip(name, reason="Flower is not installed: the extra flower")

    @contextlib.contextmanager
    def refused(*_):
        try:
            error = ConnectionError()
            error.response = SimpleNamespace(status_code=status)
            raise error
        except ConnectionError:
            sys.exit(0)  # as the node does when it is interrupted, here by Flower
        yield

    monkeypatch.setattr(fleet, "http_request_response", refused)
    with pytest.raises(SystemExit) as ends, flower._connection("127.0.0.1:1", None, None):
        pass
    assert ends.value.code == code and text in caplog.text and bool(text) == bool(caplog.text)


def test_a_job_that_is_stopped_while_a_node_computes_ends_no_node(tmp_path, monkeypatch, caplog):
    run = pytest.importorskip("flwr.supercore.run", reason="Flower is not installed")
    node = Node(local.write_node(tmp_path, 0, VIEWS, ["fmcsc"]))
    received = [("first", None), ("second", None), KeyboardInterrupt]
    answered = []

    def receive():
        if isinstance(received[0], tuple):
            return received.pop(0)
        raise received[0]

    def answer(node, message, *_):
        answered.append(message)
        if message == "first":
            raise run.RunNotRunningException

    connection = contextlib.nullcontext((7, receive, *[None] * 6))
    monkeypatch.setattr(flower, "_connection", lambda *_: connection)
    monkeypatch.setattr(flower, "_answer", answer)
    with pytest.raises(KeyboardInterrupt):
        flower.serve(node, "127.0.0.1:1")
    assert answered == ["first", "second"] and "ended before it was answered" in caplog.text


def test_a_finished_job_of_other_settings_is_no_success_of_this_one(tmp_path, capsys):
    pytest.importorskip("flwr", reason="Flower is not installed: the extra flower")
    there = Job(name="first", method="e_fkmvc", clients=2, settings={"n_clusters": 3})
    folder = tmp_path / "results" / "first"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps(there.to_json()))
    for name in ("summary.json", "server.npz"):
        (folder / name).touch()
    job = tmp_path / "job.toml"
    job.write_text('name = "first"\nmethod = "e_fkmvc"\nclients = 2\nsettings = {n_clusters = 4}\n')
    command = ["submit", str(job), "--superlink=127.0.0.1:1", f"--folder={tmp_path / 'results'}"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"folder: {folder} holds another job") and "another folder" in said
