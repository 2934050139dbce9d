"""Tables become views, labels and ids, and whatever is unclear is named."""

import numpy as np
import pytest

pd = pytest.importorskip("pandas", reason="pandas is not installed: the extra experiments")
from jaxfedmvc import Federation, data  # noqa: E402
from jaxfedmvc.data.tables import TableOptions, from_frame, read  # noqa: E402

TABLE = pd.DataFrame(
    {
        "patient": ["a", "b", "c", "d"],
        "hb": [1.0, 2.0, 3.0, 4.0],
        "wbc": [5, 6, 7, 8],
        "img_0": [0.5, np.nan, 0.25, 1.0],
        "img_1": [9.0, np.nan, 7.0, 6.0],
        "sex": ["f", "m", "f", "f"],
        "ill": ["no", "yes", "no", "yes"],
    }
)
BLOOD = TableOptions("blood=hb,wbc; imaging=img_*", labels="ill", id="patient")


def with_cell(column, row, value):
    changed = TABLE.copy()
    changed[column] = changed[column].astype(object)
    changed.loc[row, column] = value
    return changed.infer_objects()


def test_columns_become_views_and_a_row_without_values_does_not_hold_one():
    found = from_frame(TABLE, BLOOD)
    np.testing.assert_array_equal(found.views[0], [[1, 5], [2, 6], [3, 7], [4, 8]])
    np.testing.assert_array_equal(found.views[1], [[0.5, 9], [0, 0], [0.25, 7], [1, 6]])
    np.testing.assert_array_equal(found.held, [[1, 1], [1, 0], [1, 1], [1, 1]])
    np.testing.assert_array_equal(found.labels, [0, 1, 0, 1])
    assert found.ids.tolist() == list("abcd") and found.clients is None
    assert found.classes == ("no", "yes") and found.view_names == ("blood", "imaging")
    assert found.notes == (
        "view blood: 2 features of columns hb, wbc",
        "view imaging: 2 features of columns img_0, img_1",
        "columns in no view: sex",
        "labels: column ill, classes no, yes",
        "1 of 4 rows lack a view",
    )


def test_words_are_columns_of_their_own_when_asked_for():
    options = TableOptions("who=sex,hb", id="patient", categories="onehot")
    found = from_frame(TABLE, options)
    np.testing.assert_array_equal(found.views[0], [[1, 1, 0], [2, 0, 1], [3, 1, 0], [4, 1, 0]])
    assert found.labels is None and "sex one-hot, 2 columns" in found.notes[0]


# Of fifty rows: numbers, and categories that look like none.
FIFTY = [f"{i / 7:.3f}" for i in range(50)]
WORDS = pd.Series([f"w{i}" for i in range(50)])


@pytest.mark.parametrize("categories", ["refuse", "onehot"])
@pytest.mark.parametrize(
    ("cells", "text"),
    [
        (["?", *FIFTY[1:]], r"such as '\?'; its other 49 cells are numbers: write these 1 as"),
        ([*["?"] * 24, *FIFTY[24:]], r"such as '\?'; its other 26 cells are numbers"),
        (["?", *([1, 2, 3] * 17)[1:50]], r"such as '\?'; its other 49 cells are numbers"),
        ([x.replace(".", ",") for x in FIFTY], "such as '0,000'; write decimals with points"),
        (["?", "3,5", *FIFTY[2:]], "such as '3,5'; write decimals with points"),
        (FIFTY, "such as '0.000'; these are numbers kept as text: convert the column to numbers"),
    ],
)
def test_numbers_are_no_categories(cells, text, categories):
    table = pd.DataFrame({"hb": pd.Series(cells, dtype=object)})
    with pytest.raises(ValueError, match=f"the column 'hb' of view 0 has cells {text}"):
        from_frame(table, TableOptions(categories=categories))


def test_a_bad_cell_of_a_file_is_no_category(tmp_path):
    (tmp_path / "a.csv").write_text("\n".join(["hb", *FIFTY[:30], "?", *FIFTY[31:]]))
    with pytest.raises(ValueError, match=r"such as '\?'; its other 49 cells are numbers"):
        read([tmp_path / "a.csv"], TableOptions(categories="onehot"))


def test_words_that_are_nearly_all_different_are_no_categories():
    with pytest.raises(ValueError, match=r"50 different words; .*: give id=name if they name the"):
        from_frame(pd.DataFrame({"name": WORDS}), TableOptions(categories="onehot"))
    for n_words, columns in ((26, None), (25, 25)):
        table = pd.DataFrame({"name": [*WORDS[:n_words], *["w0"] * (50 - n_words)]})
        options = TableOptions(categories="onehot")
        if columns is None:
            with pytest.raises(ValueError, match="'w0'; its 50 cells are 26 different words"):
                from_frame(table, options)
        else:
            assert from_frame(table, options).views[0].shape == (50, columns)


