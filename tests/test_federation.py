"""Federations hold what the partition says, and refuse what cannot be trained on."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.sparse import csr_array

from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation, check_views, has_features, single_client

N = 14
DIMS = (3, 2, 4)


@pytest.fixture(scope="module")
def views():
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=(N, d)).astype(np.float32) for d in DIMS)


@pytest.fixture(scope="module")
def labels():
    return np.random.default_rng(1).choice([3, 7, 9], size=N)  # neither from 0 nor without gaps


def part(view_ids, rows, client_ids):
    """A cohort from one list of samples for each client."""
    width = max(map(len, rows))
    ids = np.array([list(row) + [-1] * (width - len(row)) for row in rows], np.int32)
    return Part(view_ids, ids, np.asarray(client_ids, np.int32))


# Any kind of subset: all views, one, and two that are not neighbours.
PARTITION = (
    part((0, 1, 2), [[5, 0, 7], [2]], [4, 1]),
    part((1,), [[9, 3], [11, 12], [13]], [0, 2, 5]),
    part((0, 2), [[1, 4, 6, 8]], [3]),
)


@pytest.fixture(scope="module")
def federation(views, labels):
    return Federation.from_arrays(views, labels, partition=PARTITION)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_from_arrays_gathers_the_samples_of_each_client(federation, views, labels):
    assert federation.view_dims == DIMS
    assert (federation.n_views, federation.n_clients, federation.n_classes) == (3, 6, 3)
    assert [c.n_clients for c in federation.cohorts] == [2, 3, 1]
    assert [federation.holds_all_views(c) for c in federation.cohorts] == [True, False, False]
    codes = {3: 0, 7: 1, 9: 2}
    for cohort, cohort_labels, given in zip(
        federation.cohorts, federation.labels, PARTITION, strict=True
    ):
        assert cohort.view_ids == given.view_ids
        assert cohort.mask.dtype == bool
        assert cohort.sample_ids.dtype == cohort.client_ids.dtype == cohort_labels.dtype == "int32"
        np.testing.assert_array_equal(cohort.sample_ids, given.sample_ids)
        np.testing.assert_array_equal(cohort.client_ids, given.client_ids)
        assert [x.dtype for x in cohort.views] == ["float32"] * len(given.view_ids)
        for client, samples in enumerate(given.sample_ids):
            for row, sample in enumerate(samples):
                assert cohort.mask[client, row] == (sample >= 0)
                for v, x in cohort.by_view().items():
                    np.testing.assert_array_equal(
                        x[client, row], views[v][sample] if sample >= 0 else np.zeros(DIMS[v])
                    )
                assert cohort_labels[client, row] == (codes[labels[sample]] if sample >= 0 else -1)


def test_from_arrays_takes_a_vertical_federation(views):
    # Shared samples, one view for each client.
    everyone = [range(N)]
    vertical = Federation.from_arrays(
        views, partition=[part((v,), everyone, [v]) for v in range(3)]
    )
    assert vertical.labels is None and vertical.n_classes is None
    for v, cohort in enumerate(vertical.cohorts):
        (x,) = cohort.views
        np.testing.assert_array_equal(x, views[v][None])
        assert cohort.mask.all()


def test_vmap_hands_out_one_client(federation):
    cohort = federation.cohorts[1]

    def one(client):
        assert client.view_ids == (1,)
        assert client.views[0].shape == (2, DIMS[1]) and client.client_ids.shape == ()
        return jnp.sum(client.by_view()[1]) + client.client_ids

    expected = np.asarray(cohort.views[0]).sum((1, 2)) + np.array([0, 2, 5])
    np.testing.assert_allclose(jax.vmap(one)(cohort), expected, rtol=1e-6)


def as_clients(views, labels):
    """The data of PARTITION as it lies with clients 0..5, their labels, and who is where."""
    rows = {
        int(c): (p.view_ids, ids[ids >= 0])
        for p in PARTITION
        for c, ids in zip(p.client_ids, p.sample_ids, strict=True)
    }
    clients = [{v: views[v][rows[c][1]] for v in rows[c][0]} for c in range(6)]
    return clients, [labels[rows[c][1]] for c in range(6)]


def test_from_clients_is_from_arrays_on_the_same_data(views, labels):
    clients, client_labels = as_clients(views, labels)
    got = Federation.from_clients(clients, client_labels)
    # Cohorts come widest first, clients in their order.
    partition = (
        part((0, 1, 2), [[2], [5, 0, 7]], [1, 4]),
        part((0, 2), [[1, 4, 6, 8]], [3]),
        part((1,), [[9, 3], [11, 12], [13]], [0, 2, 5]),
    )
    expected = Federation.from_arrays(views, labels, partition=partition)
    # Samples are numbered in the order of the clients.
    numbered = ([[2, -1, -1], [9, 10, 11]], [[5, 6, 7, 8]], [[0, 1], [3, 4], [12, -1]])
    expected = expected.replace(
        cohorts=tuple(
            cohort.replace(sample_ids=np.array(ids, np.int32))
            for cohort, ids in zip(expected.cohorts, numbered, strict=True)
        )
    )
    assert_same(got, expected)
    assert_same(Federation.from_clients(clients), expected.without_labels())


def test_from_clients_does_not_mind_the_order_of_a_clients_views(views, labels):
    clients, _ = as_clients(views, labels)
    turned = [dict(reversed(client.items())) for client in clients]
    assert_same(Federation.from_clients(turned), Federation.from_clients(clients))


def with_bad_value(views, value):
    bad = [v.copy() for v in views]
    bad[1][4, 0] = value
    return bad


FULL = (0, 1, 2)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize(
    ("change", "partition", "text"),
    [
        (lambda v: (v[0][:-1], *v[1:]), None, "same number of rows"),
        (lambda v: with_bad_value(v, np.nan), None, "view 1 has 1 values that are NaN or infinite"),
        (lambda v: with_bad_value(v, -np.inf), None, "view 1 has 1 values"),
        (lambda v: (v[0].astype(float) * 1e300, *v[1:]), None, "view 0 has"),  # beyond float32
        (lambda v: (v[0][:, 0], *v[1:]), None, "view 0 must be"),
        (None, (), "no cohort"),
        (
            None,
            [[0, 1], [2, 3]],
            "partition: got 'a list'; allowed is a list of data.Part, such as",
        ),
        (None, part(FULL, [[0]], [0]), "partition: got 'a tuple'; allowed is a list of data.Part"),
        (None, (Part(FULL, [[0, 1], [2]], [0, 1]),), "sample_ids .* rows of different lengths"),
        (None, (part(FULL, [[0], []], [0, 8]),), "client 8 is empty"),
        (None, (part(FULL, [[0], [1]], [3, 3]),), "client_ids"),
        (None, (part(FULL, [[0]], [3]), part((1,), [[1]], [3])), "client_ids"),
        (None, (part(FULL, [[0]], [-1]),), "client_ids"),
        (None, (part(FULL, [[0]], [2**29]),), f"client_ids .*allowed is 0..{2**29 - 1}"),
        (None, (part(FULL, [[0], [1, 2, 1]], [3, 4]),), "client 4 has sample 1 twice"),
        (None, (part((0, 3), [[0]], [0]),), r"view_ids \(0, 3\)"),
        (None, (part((-1, 0), [[0]], [0]),), r"view_ids \(-1, 0\)"),
        (None, (part((), [[0]], [0]),), r"view_ids \(\)"),
        (None, (part((2, 0), [[0]], [0]),), "increasing"),
        (None, (part((1, 1), [[0]], [0]),), "increasing"),
        (None, (part((0, 1), [[0]], [0]), part((0, 1), [[1]], [1])), r"two cohorts .*\(0, 1\)"),
        (None, (part(FULL, [[0, N]], [0]),), f"0..{N}"),
        (None, (part(FULL, [[0, -2]], [0]),), "-2"),
        (None, (Part(FULL, np.zeros(3, np.int32), np.zeros(1, np.int32)),), "shape"),
        (None, (Part(FULL, np.zeros((2, 1), np.int32), np.zeros(1, np.int32)),), "1 client_ids"),
        (None, (Part(FULL, np.array([[0, 1.5]]), np.zeros(1, int)),), "sample_ids .* are float64"),
        (None, (Part(FULL, np.zeros((1, 1), int), np.array([0.5])),), "client_ids .* are float64"),
    ],
)
def test_from_arrays_refuses(views, change, partition, text):
    given = views if change is None else change(views)
    with pytest.raises(ValueError, match=text):
        Federation.from_arrays(given, partition=PARTITION if partition is None else partition)


MISSING = [
    (np.array([1, np.nan, 2, np.nan, 1]), "got nan in 2 of 5 rows; allowed is a number or a word"),
    (np.array(["a", None, "b", "a", "b"], object), "got None in 1 of 5 rows"),
    (np.array(["a", np.nan, "b", "a", "b"], object), "got nan in 1 of 5 rows"),
    (np.array([1, None, 2, 2, 1], object), "got None in 1 of 5 rows"),
    (["a", float("nan"), "b", "a", "b"], "got nan in 1 of 5 rows"),
    ([1, "1", 2, 2, 1], "got numbers and words; allowed are either of them alone"),
]


@pytest.mark.parametrize(("labels", "text"), MISSING)
def test_labels_that_are_missing_or_of_two_kinds_are_refused(labels, text):
    x = np.eye(5)
    everyone = [Part((0,), np.arange(5)[None], np.array([0]))]
    with pytest.raises(ValueError, match=f"labels: {text}"):
        Federation.from_arrays([x], labels, partition=everyone)
    with pytest.raises(ValueError, match=text):
        Federation.from_agents([(range(5), x), (range(5), x)], labels)
    with pytest.raises(ValueError, match=f"client 1: .*{text}"):
        Federation.from_clients([{0: x}, {0: x}], [[1, 2, 1, 2, 1], labels])


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (([0.0, 1.0], ["1", "0"]), "client 1: labels: got words; allowed are numbers, as on cl"),
        ((["1", "0"], np.array([0, 1])), "client 1: labels: got numbers; allowed are words"),
        (([0, 1], None), "client 1: labels: got None; allowed are labels of every client, or of"),
        ((None, [0, 1]), "client 0: labels: got None"),
    ],
)
def test_from_clients_refuses_labels_of_different_kinds(labels, text):
    with pytest.raises(ValueError, match=text):
        Federation.from_clients([{0: np.eye(2)}] * 2, labels)


@pytest.mark.parametrize(
    "labels",
    [
        ([0, 1], np.array([1.0, 0.0])),
        ([False, True], np.array([1, 0], object)),
        (np.array(["a", "b"]), np.array(["b", "a"], object)),
    ],
)
def test_labels_of_one_kind_are_the_same_classes(labels):
    found = Federation.from_clients([{0: np.eye(2)}] * 2, labels)
    (truth,) = found.labels
    assert found.n_classes == 2 and (truth[0] == truth[1][::-1]).all()


@pytest.mark.parametrize("n", [N - 1, N + 1])
def test_from_arrays_refuses_labels_of_another_length(views, n):
    with pytest.raises(ValueError, match="labels"):
        Federation.from_arrays(views, np.zeros(n, int), partition=PARTITION)


@pytest.mark.parametrize(
    ("clients", "text"),
    [
        ([], "clients: got none"),
        ([{0: np.ones((2, 1))}, {}], "client 1: no views"),
        ([[np.ones((2, 1))]], "client 0: got a list; allowed is a dictionary of view ids"),
        ([{0: np.ones((2, 1)), "a": np.ones((2, 1))}], r"client 0: got view ids \[0, 'a'\]"),
        ([{0: np.ones((2, 1))}, {0: np.ones((0, 1))}], "client 1: view 0 .*non-empty"),
        ([{0: np.ones((2, 1)), 1: np.ones((3, 1))}], r"client 0: .*number of rows; got \[2, 3\]"),
        ([{0: np.ones((2, 1)), 1: None}], r"client 0: view 1: got None; allowed is an array \[n"),
        ([{0: csr_array(np.ones((2, 1)))}], "client 0: view 0: got a csr_array, which is sparse"),
        (({0: x} for x in ()), "clients: got none"),
        ([{0: np.ones((2, 1))}, {0: np.ones((2, 2))}], "client 1: view 0 has 2 .*allowed is 1"),
        ([{0: np.ones((2, 1))}, {0: np.ones(2)}], "client 1: view 0 .*non-empty"),
        ([{0: np.ones((2, 1)) * 1j}], "client 0: view 0 must hold real numbers"),
        ([{0: np.ones((2, 1))}, {0: np.full((2, 1), 1e300)}], "client 1: .*2 values"),
        ([{0: np.ones((2, 1))}, {2: np.ones((2, 1))}], r"views \[0, 2\] are held"),
        ([{0: np.ones((2, 1))}, {-1: np.ones((2, 1))}], "views"),
        ([{0: np.ones((2, 1))}, {0: np.full((1, 1), np.nan)}], "client 1: .*NaN"),
        ([{0: np.ones((2, 1))}, {0: np.full((1, 1), np.inf)}], "client 1: .*infinite"),
    ],
)
def test_from_clients_refuses(clients, text):
    with pytest.raises(ValueError, match=text):
        Federation.from_clients(clients)


@pytest.mark.parametrize(
    ("lengths", "text"),
    [((2, 2), "client 1: labels"), ((3, 2), "client 0: labels"), ((2, 3, 1), "3 arrays for 2")],
)
def test_from_clients_refuses_labels_of_another_length(lengths, text):
    clients = [{0: np.ones((2, 1))}, {0: np.ones((3, 1))}]
    with pytest.raises(ValueError, match=text):
        Federation.from_clients(clients, [np.zeros(n, int) for n in lengths])


# Groups 30 seconds apart, in seconds since 1970: float32 knows multiples of 128 there.
TIMES = 1.7e9 + 30 * np.eye(3)[np.arange(N) % 3]
ROUNDED = r"view 1: column 0: got numbers that float32 rounds by up to 30; allowed is 0\.0144, a"


def test_features_that_float32_would_round_away_are_refused(views):
    everyone = [Part((0, 1), np.arange(N)[None], np.array([0]))]
    for times in (TIMES, TIMES.astype(int)):
        with pytest.raises(ValueError, match=ROUNDED):
            Federation.from_arrays([views[0], times], partition=everyone)
        with pytest.raises(ValueError, match=ROUNDED):
            Federation.from_agents([(range(N), views[0]), (range(N), times)])
        with pytest.raises(ValueError, match=ROUNDED):
            Federation.from_clients([{0: views[0][:5], 1: times[:5]}, {1: times[5:]}])
    # As the error says, or by whoever has lost nothing.
    centred = TIMES - TIMES.mean(axis=0)
    Federation.from_arrays([views[0], centred], partition=everyone)
    Federation.from_arrays([views[0], TIMES.astype(np.float32)], partition=everyone)


def test_a_client_may_know_little_of_a_features_spread():
    wide, narrow = np.array([[0.0], [1000.0]]), np.array([[1000.0], [1000.00003]])
    Federation.from_clients([{0: wide}, {0: narrow}])
    with pytest.raises(ValueError, match=r"view 0: column 0: .* rounds"):
        Federation.from_clients([{0: narrow}])


def test_rows_that_do_not_hold_a_view_count_nowhere_in_its_spread(views):
    lacking = np.where(np.arange(N)[:, None] < 4, 0, TIMES)
    some = [part((0,), [range(4)], [0]), part((0, 1), [range(4, N)], [1])]
    with pytest.raises(ValueError, match=r"view 1: column 0: .* rounds by up to 30"):
        Federation.from_arrays([views[0], lacking], partition=some)


def test_from_arrays_refuses_a_cohort_without_clients(views):
    nobody = Part((1, 2), np.zeros((0, 3), int), np.zeros(0, int))
    with pytest.raises(ValueError, match="one client at least"):
        Federation.from_arrays(views, partition=[*PARTITION, nobody])


def test_numbers_whose_squares_float32_has_not_are_refused(views):
    """All rows would be alike, and in one cluster."""
    with pytest.raises(
        ValueError, match=r"^view 1 has no numbers beyond .*e-2\d; .* 1e-15 or more"
    ):
        Federation.from_clients([{0: views[0], 1: 1e-25 * views[1]}, {1: 1e-24 * views[1]}])
    # What is small on some clients, or zero everywhere, is not small.
    Federation.from_clients([{0: 1e-25 * views[0]}, {0: views[0]}])
    Federation.from_clients([{0: views[0], 1: 0 * views[1]}])


def test_bfloat16_are_real_numbers(views):
    narrow = jnp.asarray(views[0], jnp.bfloat16)
    (cohort,) = Federation.from_clients([{0: narrow}]).cohorts
    assert cohort.views[0].dtype == jnp.float32
    np.testing.assert_array_equal(cohort.views[0][0], narrow.astype(jnp.float32))
    np.testing.assert_array_equal(single_client({0: narrow}).views[0], cohort.views[0][0])


def test_what_is_masked_does_not_count_as_a_number(views):
    held = np.ma.masked_greater(views[0], 1.0)
    with pytest.raises(ValueError, match=r"^client 0: view 0 has \d+ values that are masked"):
        Federation.from_clients([{0: held}])
    Federation.from_clients([{0: np.ma.masked_greater(views[0], 100.0)}])  # masks nothing


@pytest.mark.parametrize(
    ("first", "other", "text"),
    [
        ("abc", "cba", "view 1: row 0 is 'c' in its index; allowed is 'a', as in view 0"),
        ("abc", "abd", "view 1: row 2 is 'd' in its index; allowed is 'c', as in view 0"),
        (range(3), [0, 2, 1], "view 1: row 1 is '2' in its index; allowed is '1', as in view 0"),
        ("abc", "abc", ""),
        ([5, 3, 4], [5.0, 3.0, 4.0], ""),
        ("abc", range(3), ""),  # which only counts
        (range(3), [5, 3, 4], ""),
    ],
)
def test_indices_of_tables_name_the_same_rows(first, other, text):
    pd = pytest.importorskip("pandas", reason="pandas is not installed: the extra experiments")
    tables = {v: pd.DataFrame(np.eye(3), index=list(x)) for v, x in enumerate((first, other))}
    classes = pd.Series(list("xyz"), index=list(other))
    if text:
        with pytest.raises(ValueError, match=f"^client 0: {text}: rows are taken by place"):
            Federation.from_clients([tables])
        with pytest.raises(ValueError, match="labels: row"):
            single = part((0,), [[0, 1, 2]], [0])
            Federation.from_arrays([tables[0]], classes, partition=[single])
    else:
        assert Federation.from_clients([tables], [classes]).n_views == 2


@pytest.mark.parametrize(
    ("first", "other", "text"),
    [
        ("ab", "ba", "client 1: view 0: column 0 is 'b'; allowed is 'a'"),
        ("ab", "ac", "client 1: view 0: column 1 is 'c'; allowed is 'b'"),
        ([101, 7], [7, 101], "client 1: view 0: column 0 is '7'; allowed is '101'"),
        ([0, 1], [1, 0], "client 1: view 0: column 0 is '1'; allowed is '0'"),
        ("ab", "ab", ""),
        ([0, 1], "ab", ""),  # the first only counts
    ],
)
def test_columns_of_tables_are_the_same_ones(first, other, text):
    pd = pytest.importorskip("pandas", reason="pandas is not installed: the extra experiments")
    clients = [{0: pd.DataFrame(np.eye(2), columns=list(names))} for names in (first, other)]
    if text:
        with pytest.raises(ValueError, match=text):
            Federation.from_clients(clients)
    else:
        third = {0: pd.DataFrame(np.eye(2), columns=list("ba"))}
        with pytest.raises(ValueError, match="client 2: view 0: column 0 is 'b'; allowed is 'a'"):
            Federation.from_clients([*clients, third])


@pytest.mark.parametrize("given", [[np.ones((3, 2))], {"blood": np.ones((3, 2))}])
def test_a_single_client_is_a_dictionary_of_view_ids(given):
    with pytest.raises(ValueError, match=r"^views: got .*; allowed is a dictionary of view ids"):
        single_client(given)


def test_a_single_client_is_a_row_of_a_cohort():
    views = {2: np.arange(6.0).reshape(3, 2), 0: np.ones((3, 1))}
    client = single_client(views)
    everyone = Federation.from_clients([views, {0: views[0], 1: views[0], 2: views[2]}])
    (cohort,) = (c for c in everyone.cohorts if c.view_ids == (0, 2))
    row = jax.tree.map(lambda x: x[0], cohort)
    chex.assert_trees_all_equal(client, row)
    chex.assert_trees_all_equal_dtypes(client, row)
    with pytest.raises(ValueError, match="view 1 has 1 values that are NaN"):
        single_client({1: np.array([[np.nan]])})
    with pytest.raises(ValueError, match="no views"):
        single_client({})


def test_check_views_names_what_a_model_does_not_know():
    client = single_client({0: np.ones((5, 4)), 1: np.ones((5, 3))})
    check_views(client, {0: 4, 1: 3, 2: 2})
    check_views(client, {1: 3, 0: 4}, complete=True)
    with pytest.raises(
        ValueError, match=r"^view 1 has 3 features; allowed is 1, as when the model"
    ):
        check_views(client, {0: 4, 1: 1})
    with pytest.raises(ValueError, match=r"^view 1 is none of the model's; allowed are 0, 2$"):
        check_views(client, {0: 4, 2: 3})
    with pytest.raises(
        ValueError, match=r"^client: holds views \(0, 1\); allowed are all of 0, 1, 2"
    ):
        check_views(client, {0: 4, 1: 3, 2: 2}, complete=True)


def test_check_rows_names_the_first_client_with_too_few(federation):
    federation.check_rows(1, "any reason")
    with pytest.raises(ValueError, match=r"client 1 .*has 1 samples.*2 or more.*for a pair"):
        federation.check_rows(2, "for a pair")
    wide = federation.replace(cohorts=federation.cohorts[1:])
    with pytest.raises(ValueError, match=r"client 5 \(views \(1,\)\)"):
        wide.check_rows(2, "for a pair")


def test_check_rows_checks_nothing_while_tracing(federation):
    assert not federation.is_traced

    def traced(f):
        assert f.is_traced
        f.check_rows(100, "never told")
        return f.cohorts[0].mask

    np.testing.assert_array_equal(jax.jit(traced)(federation), federation.cohorts[0].mask)


def test_without_labels_drops_labels_alone(federation):
    bare = federation.without_labels()
    assert bare.labels is None and bare.n_classes is None
    assert_same(bare.cohorts, federation.cohorts)
    assert bare.view_dims == federation.view_dims
    assert federation.labels is not None and federation.n_classes == 3


def test_describe_counts_clients_and_samples(federation):
    assert federation.describe().splitlines() == [
        "2 clients with all views, 1..3 samples each, 4 in all",
        "3 clients with view 1, 1..2 samples each, 5 in all",
        "1 client with views 0, 2, 4 samples each, 4 in all",
    ]
    lines = federation.describe(["blood", "genes", "images"]).splitlines()
    assert lines[1].startswith("3 clients with view genes, 1..2")
    assert lines[2].startswith("1 client with views blood, images, 4 samples")
    with pytest.raises(ValueError, match=r"view_names: got \['blood'\]; allowed is 3 names"):
        federation.describe(["blood"])


def in_cohorts(views, *parts):
    """A federation of cohorts, each given as its views and its clients' samples (-1 pads)."""
    sizes = np.cumsum([0, *(len(rows) for _, rows in parts)])
    partition = [
        Part(view_ids, np.asarray(rows, np.int32), first + np.arange(len(rows), dtype=np.int32))
        for (view_ids, rows), first in zip(parts, sizes, strict=False)
    ]
    return Federation.from_arrays(views, partition=partition)


