"""Files of every layout give back the arrays they were written from; bad ones say what is wrong."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from sklearn.datasets import load_digits

from jaxfedmvc.data import TableOptions
from jaxfedmvc.data.dataset import check_precision
from jaxfedmvc.data.datasets import check_arrays, digits_views, load, names, scaled
from jaxfedmvc.data.records import RECORDS
from jaxfedmvc.data.vertical import prepare

N = 12
DIMS = (5, 3)


@pytest.fixture(autouse=True)
def real_data(monkeypatch, tmp_path):
    """Runs every test in an empty folder; gives the folder of real sets that was configured."""
    folder = os.environ.get("JAXFEDMVC_DATA")
    monkeypatch.delenv("JAXFEDMVC_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    return folder


def make_views(dims=DIMS, n=N):
    rng = np.random.default_rng(0)
    # Halves are exact in float32, so that round trips can be compared for equality.
    return [rng.integers(-40, 40, (n, d)) / 2 for d in dims]


LABELS = np.arange(N) % 3


def save_npz(path, views, labels=None):
    arrays = {f"view_{i}": view for i, view in enumerate(views)}
    np.savez(path, **arrays, **({} if labels is None else {"labels": labels}))
    return str(path)


def cell(items, column=False):
    array = np.empty((len(items), 1) if column else (1, len(items)), object)
    for index, item in enumerate(items):
        array.flat[index] = item
    return array


def save_hdf5(path, **variables):
    """Writes variables as MATLAB 7.3 does: transposed, cells as references, a 512-byte block."""
    h5py = pytest.importorskip("h5py")

    def write(file, key, value):
        if scipy.sparse.issparse(value):
            group = file.create_group(key)
            group.attrs["MATLAB_sparse"] = np.uint64(value.shape[0])
            for part, array in (("data", value.data), ("ir", value.indices), ("jc", value.indptr)):
                group[part] = array
        elif value.dtype == object:
            references = np.empty(value.shape[::-1], h5py.ref_dtype)
            for index in np.ndindex(value.shape):
                name = f"#refs#/{key.replace('/', '_')}{'_'.join(map(str, index))}"
                write(file, name, value[index])
                references[index[::-1]] = file[name].ref
            file.create_dataset(key, data=references, dtype=h5py.ref_dtype)
        else:
            file[key] = value.T

    with h5py.File(path, "w", userblock_size=512) as file:
        for key, value in variables.items():
            write(file, key, value)
    with open(path, "r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file".ljust(512))


def save_v5(path, **variables):
    scipy.io.savemat(path, variables)


def assert_loads(path, views, labels, **kwargs):
    dataset = load(str(path), scale="none", **kwargs)
    assert len(dataset.views) == len(views)
    for got, want in zip(dataset.views, views, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, want)
    if labels is None:
        assert dataset.labels is None
    else:
        assert dataset.labels.dtype == np.int32
        np.testing.assert_array_equal(dataset.labels, labels)


# .mat layouts


@pytest.mark.parametrize("save", [save_v5, save_hdf5])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(
    "layout",
    ["numbered", "lower", "cell_row", "cell_column", "data_cell", "nested_labels", "sparse"],
)
def test_mat_layouts_round_trip(tmp_path, save, columns, layout):
    views = make_views()
    stored = [view.T if columns else view for view in views]
    y = LABELS[None] + 1
    variables = {
        "numbered": {"X1": stored[0], "X2": stored[1], "Y": y},
        "lower": {"x1": stored[0], "x2": stored[1], "labels": y.T},
        "cell_row": {"X": cell(stored), "gt": y.T},
        "cell_column": {"X": cell(stored, column=True), "truth": y},
        "data_cell": {"data": cell(stored), "Labels": y},
        "nested_labels": {"data": cell(stored), "truelabel": cell([y, y])},
        "sparse": {"X": cell([scipy.sparse.csc_matrix(view) for view in stored]), "GT": y},
    }[layout]
    save(tmp_path / "some.mat", **variables)
    assert_loads(tmp_path / "some.mat", views, LABELS)


@pytest.mark.parametrize("save", [save_v5, save_hdf5])
@pytest.mark.parametrize("columns", [False, True])
def test_mat_without_labels_finds_the_shared_dimension(tmp_path, save, columns):
    views = make_views()
    save(tmp_path / "some.mat", X=cell([view.T if columns else view for view in views]))
    assert_loads(tmp_path / "some.mat", views, None)


@pytest.mark.parametrize("save", [save_v5, save_hdf5])
def test_mat_square_view_follows_the_others(tmp_path, save):
    views = make_views((N, 4))
    save(tmp_path / "some.mat", X1=views[0].T, X2=views[1].T, Y=LABELS[None])
    assert_loads(tmp_path / "some.mat", views, LABELS)


@pytest.mark.parametrize("last", [False, True])
def test_mat_stacks_of_images_are_flattened(tmp_path, last):
    images = make_views((6,))[0].reshape(N, 2, 3)
    save_v5(tmp_path / "some.mat", X1=np.moveaxis(images, 0, 2) if last else images, Y=LABELS[None])
    assert_loads(tmp_path / "some.mat", [images.reshape(N, 6)], LABELS)


def test_mat_single_matrix_and_ten_numbered_views(tmp_path):
    view = make_views((4,))[0]
    save_v5(tmp_path / "one.mat", fea=view, gnd=LABELS[:, None])
    assert_loads(tmp_path / "one.mat", [view], LABELS)
    views = make_views(range(1, 11))  # X10 comes after X9, not after X1
    save_v5(tmp_path / "ten.mat", **{f"X{i + 1}": v for i, v in enumerate(views)}, Y=LABELS[None])
    assert_loads(tmp_path / "ten.mat", views, LABELS)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"X1": np.ones((4, 4)), "Y": np.arange(4)[None]}, "cannot tell rows from columns"),
        ({"X1": np.ones((4, 3))}, "without labels, views must share exactly one size"),
        ({"X1": np.ones((4, 3)), "X2": np.ones((5, 2))}, "must share exactly one size"),
        ({"X1": np.ones((4, 3)), "Y": np.arange(5)[None]}, "a side of 5, one per label"),
        ({"X1": np.ones((4, 3)), "X3": np.ones((4, 3))}, r"without gaps; got \[1, 3\]"),
        ({"X1": np.ones((4, 3)), "Y": np.eye(4)}, "labels must be a vector of numbers"),
        ({"other": np.ones((4, 3))}, r"no views among \['other'\]; accepted: .npz"),
    ],
)
def test_mat_undecidable_layouts_are_refused(tmp_path, variables, message):
    save_v5(tmp_path / "some.mat", **variables)
    with pytest.raises(ValueError, match=rf"some\.mat: .*{message}"):
        load(str(tmp_path / "some.mat"))


def test_mat_v73_without_h5py_names_the_extra(tmp_path, monkeypatch):
    save_hdf5(tmp_path / "some.mat", X1=np.ones((4, 3)), Y=np.arange(4)[None])
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"pip install h5py"):
        load(str(tmp_path / "some.mat"))


@pytest.mark.parametrize("name", ["some.mat", "some.npz"])
def test_damaged_files_are_named(tmp_path, name):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\n" * 20)
    with pytest.raises(ValueError, match=rf"{name}: not a readable"):
        load(str(tmp_path / name))


# .npz, labels, scaling


def test_npz_round_trip_and_label_values(tmp_path):
    views = make_views()
    values = np.array([-4.0, 7.0, 30.0])
    path = save_npz(tmp_path / "some.npz", views, values[LABELS])
    assert_loads(path, views, LABELS)
    assert load(path).classes == ("-4", "7", "30")
    assert_loads(save_npz(tmp_path / "bare.npz", views), views, None)
    halves = load(save_npz(tmp_path / "halves.npz", views, values[LABELS] / 4))
    assert halves.classes == ("-1", "1.75", "7.5")


def test_scalings_give_known_values(tmp_path):
    view = np.array([[0.0, 3.0, 10.0], [2.0, 3.0, 20.0], [4.0, 3.0, 60.0]])
    path = save_npz(tmp_path / "some.npz", [view])
    minmax = [[0, 0, 0], [0.5, 0, 0.2], [1, 0, 1]]
    for scale in ("minmax", "auto"):
        np.testing.assert_allclose(load(path, scale=scale).views[0], minmax, rtol=1e-6)
    z = np.sqrt(1.5)
    standard = load(path, scale="standard").views[0]
    np.testing.assert_allclose(standard[:, :2], [[-z, 0], [0, 0], [z, 0]], rtol=1e-6)
    np.testing.assert_allclose(standard[:, 2].std(), 1, rtol=1e-6)


@pytest.mark.parametrize("scale", ["minmax", "standard"])
@pytest.mark.parametrize("factor", [1e-300, 1e-200, 1e200, 1e308])
def test_numbers_near_the_ends_of_float64_are_scaled_as_others_are(tmp_path, scale, factor):
    x = np.array([[-1.0, 3.0], [0.5, 3.0], [1.5, 3.0]])
    given = x * [factor, 1.0]
    (tmp_path / "clients").mkdir()
    file = save_npz(tmp_path / "some.npz", [given])
    save_npz(tmp_path / "clients" / "a.npz", [given])
    found = [load(str(path), scale=scale).views[0] for path in (file, tmp_path / "clients")]
    for result in (scaled(given, scale), *found):
        np.testing.assert_allclose(result, scaled(x, scale), rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(given, x * [factor, 1.0])


def test_standard_scaling_of_a_constant_is_exactly_zero(tmp_path):
    # The computed mean of a tenth, repeated, is off by a rounding error.
    path = save_npz(tmp_path / "some.npz", [np.full((1001, 1), 0.1)])
    assert not load(path, scale="standard").views[0].any()


@pytest.mark.parametrize(
    ("views", "labels", "message"),
    [
        ([], None, "no views"),
        ([np.ones(3)], None, r"view 0 must be a non-empty array \[n, D\]; got \(3,\)"),
        ([np.ones((3, 2)), np.ones((3, 0))], None, "view 1 must be a non-empty"),
        ([np.ones((3, 2)), np.ones((4, 2))], None, r"same number of rows; got \[3, 4\]"),
        ([np.ones((3, 2))], np.arange(4), r"labels must have shape \(3,\); got \(4,\)"),
        ([np.ones((3, 2)), np.full((3, 2), np.nan)], None, "view 1 has 6 values that are NaN"),
        ([np.array([[1, np.inf], [-np.inf, 0]])], None, "view 0 has 2 values that are NaN or inf"),
        (
            [np.array([[1, -3e18], [2, 0]])],
            None,
            r"view 0 has numbers up to 3e\+18; .* up to 1e\+15",
        ),
        ([np.ones((3, 2), complex)], None, "view 0 must hold real numbers; got dtype complex128"),
    ],
)
def test_bad_arrays_are_refused_in_memory_and_in_files(tmp_path, views, labels, message):
    with pytest.raises(ValueError, match=message):
        check_arrays(views, labels)
    path = save_npz(tmp_path / "some.npz", views, labels)
    with pytest.raises(ValueError, match=rf"some\.npz: .*{message}"):
        load(path, scale="none")  # other scales bring large numbers into range


def test_labels_are_words_or_numbers_under_the_usual_names(tmp_path):
    views = make_views()
    words = np.array(["b", "a"] * (N // 2) + ["c"] * (N % 2))
    found = load(save_npz(tmp_path / "text.npz", views, words))
    assert found.classes == ("a", "b", "c")[: 2 + N % 2]
    np.testing.assert_array_equal(found.labels[:2], [1, 0])
    for key in ("Y", "gt", "truth"):
        file = tmp_path / f"{key}.npz"
        np.savez(file, view_0=views[0], **{key: words})
        found = load(str(file))
        np.testing.assert_array_equal(found.labels[:2], [1, 0])
        assert f"labels: array {key.lower()}, " in " ".join(found.notes)
    file = tmp_path / "own.npz"
    np.savez(file, view_0=views[0], diagnosis=words)
    assert load(str(file)).labels is None
    own = load(str(file), options=TableOptions(labels="diagnosis"))
    np.testing.assert_array_equal(own.labels[:2], [1, 0])
    with pytest.raises(ValueError, match="labels: got 'Y'; allowed is an array: diagnosis, view_0"):
        load(str(file), options=TableOptions(labels="Y"))
    with pytest.raises(ValueError, match="views, id, categories, missing: are for tables"):
        load(str(file), options=TableOptions("a=b"))


def test_words_in_matlabs_cells_are_labels(tmp_path):
    (view,) = make_views((5,))
    words = np.array(["a", "bü", "c"], object)[LABELS]
    scipy.io.savemat(tmp_path / "a.mat", {"X1": view, "labels": words})
    found = load("a.mat")
    np.testing.assert_array_equal(found.labels, LABELS)
    assert found.classes == ("a", "bü", "c")


def test_words_in_cells_of_version_73_are_labels(tmp_path):
    h5py = pytest.importorskip("h5py")
    (view,) = make_views((5,))
    with h5py.File(tmp_path / "a.mat", "w", userblock_size=512) as file:
        file["X1"] = view.T
        cells = np.empty((1, N), h5py.ref_dtype)
        for i, label in enumerate(LABELS):
            codes = [[ord(letter)] for letter in ("a", "bü", "c")[label]]
            cell = file.create_dataset(f"#refs#/{i}", data=np.array(codes, np.uint16))
            cell.attrs["MATLAB_class"] = np.bytes_("char")
            cells[0, i] = cell.ref
        file["labels"] = cells
    found = load("a.mat")
    np.testing.assert_array_equal(found.labels, LABELS)
    assert found.classes == ("a", "bü", "c")


def test_words_of_a_matrix_of_characters_have_no_blanks(tmp_path):
    """MATLAB fills the rows of such a matrix to one length."""
    (view,) = make_views((5,))
    words = np.array(["a", "bb", "ccc"])[LABELS]
    scipy.io.savemat(tmp_path / "a.mat", {"X1": view, "labels": words})
    assert load("a.mat").classes == ("a", "bb", "ccc")
    scipy.io.savemat(tmp_path / "b.mat", {"X1": view, "labels": np.array(["", "b"])[LABELS % 2]})
    with pytest.raises(ValueError, match="labels: sample 0 has no word"):
        load("b.mat")


def test_a_struct_is_no_view(tmp_path):
    scipy.io.savemat(tmp_path / "a.mat", {"X1": {"data": np.eye(3)}, "labels": LABELS})
    with pytest.raises(ValueError, match="a view is a struct"):
        load("a.mat")


def test_two_arrays_of_one_name_are_refused(tmp_path):
    first, second = make_views((5, 5))
    np.savez(tmp_path / "a.npz", view_0=first, VIEW_0=second)
    with pytest.raises(ValueError, match=r"two arrays are named view_0 but for capitals"):
        load("a.npz")
    np.savez(tmp_path / "b.npz", view_0=first, view_00=second)
    with pytest.raises(ValueError, match=r"view_0 and view_00 are the same view"):
        load("b.npz")
    np.savez(tmp_path / "c.npz", view_0=first, n=1, N=2)
    assert "arrays that are not read: n" in load(tmp_path / "c.npz").notes
    assert len(load("c.npz").views) == 1


def test_what_is_no_archive_is_not_called_a_pickle(tmp_path):
    (tmp_path / "a.npz").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"not a readable .npz file \(it is no whole archive"):
        load("a.npz")


def test_nan_labels_are_refused(tmp_path):
    views = make_views()
    with pytest.raises(ValueError, match="labels hold NaN"):
        load(save_npz(tmp_path / "nan.npz", views, np.full(N, np.nan)))


def test_unknown_scale_names_the_allowed():
    with pytest.raises(ValueError, match="auto, none, minmax, standard; got 'log'"):
        load("digits", scale="log")
    with pytest.raises(ValueError, match="scale: got 'auto'; allowed is 'none' or 'bytes' or"):
        scaled(np.ones((2, 1)), "auto")


@pytest.mark.parametrize("scale", ["none", "minmax", "standard"])
def test_a_feature_with_a_nan_is_no_constant_one(scale):
    view = np.array([[0.0, 1.0], [1.0, np.nan], [2.0, 4.0]])
    with pytest.raises(ValueError, match="view: has numbers that are NaN or infinite; allowed"):
        scaled(view, scale)
    # Rows that do not count may hold anything; a mask of 0 and 1 is one of bools.
    found = scaled(view, scale, np.array([1, 0, 1]))
    np.testing.assert_array_equal(found[[0, 2]], scaled(view[[0, 2]], scale))
    assert not found[1].any()


@pytest.mark.parametrize(
    ("held", "message"),
    [([False] * 3, "view: has no number in the rows"), ([True], r"held: got \(1,\); allowed is")],
)
def test_scaling_without_rows_is_refused(held, message):
    with pytest.raises(ValueError, match=message):
        scaled(np.ones((3, 2)), "minmax", np.array(held))


@pytest.mark.parametrize("name", [3, None, b"digits"])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(ValueError, match=r"name: got .* a name of a data set, or a path"):
        load(name)


def test_a_path_may_be_a_path(tmp_path):
    path = Path(save_npz(tmp_path / "some.npz", make_views(), np.arange(N) % 3))
    assert load(path).name == load(str(path)).name == "some"


# Names and folders


def test_digits_views_have_their_known_contents():
    dataset = digits_views()
    assert [view.shape for view in dataset.views] == [(1797, 64), (1797, 40), (1797, 72)]
    assert {view.dtype for view in dataset.views} == {np.dtype(np.float32)}
    pixels, fourier, gradients = dataset.views
    source = load_digits()
    np.testing.assert_array_equal(pixels, source.data / 16)
    np.testing.assert_array_equal(dataset.labels, source.target)
    # The spectrum's first entry is the sum of the pixels.
    np.testing.assert_allclose(np.expm1(fourier[:, 0]), pixels.sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(gradients, axis=1), 1, rtol=1e-5)


def test_digits_are_minmax_scaled_by_default():
    for view in load("Digits").views:
        assert view.min() == 0 and view.max() == 1


def test_nuswide_by_name_is_minmax_scaled(tmp_path, monkeypatch):
    dims = (65, 226, 145, 74, 129)
    views = make_views(dims, 5000)
    save_v5(
        tmp_path / "NUSWIDE.mat",
        **{f"X{i + 1}": view for i, view in enumerate(views)},
        Y=np.arange(5000)[:, None] % 5 + 1,
    )
    monkeypatch.setenv("JAXFEDMVC_DATA", str(tmp_path))
    dataset = load("nuswide")
    assert dataset.name == "NUSWIDE"
    assert tuple(view.shape[1] for view in dataset.views) == dims
    np.testing.assert_array_equal(dataset.labels, np.arange(5000) % 5)
    for got, view in zip(dataset.views, views, strict=True):
        np.testing.assert_array_equal(got.min(axis=0), 0)
        np.testing.assert_array_equal(got.max(axis=0), 1)
        low, high = view.min(axis=0), view.max(axis=0)
        np.testing.assert_allclose(got * (high - low) + low, view, atol=1e-4)


@pytest.mark.parametrize("stem", ["Multi_Fashion", "Fashion", "Multi_Fashion_rebuilt"])
@pytest.mark.parametrize("top", [1, 255])
def test_multi_fashion_is_divided_only_when_in_bytes(tmp_path, stem, top):
    view = np.zeros((10000, 784), np.uint8)
    view[3, 5] = top
    save_npz(tmp_path / f"{stem}.npz", [view] * 3, np.arange(10000) % 10)
    dataset = load("multi_fashion", str(tmp_path))
    assert dataset.name == stem
    assert all(v[3, 5] == 1 and v.sum() == 1 for v in dataset.views)


@pytest.mark.parametrize(("n", "dims", "k"), [(12, (1750, 79), 5), (2500, (9, 79), 5)])
def test_named_file_of_other_shape_is_refused(tmp_path, n, dims, k):
    path = save_npz(tmp_path / "BDGP.npz", [np.ones((n, d)) for d in dims], np.arange(n) % k)
    expected = r"2500 samples, view dimensions \[1750, 79\] and 5 classes"
    got = rf"got {n} samples, \[{dims[0]}, 79\] and 5 classes"
    for name, data_dir in (("bdgp", str(tmp_path)), (path, None)):
        with pytest.raises(ValueError, match=f"BDGP.npz: .*{expected}; {got}"):
            load(name, data_dir)


def test_folders_are_searched_in_order(tmp_path, monkeypatch):
    folders = {key: tmp_path / key for key in ("given", "variable", "data")}
    for value, folder in enumerate(folders.values()):
        folder.mkdir()
        save_npz(folder / "MySet.npz", [np.full((3, 2), value)])

    def value(data_dir=None):
        return load("myset", data_dir, scale="none").views[0][0, 0]

    monkeypatch.setenv("JAXFEDMVC_DATA", str(folders["variable"]))
    assert value(str(folders["given"])) == 0
    assert value() == 1
    (folders["variable"] / "MySet.npz").unlink()
    assert value() == 2
    (folders["given"] / "MySet.npz").unlink()
    assert value(str(folders["given"])) == 2
    (folders["data"] / "MySet.npz").unlink()
    with pytest.raises(
        ValueError,
        match=r"unknown data set 'myset'.*looked in [^,]*given, [^,]*variable, [^,]*data",
    ):
        value(str(folders["given"]))


def test_missing_named_set_says_where_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXFEDMVC_DATA", str(tmp_path / "nowhere"))
    for name in names()[3:]:
        with pytest.raises(FileNotFoundError) as error:
            load(name)
        text = str(error.value)
        assert str(tmp_path / "nowhere") in text and str(Path("data").absolute()) in text
        assert ".npz with view_0" in text and "\n" not in text
    with pytest.raises(FileNotFoundError, match=r"BDGP.npz/.mat in .*scutbioinformatics/CELT"):
        load("BDGP")


def test_names_start_with_those_that_need_no_file():
    assert names()[:3] == ("digits", "multimodal", "multimodal_table1")
    for name in names()[:3]:
        assert load(name).name == name


def test_sets_of_openml_are_checked_and_kept_as_they_are(tmp_path):
    view = np.arange(104.0)[:, None] + np.arange(182) * 90
    save_npz(tmp_path / "chowdary-2006.npz", [view], np.arange(104) % 2)
    dataset = load(str(tmp_path / "chowdary-2006.npz"))
    np.testing.assert_array_equal(dataset.views[0], view)
    save_npz(tmp_path / "COIL20.npz", [view], np.arange(104) % 2)
    with pytest.raises(ValueError, match=r"COIL20.npz: .*1440 samples, view dimensions \[1024\]"):
        load("coil20", str(tmp_path))


NORMAL = np.random.default_rng(0).normal(size=(400, 1))


@pytest.mark.parametrize(
    "x",
    [
        np.full((9, 1), 1.7e9 + 1),  # constant
        NORMAL,
        NORMAL + 1000,
        np.where(np.arange(400)[:, None] == 7, 1e12, NORMAL),  # one number is all of the spread
        np.exp(8 * NORMAL),
        np.where(NORMAL > 0, 0.1 + 0.2, 0.3),  # constant but for rounding
        NORMAL / 1e30,
        np.array([[2**24], [0], [1]]),
        (NORMAL * 1e6).astype(int),
        (1.7e9 + 30 * NORMAL).astype(np.float32),  # whoever gave these knows no better
        np.array([[60000], [60001]], np.uint16),
        np.array([[True], [False]]),
    ],
)
def test_precision_of_float32_is_enough(x):
    check_precision("0", [x])


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (NORMAL + 1e5, "0.00391"),
        (np.array([[2**24], [2**24 + 1]]), "1"),
        (1e9 - np.arange(40)[:, None], "32"),
        (NORMAL.astype(int) * 1e-50, "2e-50|3e-50"),  # all zero in float32
    ],
)
def test_precision_of_float32_is_not_enough(x, error):
    fine = np.zeros_like(x)
    text = f"view a: column 1: got numbers that float32 rounds by up to ({error}); allowed is"
    with pytest.raises(ValueError, match=text):
        check_precision("a", [np.hstack([fine, x])])
    with pytest.raises(ValueError, match="view a: column 'hb': got"):
        check_precision("a", [x[:1], x[1:]], ["hb"])


def test_features_are_scaled_before_they_are_cast(tmp_path):
    save_npz(tmp_path / "times.npz", [1.7e9 + 30 * np.eye(3)], np.arange(3))
    for scale in ("auto", "standard"):
        (view,) = load(str(tmp_path / "times.npz"), scale=scale).views
        assert np.ptp(view, axis=0).min() > 0.9
    with pytest.raises(ValueError, match="view 0: column 0: got numbers that float32 rounds by"):
        load(str(tmp_path / "times.npz"), scale="none")


def test_unknown_names_and_paths(tmp_path):
    with pytest.raises(ValueError, match=f"unknown data set 'x'.*{', '.join(names())}.*a path to"):
        load("x")
    with pytest.raises(FileNotFoundError, match=r"gone\.mat: no such file; accepted"):
        load(str(tmp_path / "gone.mat"))
    (tmp_path / "some.txt").write_text("1,2\n")
    # What is wrong is said before what the options are for.
    for options in (TableOptions(), TableOptions("a=hb", id="id")):
        with pytest.raises(ValueError, match=r"some\.txt: unknown format; accepted.*\.tsv"):
            load(str(tmp_path / "some.txt"), options=options)
        with pytest.raises(FileNotFoundError, match=r"gone\.tsv: no such file"):
            load(str(tmp_path / "gone.tsv"), options=options)
        with pytest.raises(
            ValueError, match=r"some\.txt'; allowed is a table among several: \.csv"
        ):
            load(f"{tmp_path}/gone.csv,{tmp_path}/some.txt", options=options)
    with pytest.raises(ValueError, match="are for tables; digits_0 has views of its own"):
        save_npz(tmp_path / "digits_0.npz", [np.eye(3)], np.arange(3))
        load("digits_0", str(tmp_path), options=TableOptions("a=hb"))


def test_real_mnist_usps(real_data):
    if not real_data or not list(Path(real_data).glob("MNIST_USPS.*")):
        pytest.skip("needs MNIST_USPS in the folder that $JAXFEDMVC_DATA names")
    dataset = load("mnist_usps", real_data)
    assert [len(view) for view in dataset.views] == [5000, 5000]
    assert dataset.views[0].shape[1] == 784
    np.testing.assert_array_equal(np.bincount(dataset.labels), [500] * 10)
    assert all(view.min() >= 0 and 0.9 < view.max() <= 1 for view in dataset.views)


@pytest.mark.parametrize("name", [name for name in RECORDS if RECORDS[name].openml_id])
def test_real_sets_of_openml(real_data, name):
    stem = RECORDS[name].stems[0]
    if not real_data or not Path(real_data, f"{stem}.npz").exists():
        pytest.skip(f"needs {stem}.npz in the folder that $JAXFEDMVC_DATA names")
    dataset = load(name, real_data)
    categorical = range(8) if name == "nursery" else None
    x, labels = prepare(dataset.views[0], dataset.labels, categorical=categorical, seed=0)
    # No row is there twice, and no column is constant; categories give a column a level but one.
    n, width = dataset.views[0].shape
    assert x.shape == (n, 19 if name == "nursery" else width)
    np.testing.assert_array_equal(np.bincount(labels), np.bincount(dataset.labels))