@pytest.mark.parametrize(
    ("column", "n_columns"),
    [
        (["mild", "severe"] * 25, 2),
        (["T1", "T2", "2", "3", "x"] * 10, 5),  # two of five are numbers
        (pd.Series([1, 2] * 25).astype("category"), 2),
        (pd.Series(["1", "2"] * 25).astype("category"), 2),
        ([True, False] * 25, 2),
        (pd.Series([True, False] * 24 + [True, None], dtype=object), 2),
        (WORDS[:19].tolist() + [None] * 31, 19),  # too few cells to tell
    ],
)
def test_categories_are_columns_of_their_own(column, n_columns):
    table = pd.DataFrame({"kind": column, "hb": np.arange(50) / 7})
    options = TableOptions("a=kind; b=hb", categories="onehot")
    assert from_frame(table, options).views[0].shape == (50, n_columns)


@pytest.mark.parametrize(
    ("missing", "view", "held"),
    [
        ("median", [[0.5, 9], [0, 0], [0.25, 7.5], [1, 6]], [1, 0, 1, 1]),
        ("lack", [[0.5, 9], [0, 0], [0, 0], [1, 6]], [1, 0, 0, 1]),
    ],
)
def test_an_empty_cell_is_the_median_or_the_row_lacks_the_view(missing, view, held):
    options = TableOptions(BLOOD.views, "ill", "patient", missing=missing)
    found = from_frame(with_cell("img_1", 2, np.nan), options)
    np.testing.assert_array_equal(found.views[1], view)
    np.testing.assert_array_equal(found.held[:, 1], held)


def test_the_median_is_the_columns_own_over_rows_that_hold_the_view():
    """Neither the mean, nor that of all cells, and a row without the view counts nowhere."""
    table = pd.DataFrame({"x": [1.0, 2, 9, np.nan, np.nan], "y": [50.0, 60, 70, 80, np.nan]})
    found = from_frame(table.assign(z=1.0), TableOptions("a=x,y; b=z", missing="median"))
    assert found.views[0].tolist() == [[1, 50], [2, 60], [9, 70], [2, 80], [0, 0]]
    assert found.notes[0] == (
        "view a: 2 features of columns x, y; 1 of 4 rows have medians in empty cells"
    )
    assert "median" not in found.notes[1]


def test_a_column_without_any_value_is_the_one_that_is_named():
    table = with_cell("img_0", 2, np.nan).assign(img_1=np.nan)
    options = TableOptions(BLOOD.views, "ill", "patient", missing="median")
    with pytest.raises(ValueError, match="the column 'img_1' of view imaging is empty everywhere"):
        from_frame(table, options)


def test_a_row_without_anything_is_left_out_and_said():
    table = TABLE.copy()
    table.loc[1, ["hb", "wbc"]] = np.nan
    found = from_frame(table, BLOOD)
    assert found.ids.tolist() == ["a", "c", "d"] and found.held is None
    assert "1 rows have no value of any view and are left out" in found.notes


def test_tables_are_joined_on_ids_and_each_is_a_view(tmp_path):
    TABLE[["patient", "hb", "wbc", "ill"]].to_csv(tmp_path / "blood.csv", index=False)
    images = TABLE[["patient", "img_0", "img_1"]].dropna()
    images.sample(frac=1, random_state=1).to_csv(tmp_path / "images.csv", index=False)
    paths = [tmp_path / "blood.csv", tmp_path / "images.csv"]
    joined, whole = read(paths, TableOptions(labels="ill", id="patient")), from_frame(TABLE, BLOOD)
    order = np.argsort(joined.ids)
    for mine, other in zip(joined.views, whole.views, strict=True):
        np.testing.assert_array_equal(mine[order], other)
    np.testing.assert_array_equal(joined.held[order], whole.held)
    np.testing.assert_array_equal(joined.labels[order], whole.labels)


def test_a_class_may_stand_in_either_of_two_tables(tmp_path):
    TABLE.loc[[0, 1], ["patient", "hb", "ill"]].to_csv(tmp_path / "blood.csv", index=False)
    TABLE.loc[[1, 2], ["patient", "wbc", "ill"]].to_csv(tmp_path / "cells.csv", index=False)
    paths = [tmp_path / "blood.csv", tmp_path / "cells.csv"]
    found = read(paths, TableOptions(labels="ill", id="patient"))
    assert dict(zip(found.ids.tolist(), found.labels.tolist(), strict=True)) == dict(a=0, b=1, c=0)
    others = with_cell("ill", 1, "no").loc[[1, 2], ["patient", "wbc", "ill"]]
    others.to_csv(tmp_path / "cells.csv", index=False)
    with pytest.raises(ValueError, match="labels: tables differ in 'ill' of the same id"):
        read(paths, TableOptions(labels="ill", id="patient"))