@pytest.mark.parametrize(
    "parts",
    [
        # The third has a sample of the first, the second holds them together.
        [((0,), [[0, 1]]), ((1,), [[1, 2]]), ((2,), [[0, 3]])],
        # View 1 is linked to view 0 by a sample, and to view 2 by a client.
        [((0,), [[0, 1]]), ((1,), [[1, 2]]), ((1, 2), [[3, 4]])],
    ],
)
def test_views_may_be_linked_by_others_that_are(views, parts):
    in_cohorts(views, *parts).check_linked("it")


def test_padding_links_no_views(views):
    apart = in_cohorts(
        views, ((0,), [[0, 1], [5, -1]]), ((1,), [[1, 2]]), ((2,), [[3, 4], [6, -1]])
    )
    with pytest.raises(ValueError, match=r"^it: no sample has views of both \(0, 1\) and \(2,\)"):
        apart.check_linked("it")


def agents(views, *rows):
    """A vertical federation of an agent for each view, with its samples (-1 for none)."""
    return in_cohorts(views, *(((v,), [row]) for v, row in enumerate(rows)))


def test_agents_lack_samples_only_where_they_may(views):
    lacking = agents(views, [0, -1, 2], [0, 1, -1], [-1, 1, 2])
    lacking.check_vertical(complete=False)
    with pytest.raises(
        ValueError, match=r"^agent 1: its samples differ from the first agent's, or"
    ):
        lacking.check_vertical()
    fewer = agents(views, [0, 1, 2], [0, 1, -1])
    fewer.check_vertical(complete=False)
    with pytest.raises(ValueError, match=r"^agent 1: .* it has 2 and the first 3; all agents"):
        fewer.check_vertical()


