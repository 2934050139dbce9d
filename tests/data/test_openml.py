"""What OpenML sends becomes a file that `load` takes; nothing here uses the network."""

from types import SimpleNamespace
from urllib.error import URLError

import numpy as np
import pytest

from jaxfedmvc.data import load
from jaxfedmvc.data.openml import fetch, main
from jaxfedmvc.data.records import RECORDS


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXFEDMVC_DATA", str(tmp_path / "made" / "here"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "made" / "here"


@pytest.fixture
def openml(monkeypatch):
    """Lets a test say what OpenML sends, or raises; gives the numbers that were asked for."""
    asked = []

    def sends(answer):
        def fetch_openml(*, data_id, as_frame, parser):
            asked.append(data_id)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch_openml)
        return asked

    return sends


def table(n, width, targets):
    data = np.random.default_rng(0).integers(0, 5, (n, width)).astype(float)
    return SimpleNamespace(data=data, target=np.resize(np.array(targets, object), n))


def test_a_set_is_fetched_by_number_and_loaded_as_it_is(openml, folder):
    sent = table(104, 182, ["C", "B", "B"])
    asked = openml(sent)
    path = fetch("Chowdary-2006")
    assert asked == [46778] and path == folder / "chowdary_2006.npz"
    dataset = load("chowdary_2006")
    np.testing.assert_array_equal(dataset.views[0], sent.data)
    np.testing.assert_array_equal(dataset.labels, sent.target == "C")
    with np.load(path) as file:
        assert file["view_0"].dtype == np.float32 and file["labels"].dtype == np.int32
    assert [p.name for p in folder.iterdir()] == [path.name]


def test_nursery_loses_its_class_of_two(openml):
    sent = table(12960, 8, ["not_recom", "priority", "spec_prior", "very_recom"])
    sent.target[[5, 700]] = "recommend"
    openml(sent)
    fetch("nursery")
    dataset = load("nursery")
    np.testing.assert_array_equal(dataset.views[0], np.delete(sent.data, [5, 700], axis=0))
    names = np.unique(sent.target[sent.target != "recommend"])
    np.testing.assert_array_equal(names[dataset.labels], np.delete(sent.target, [5, 700]))


def test_numeric_classes_and_a_given_folder(openml, tmp_path):
    sent = table(1440, 1024, np.arange(1.0, 21))
    sent.target = sent.target.astype(float)
    openml(sent)
    path = fetch("coil20", str(tmp_path / "other"))
    assert path == tmp_path / "other" / "COIL20.npz"
    labels = load("coil20", str(tmp_path / "other")).labels
    np.testing.assert_array_equal(labels, np.arange(1440) % 20)


def test_other_content_is_refused_and_the_old_file_stays(openml, folder):
    folder.mkdir(parents=True)
    (folder / "shuttle.npz").write_text("old")
    openml(table(60, 9, list("abcdefg")))
    with pytest.raises(ValueError, match=r"shuttle: OpenML's data set 40685 must hold 58000 .* 60"):
        fetch("shuttle")
    holed = table(62, 2093, list("abc"))
    holed.data[3, 4] = np.nan
    openml(holed)
    with pytest.raises(ValueError, match="data set 46773: view 0 has 1 values that are NaN"):
        fetch("alizadeh_2000_v2")
    assert [(p.name, p.read_text()) for p in folder.iterdir()] == [("shuttle.npz", "old")]


def test_unknown_names(openml):
    asked = openml(ValueError("must not be asked"))
    for name in ("bdgp", "digits", "unheard"):
        with pytest.raises(ValueError, match=f"one of alizadeh_2000_v2, .*shuttle; got '{name}'"):
            fetch(name)
    assert not asked


def test_no_network_is_said(openml, folder):
    openml(URLError("Name or service not known"))
    with pytest.raises(OSError, match=r"garber_2001: OpenML's data set 46779 could not be fetched"):
        fetch("garber_2001")
    with pytest.raises(SystemExit, match=r"is there a network\? .*Name or service not known"):
        main(["garber_2001"])
    assert not folder.exists()


def test_command_line_prints_the_path(openml, capsys, tmp_path):
    openml(table(66, 4553, list("abcd")))
    main(["garber_2001", "--data_dir", str(tmp_path)])
    assert capsys.readouterr().out.strip() == str(tmp_path / "garber_2001.npz")
    with pytest.raises(SystemExit, match="name must be one of"):
        main(["unheard"])


def test_every_set_of_openml_says_its_own_command(folder):
    for name, record in RECORDS.items():
        if record.openml_id is not None:
            expected = f"set {record.openml_id} by `python -m jaxfedmvc.data.openml {name}`"
            with pytest.raises(FileNotFoundError, match=expected):
                load(name)