def test_a_folder_has_a_table_for_each_client(tmp_path):
    TABLE[:2].to_csv(tmp_path / "berlin.csv", index=False)
    TABLE[2:].drop(columns=["img_0", "img_1"]).to_csv(tmp_path / "paris.csv", index=False)
    found = read([tmp_path], BLOOD)
    assert found.clients.tolist() == [0, 0, 1, 1]
    np.testing.assert_array_equal(found.held[:, 1], [1, 0, 0, 0])
    assert found.notes[0] == "files, a client each: 0 berlin.csv, 1 paris.csv"
    # One client has rows of two kinds, and stands as two.
    parts = data.partition_as_held(0, found.held, clients=found.clients)
    told = [(p.view_ids, p.sample_ids.tolist(), p.client_ids.tolist()) for p in parts]
    assert told == [((0, 1), [[0]], [0]), ((0,), [[1, -1], [2, 3]], [1, 2])]


def test_a_client_whose_columns_are_called_otherwise_is_told(tmp_path):
    (tmp_path / "a.csv").write_text("hb,WBC\n1,2\n3,4\n")
    (tmp_path / "b.csv").write_text("hb,wbc\n1,2\n3,4\n")
    found = read([tmp_path], TableOptions("one=hb; two=wbc"))
    np.testing.assert_array_equal(found.held, [[1, 0], [1, 0], [1, 1], [1, 1]])
    assert "files without a column of view two: a.csv" in found.notes
    assert "columns in no view: WBC" in found.notes


def test_clients_number_their_rows_each_by_itself(tmp_path):
    for name, ids in (("berlin", "12"), ("paris", "21")):
        (tmp_path / f"{name}.csv").write_text(f"n,x\n{ids[0]},1\n{ids[1]},2\n")
    assert read([tmp_path], TableOptions(id="n")).ids.tolist() == ["1", "2", "2", "1"]
    (tmp_path / "paris.csv").write_text("n,x\n1,3\n1,4\n")
    with pytest.raises(ValueError, match=r"id: .* has '1' twice in 'n'"):
        read([tmp_path], TableOptions(id="n"))


def test_an_empty_row_of_a_client_is_left_out_with_its_client_and_label(tmp_path):
    values = ["hb", "wbc", "img_0", "img_1"]
    with_empty = TABLE.copy().astype(dict.fromkeys(values, float))
    with_empty.loc[1, values] = np.nan
    with_empty.loc[1, "ill"] = np.nan  # nobody asks for the class of nothing
    with_empty[:2].to_csv(tmp_path / "berlin.csv", index=False)
    with_empty[2:].to_csv(tmp_path / "paris.csv", index=False)
    found = read([tmp_path], BLOOD)
    assert found.ids.tolist() == list("acd") and found.clients.tolist() == [0, 1, 1]
    assert found.labels.tolist() == [0, 0, 1] and found.views[0][:, 0].tolist() == [1, 3, 4]


def test_labels_of_clients_are_of_one_kind(tmp_path):
    (tmp_path / "a.csv").write_text("hb,ill\n1,0\n2,1\n")
    (tmp_path / "b.csv").write_text("hb,ill\n1,0\n2,?\n")
    with pytest.raises(ValueError, match="labels: got numbers and words; allowed are either"):
        read([tmp_path], TableOptions(labels="ill"))