def test_agents_rows_are_compared_where_the_first_agent_lacks_a_sample(views):
    federation = agents(views, [0, -1, 2], [0, 1, 2], [0, 3, 2])
    with pytest.raises(ValueError, match=r"^agent 2: its samples differ"):
        federation.check_vertical(complete=False)


def test_agents_rows_may_come_in_any_order_only_where_they_may(views):
    turned = agents(views, [0, 1, 2], [2, 0, 1])
    turned.check_vertical(aligned=False)
    with pytest.raises(ValueError, match=r"^agent 1: its samples differ"):
        turned.check_vertical()
    with pytest.raises(ValueError, match=r"^agent 1: its samples differ"):
        agents(views, [0, 1, 2], [2, 0, 5]).check_vertical(aligned=False)
    for options in ({}, {"complete": False, "aligned": False}):
        with pytest.raises(ValueError, match=r"^agent 1: its samples differ"):
            agents(views, [0, 1, 2], [0, 1, 2, -1]).check_vertical(**options)


def test_each_agent_holds_views_of_its_own(views):
    agents(views, [0, 1], [0, 1], [0, 1]).check_vertical()
    for parts in (
        [((0,), [[0, 1], [2, 3]]), ((1,), [[0, 1]])],
        [((0,), [[0, 1]]), ((0, 1), [[0, 1]])],
    ):
        with pytest.raises(ValueError, match=r"are held by several clients"):
            in_cohorts(views, *parts).check_vertical()