def test_parquet_is_as_csv(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    TABLE.to_parquet(tmp_path / "table.parquet")
    found, expected = read([tmp_path / "table.parquet"], BLOOD), from_frame(TABLE, BLOOD)
    np.testing.assert_array_equal(found.views[1], expected.views[1])
    assert found.notes == expected.notes


@pytest.mark.parametrize(
    ("table", "options", "text"),
    [
        (TABLE, TableOptions(), "the column 'patient' looks like id and would be a feature"),
        (
            TABLE.rename(columns={"patient": "code"}),
            TableOptions(),
            "the column 'code' of view 0 has cells such as 'a'.*id=code",
        ),
        (TABLE.rename(columns={"ill": "Y"}), TableOptions(), "column 'Y' looks like labels"),
        (TABLE.rename(columns={"patient": "ID"}), TableOptions(), "column 'ID' looks like id"),
        (
            TABLE,
            TableOptions(labels="sick"),
            "labels: got 'sick'; allowed is a column: patient, hb",
        ),
        (TABLE, TableOptions(labels="il"), "a column: patient, hb.*; did you mean 'ill'\\?"),
        (TABLE, TableOptions("b=hb,img1"), "matches no column of patient.*; did you mean 'img_1'"),
        (TABLE, TableOptions("blood=hb,rbc"), "'rbc' of view blood matches no column of patient"),
        (TABLE, TableOptions("a=hb;b=h*"), "column 'hb' is in a and b"),
        (TABLE, TableOptions("a=hb,ill", labels="ill"), "column 'ill' of view a is labels or id"),
        (TABLE, TableOptions("who=sex"), "column 'sex' of view who has cells such as 'f'"),
        (with_cell("img_1", 2, np.nan), BLOOD, "column 'img_1' of view imaging is empty in 1 rows"),
        (with_cell("hb", 1, np.inf), BLOOD, "column 'hb' of view blood has infinite cells"),
        (with_cell("patient", 1, "a"), BLOOD, "id: table has 'a' twice in 'patient'"),
        (with_cell("patient", 1, None), BLOOD, "id: table has 1 empty cells in 'patient'"),
        (with_cell("ill", 1, None), BLOOD, "labels: the column 'ill' is empty in 1 of 4 rows"),
        (
            with_cell("hb", 1, "<0.5"),
            BLOOD,
            "'hb' of view blood has cells such as '<0.5'; its other 3 cells are numbers",
        ),
        (
            TABLE.assign(hb=["1,5", "2,0", "3,1", "4,2"]),
            BLOOD,
            "'hb' of view blood has cells such as '1,5'; write decimals with points",
        ),
        (
            pd.DataFrame({"hb": np.arange(30) / 7, "wbc": np.arange(30) / 3}),
            TableOptions("a=wbc", labels="hb"),
            "labels: the column 'hb' has 30 different values in 30 rows",
        ),
        (
            TABLE.assign(flag=[True, False, True, True]),
            TableOptions("a=flag"),
            "'flag' of view a .* 'True'",
        ),
    ],
)
def test_what_is_unclear_is_named(table, options, text):
    with pytest.raises(ValueError, match=text):
        from_frame(table, options)


@pytest.mark.parametrize("views", ["blood", "blood=", "=hb", "a=hb;a=wbc", "a=hb;;", {"a": ["hb"]}])
def test_views_that_cannot_be_read(views):
    with pytest.raises(ValueError, match=r"views: got .*; allowed is such as 'blood=hb,wbc"):
        TableOptions(views)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "is no readable table"),
        ("a,b\n", "has no row"),
        ("a,b\n1,2,3,4\n1\n", "has rows that are longer than its head; .* separated by commas"),
        # The first cells would be an index, and 2 and 3 values of a.
        ("a,b\n1,2,3\n2,3,4\n", "has rows that are longer than its head; .* separated by commas"),
        ("a;b\n1;2\n1,2;3,4\n", "is no readable table|longer than its head"),
        ("\x00\x01\x02", "is no readable table|has no row"),
    ],
)
def test_damaged_tables_are_named(content, text, tmp_path):
    (tmp_path / "table.csv").write_text(content)
    with pytest.raises(ValueError, match=text):
        read([tmp_path / "table.csv"], TableOptions())


def test_a_comma_behind_each_row_moves_no_cell(tmp_path):
    (tmp_path / "table.csv").write_text("a,b\n1,2,\n2,4,\n")
    np.testing.assert_array_equal(
        read([tmp_path / "table.csv"], TableOptions()).views[0], [[1, 2], [2, 4]]
    )


@pytest.mark.parametrize(
    ("head", "is_said"), [("0.5,-1", True), ("3,1", True), ("0,1", False), ("7,8", False)]
)
def test_a_head_of_numbers_may_be_a_sample(head, is_said, tmp_path):
    (tmp_path / "table.csv").write_text(f"{head}\n1,2\n2,4\n")
    found = read([tmp_path / "table.csv"], TableOptions())
    assert len(found.views[0]) == 2
    assert any("head: its names are numbers" in note for note in found.notes) == is_said


def test_cells_of_several_values_are_named():
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [[1, 2], [1, 2]]})
    with pytest.raises(ValueError, match=r"'b' of view 0 has cells such as '\[1, 2\]'; allowed"):
        from_frame(frame, TableOptions(categories="onehot"))


def test_ids_are_text_and_heads_lose_their_blanks(tmp_path):
    (tmp_path / "a.csv").write_text(" number ,hb\n0001,1\n1,2\n10E0,3\n")
    (tmp_path / "b.csv").write_text("number, wbc\n1,5\n0001,6\n10E0,7\n")
    found = read([tmp_path / "a.csv", tmp_path / "b.csv"], TableOptions(id="number"))
    by_id = dict(
        zip(found.ids.tolist(), zip(*(v[:, 0] for v in found.views), strict=True), strict=True)
    )
    assert by_id == {"0001": (1, 6), "1": (2, 5), "10E0": (3, 7)} and found.held is None


def test_blanks_around_cells_make_no_classes_or_ids_of_their_own(tmp_path):
    (tmp_path / "a.csv").write_text(
        "number,hb,kind,ill\n1 , 1.5,mild ,flu\n 2,2.5 ,mild, flu \n"
        "3,  ,\tsevere,cold\n4, 4, ,flu\n"
    )
    (tmp_path / "b.csv").write_text("number,wbc\n1,5\n2 ,6\n3,7\n4 ,8\n")
    paths = [tmp_path / "a.csv", tmp_path / "b.csv"]
    options = TableOptions("a=hb; b=kind; c=wbc", labels="ill", id="number", categories="onehot")
    found = read(paths, options)
    assert found.ids.tolist() == ["1", "2", "3", "4"]
    assert found.labels.tolist() == [1, 1, 0, 1] and "classes cold, flu" in "".join(found.notes)
    np.testing.assert_array_equal(found.views[0], [[1.5], [2.5], [0], [4]])
    np.testing.assert_array_equal(found.views[1], [[1, 0], [1, 0], [0, 1], [0, 0]])
    np.testing.assert_array_equal(found.held, [[1, 1, 1], [1, 1, 1], [0, 1, 1], [1, 0, 1]])


def test_blanks_in_a_frame_are_no_words():
    table = TABLE.assign(ill=["no", "yes ", " no", "yes"], patient=["a ", "b", " c", "d"])
    found, expected = from_frame(table, BLOOD), from_frame(TABLE, BLOOD)
    assert found.notes == expected.notes and found.ids.tolist() == list("abcd")
    np.testing.assert_array_equal(found.labels, expected.labels)
    with pytest.raises(ValueError, match="id: table has 'a' twice"):
        from_frame(TABLE.assign(patient=["a", "a ", "c", "d"]), BLOOD)
    with pytest.raises(ValueError, match="id: table has 1 empty cells"):
        from_frame(TABLE.assign(patient=["a", "  ", "c", "d"]), BLOOD)
    sexes = TABLE.assign(sex=pd.Series(["f", "m", "f ", "f"], dtype="category"))
    options = TableOptions("who=sex", id="patient", categories="onehot")
    np.testing.assert_array_equal(
        from_frame(sexes, options).views[0], [[1, 0], [0, 1], [1, 0], [1, 0]]
    )


def joined(folder, *ids):
    """Tables a, b, ... of these ids, read together."""
    paths = [folder / f"{name}.csv" for name in "abc"[: len(ids)]]
    for path, own in zip(paths, ids, strict=True):
        path.write_text(
            "\n".join([f"number,{path.stem}_0", *(f"{i},{k}" for k, i in enumerate(own))])
        )
    return read(paths, TableOptions(id="number"))


def test_joined_tables_say_how_many_ids_they_share(tmp_path):
    found = joined(tmp_path, "12345", "5432", ["1", "2.0", "3.0", "4.0"])
    assert found.notes[:2] == (
        "ids: 4 of the 4 of b are in a, which has 5",
        "ids: 1 of the 4 of c are in a, which has 5; are '2.0' and '2' written alike? (1 and 1.0"
        " are two ids)",
    )
    # Small, but all of it is there.
    assert joined(tmp_path, "12345", "5").notes[0] == "ids: 1 of the 1 of b are in a, which has 5"
    # Nothing in common with the first, but with another.
    assert joined(tmp_path, "12", "34", "1234").notes[0].startswith("ids: 0 of the 2 of b are in a")


@pytest.mark.parametrize("ids", [("123", ["1.0", "2.0"]), ("123", "12", ["1.0", "2.0"])])
def test_tables_that_share_no_id_are_refused(ids, tmp_path):
    text = (
        "id: none of the 2 ids of [bc], such as '1.0', is in another table; a has some such as '1'"
    )
    with pytest.raises(ValueError, match=text):
        joined(tmp_path, *ids)


def test_classes_that_are_missing_may_stand_under_other_ids(tmp_path):
    (tmp_path / "a.csv").write_text("number,hb,ill\n1,1,0\n2,2,1\n3,3,0\n")
    for ids, text in (
        (
            ["1", "2.0", "3.0"],
            r"labels: .* is empty in 2 of 5 rows.*1 of the 3 of b are .*'2.0' an",
        ),
        (["1.0", "2.0"], "id: none of the 2 ids of b"),
    ):
        (tmp_path / "b.csv").write_text("\n".join(["number,wbc", *(f"{i},1" for i in ids)]))
        with pytest.raises(ValueError, match=text):
            read([tmp_path / "a.csv", tmp_path / "b.csv"], TableOptions(labels="ill", id="number"))