def test_an_agent_has_a_sample_once(views):
    federation = agents(views, [0, 1, 2], [0, 1, 2])
    first, second = federation.cohorts
    twice = second.replace(sample_ids=jnp.array([[0, 2, 2]]))
    with pytest.raises(ValueError, match=r"^agent 1: sample 2 is there twice"):
        federation.replace(cohorts=(first, twice)).check_vertical(complete=False, aligned=False)


def test_an_agent_must_have_a_feature_that_varies_over_its_own_rows():
    varied, constant = np.arange(4.0)[:, None], np.full((4, 1), 5.0)
    told = [((0, 1), [[0, 1]]), ((1,), [[2, 3, -1]])]
    # One constant feature, or a whole constant view, is no harm beside what varies.
    in_cohorts((constant, varied), *told).check_features()
    in_cohorts((varied, np.hstack([constant, varied])), *told).check_features()
    # Zeros of padding are no values of the agent's.
    with pytest.raises(ValueError, match=r"^agent 1: all of its 1 features are constant"):
        in_cohorts((varied, constant), *told).check_features()
    with pytest.raises(ValueError, match=r"^agent 0: all of its 2 features are constant"):
        in_cohorts((constant, constant), *told).check_features()


def test_features_can_be_looked_at_though_a_view_is_all_zeros():
    zeros, ones = np.zeros((4, 2)), np.ones((4, 1))
    found = [Federation.from_clients([{0: zeros, 1: x}]) for x in (zeros[:, :1], ones)]
    assert list(map(has_features, found)) == [False, True]
    assert not jax.eval_shape(lambda f: jnp.zeros(int(has_features(f))), found[1]).size