def test_none_is_a_word_among_words_and_an_empty_cell_among_numbers(tmp_path):
    (tmp_path / "a.csv").write_text("hb,gene,kind\n1,None,NA\nNA,mild,null\n3,,NA\n")
    options = TableOptions("a=hb; b=gene", labels="kind", categories="onehot")
    found = read([tmp_path / "a.csv"], options)
    np.testing.assert_array_equal(found.held, [[1, 1], [0, 1], [1, 0]])
    np.testing.assert_array_equal(found.views[1], [[1, 0], [0, 1], [0, 0]])
    assert found.labels.tolist() == [0, 1, 0] and "classes NA, null" in found.notes[-2]


def test_whole_numbers_that_are_all_different_are_pointed_out():
    table = pd.DataFrame({"number": np.arange(30)[::-1], "hb": np.arange(30) / 7})
    (note,) = from_frame(table, TableOptions()).notes
    assert note.endswith("; number: another whole number in every row, which may be no feature")
    assert "whole" not in from_frame(table[:10], TableOptions()).notes[0]


def test_a_folder_has_files_of_one_kind(tmp_path):
    TABLE[["hb", "wbc"]].to_csv(tmp_path / "x.csv", index=False)
    np.savez(tmp_path / "y.npz", view_0=np.ones((3, 2)))
    with pytest.raises(ValueError, match=r"has tables, such as x\.csv, and arrays, such as y\.npz"):
        read([tmp_path], TableOptions())


def test_tables_that_do_not_fit_together(tmp_path):
    TABLE[["patient", "hb"]].to_csv(tmp_path / "a.csv", index=False)
    TABLE[["patient", "hb"]].to_csv(tmp_path / "b.csv", index=False)
    pd.concat([TABLE, TABLE])[["patient", "wbc"]].to_csv(tmp_path / "twice.csv", index=False)
    a, b, twice = (tmp_path / f"{name}.csv" for name in ("a", "b", "twice"))
    for paths, options, text in (
        ([a, b], TableOptions(), "several tables are joined on a column of ids"),
        ([a, b], TableOptions(id="patient"), "dataset: the column 'hb' is in a and in b; allowed"),
        ([a, twice], TableOptions(id="patient"), "id: twice has 'a' twice in 'patient'"),
        ([a, b], TableOptions(id="number"), "a has no column 'number'"),
    ):
        with pytest.raises(ValueError, match=text):
            read(paths, options)
    folder = tmp_path / "sites"
    folder.mkdir()
    TABLE[["hb", "wbc"]].to_csv(folder / "x.csv", index=False)
    TABLE[["hb"]].to_csv(folder / "y.csv", index=False)
    with pytest.raises(ValueError, match=r"y\.csv: has no column 'wbc', which other clients have"):
        read([folder], TableOptions())


def test_labels_are_no_features_however_columns_are_chosen(tmp_path):
    table = TABLE.drop(columns="patient").assign(number=range(4), target=[0, 1, 0, 1])
    table[["number", "hb", "target"]].to_csv(tmp_path / "a.csv", index=False)
    table[["number", "wbc"]].to_csv(tmp_path / "b.csv", index=False)
    paths = [tmp_path / "a.csv", tmp_path / "b.csv"]
    text = "labels: the column 'target' looks like labels and would be a feature"
    with pytest.raises(ValueError, match=text):
        read(paths, TableOptions(id="number"))
    with pytest.raises(ValueError, match=text):
        read(paths, TableOptions("all=*", id="number"))
    found = read(paths, TableOptions(labels="target", id="number"))
    assert [view.shape[1] for view in found.views] == [1, 1]
    # Somebody who names the column means it.
    assert read(paths, TableOptions("all=h*,target", id="number")).views[0].shape[1] == 2


def test_the_index_of_a_frame_names_its_rows():
    columns = {"hb": [1.0, np.nan, 3.0]}
    assert from_frame(pd.DataFrame(columns)).ids.tolist() == [0, 2]
    assert from_frame(pd.DataFrame(columns, index=["p", "q", "r"])).ids.tolist() == ["p", "r"]
    assert from_frame(pd.DataFrame(columns)[::-1].sort_values("hb")).ids.tolist() == ["0", "2"]
    named = TABLE.set_index(pd.Index(list("wxyz")))
    assert from_frame(named, BLOOD).ids.tolist() == list("abcd")
    with pytest.raises(ValueError, match=r"id: table has 'p' twice in its index.*reset_index"):
        from_frame(pd.DataFrame({"hb": [1.0, 2.0, 3.0]}, index=["p", "q", "p"]))
    with pytest.raises(ValueError, match="id: table has 1 empty cells in its index"):
        from_frame(pd.DataFrame(columns, index=["p", None, "r"]))
    pairs = pd.MultiIndex.from_tuples([("p", 1), ("p", 2), ("q", 1)])
    assert from_frame(pd.DataFrame(columns, index=pairs)).ids.tolist() == ["('p', 1)", "('q', 1)"]


def test_a_number_and_its_word_are_one_id():
    table = pd.DataFrame({"id": [7, "7"], "hb": [1.0, 2.0]})
    with pytest.raises(ValueError, match="id: table has '7' twice in 'id'"):
        from_frame(table, TableOptions(id="id"))


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (
            pd.DataFrame({"hb": [1e300, 1.0]}),
            "the column 'hb' of view 0 has numbers beyond float32",
        ),
        (pd.DataFrame({"hb": [1j, 1.0]}), "the column 'hb' of view 0 has complex numbers"),
        (pd.DataFrame(), "table: has no row or no column"),
    ],
)
def test_what_float32_cannot_hold_is_named(table, text):
    with pytest.raises(ValueError, match=text):
        from_frame(table)


def test_columns_of_a_table_may_be_numbers():
    found = from_frame(pd.DataFrame(np.ones((3, 2))), TableOptions("a=0; b=1"))
    assert [view.shape for view in found.views] == [(3, 1), (3, 1)]


def test_scaling_counts_the_rows_that_hold_a_view(tmp_path):
    TABLE.to_csv(tmp_path / "table.csv", index=False)
    found = data.load(str(tmp_path / "table.csv"), options=BLOOD)
    np.testing.assert_allclose(found.views[1][:, 0], [1 / 3, 0, 0, 1], atol=1e-6)
    np.testing.assert_allclose(found.views[1][:, 1], [1, 0, 1 / 3, 0], atol=1e-6)


def test_a_folder_of_arrays_has_a_file_for_each_client(tmp_path):
    rng = np.random.default_rng(0)
    views = [rng.random((5, 2)), rng.random((5, 3))]
    np.savez(tmp_path / "a.npz", view_0=views[0][:3], view_1=views[1][:3], Y=["u", "v", "u"])
    np.savez(tmp_path / "b.npz", view_1=views[1][3:], Y=["w", "v"])
    found = data.load(str(tmp_path), scale="none")
    np.testing.assert_allclose(found.views[1], views[1], rtol=1e-6)
    np.testing.assert_array_equal(found.held, [[1, 1]] * 3 + [[0, 1]] * 2)
    np.testing.assert_array_equal(found.labels, [0, 1, 0, 2, 1])
    federation = Federation.from_arrays(
        found.views,
        found.labels,
        partition=data.partition_as_held(0, found.held, clients=found.clients),
    )
    assert [c.view_ids for c in federation.cohorts] == [(0, 1), (1,)]
    np.savez(tmp_path / "c.npz", view_1=views[1], Y=np.arange(5.0))
    with pytest.raises(ValueError, match=r"c\.npz: has labels that are numbers; allowed are words"):
        data.load(str(tmp_path))
    np.savez(tmp_path / "c.npz", view_1=views[1])
    with pytest.raises(ValueError, match=r"c\.npz: has no labels, which other clients have"):
        data.load(str(tmp_path))


def test_rows_are_dealt_out_over_clients_of_their_kind():
    held = np.array([[1, 1]] * 60 + [[1, 0]] * 25 + [[0, 1]] * 5, bool)
    parts = data.partition_as_held(0, held, 6)
    assert [(p.view_ids, len(p.client_ids)) for p in parts] == [((0, 1), 3), ((0,), 2), ((1,), 1)]
    ids = np.concatenate([p.sample_ids.ravel() for p in parts])
    assert sorted(ids[ids >= 0]) == list(range(90))
    for part in parts:
        for row in part.sample_ids[part.sample_ids >= 0]:
            assert tuple(np.flatnonzero(held[row])) == part.view_ids
    with pytest.raises(ValueError, match="n_clients: got 2; allowed is 3 to 90"):
        data.partition_as_held(0, held, 2)
    with pytest.raises(ValueError, match="held: a sample has no view"):
        data.partition_as_held(0, np.zeros((3, 2), bool), 1)


def test_wide_ranges_lose_nothing_before_they_are_scaled(tmp_path):
    path = tmp_path / "times.csv"
    pd.DataFrame({"t": 1_700_000_000 + np.arange(40), "x": np.arange(40.0)}).to_csv(path)
    path.write_text(path.read_text().replace(",t,x", "id,t,x", 1))
    (view,) = data.load(str(path), options=TableOptions("all=t,x", id="id")).views
    np.testing.assert_allclose(view[:, 0], np.arange(40) / 39, atol=1e-6)


def test_a_frame_keeps_its_features_in_float32():
    times = 1_700_000_000 + 30 * np.arange(40) % 90
    table = pd.DataFrame({"kind": ["u", "v"] * 20, "t": times, "x": np.arange(40.0)})
    options = TableOptions("a=x; b=kind,t", categories="onehot")
    with pytest.raises(ValueError, match="view b: column 't': got numbers that float32 rounds by"):
        from_frame(table, options)
    # Zeros where a row does not hold the view are no spread.
    lacking = table.where(table.x > 3, np.nan).assign(x=table.x)
    with pytest.raises(ValueError, match="view b: column 't': got numbers that float32 rounds by"):
        from_frame(lacking, options)
    assert from_frame(table.assign(t=times - times.mean()), options).views[1].dtype == np.float32


def test_a_file_may_have_tabs_and_its_name_commas(tmp_path):
    (tmp_path / "a,b.tsv").write_text("hb\twbc\tkind\n1\t\t2,5 mg\n3\t4\tx\n")
    options = TableOptions("a=hb; b=wbc; c=kind", categories="onehot")
    found = data.load(str(tmp_path / "a,b.tsv"), scale="none", options=options)
    np.testing.assert_array_equal(found.views[0], [[1], [3]])
    np.testing.assert_array_equal(found.held, [[1, 0, 1], [1, 1, 1]])
    assert "columns kind; kind one-hot, 2 columns" in found.notes[2]
    (tmp_path / "twice.tsv").write_text("a\ta\n1\t2\n")
    (tmp_path / "long.tsv").write_text("a\tb\n1\t2\t3\n")
    for name, text in (("twice", "'a' is there twice"), ("long", "longer.*separated by tabs")):
        with pytest.raises(ValueError, match=text):
            data.load(str(tmp_path / f"{name}.tsv"))


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    path = tmp_path / "twice.csv"
    path.write_text("hb,hb,wbc\n1,2,3\n4,5,6\n")
    with pytest.raises(ValueError, match="the column 'hb' is there twice"):
        data.load(str(path))


def test_numbers_kept_as_text_are_named():
    frame = pd.DataFrame({"a": pd.Series(["1", "2", "3"], dtype=object), "b": [1.0, 2.0, 3.0]})
    with pytest.raises(ValueError, match="numbers kept as text"):
        from_frame(frame, TableOptions("all=a,b"))


def test_a_name_with_brackets_is_a_column_though_it_would_be_another_pattern():
    frame = pd.DataFrame({"age [years]": [1.0, 2.0], "age y": [3.0, 4.0], "b": [5.0, 6.0]})
    found = from_frame(frame, TableOptions("who=age [years]; rest=b"))
    np.testing.assert_array_equal(found.views[0], [[1], [2]])


def test_a_value_of_words_may_be_given_the_name_of_a_column_beside_them():
    frame = pd.DataFrame({"sex": list("mfmf"), "sex_m": [1.0, 2.0, np.nan, 4.0]})
    options = TableOptions(categories="onehot")
    with pytest.raises(ValueError, match="'sex_m' of view 0 is empty in 1 rows"):
        from_frame(frame, options)
    found = from_frame(frame.fillna(3.0), options)
    np.testing.assert_array_equal(found.views[0].T, [[0, 1, 0, 1], [1, 0, 1, 0], [1, 2, 3, 4]])
    with pytest.raises(ValueError, match="'sex_m' of view 0 has infinite cells"):
        from_frame(frame.fillna(np.inf), options)


def test_a_frame_has_no_column_twice_and_columns_of_one_level():
    with pytest.raises(ValueError, match="table: the column '1' is there twice"):
        from_frame(pd.DataFrame([[1.0, 2.0]], columns=["1", 1]))
    with pytest.raises(ValueError, match="frame: got a list; allowed is a pandas DataFrame"):
        from_frame([[1.0, 2.0]])
    pairs = pd.MultiIndex.from_tuples([("blood", "hb"), ("blood", "wbc")])
    with pytest.raises(ValueError, match="table: has columns of 2 levels; allowed is one"):
        from_frame(pd.DataFrame([[1.0, 2.0]], columns=pairs))


def test_whole_numbers_are_classes_without_a_point():
    table = TABLE.assign(ill=[1.0, 2.5, 1.0, np.inf])
    assert from_frame(table, BLOOD).classes == ("1", "2.5", "inf")
