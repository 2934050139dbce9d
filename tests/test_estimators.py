"""The estimators: what scikit-learn expects of them, and the library's own answers."""

import dataclasses
import pickle

import jax
import numpy as np
import pytest
from scipy.sparse import dok_array
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.metrics import adjusted_rand_score
from sklearn.model_selection import ParameterGrid
from sklearn.utils.estimator_checks import check_estimator

from jaxfedmvc import METHODS, Federation, checks, engine, estimators
from jaxfedmvc.algorithms import FedHKConfig, FedHKHyperparams, e_fkmvc
from jaxfedmvc.algorithms.registry import configured
from jaxfedmvc.estimators import FederatedClusterer, parameters

TRUTH = np.arange(60) % 3
RNG = np.random.default_rng(0)
VIEWS = [np.eye(3, d)[TRUTH] + 0.1 * RNG.normal(size=(60, d)) for d in (5, 4)]
ROWS = (slice(0, 24), slice(24, 43), slice(43, 60))
# Of two cohorts, which are not in the order of the clients: every cohort has programs of its own.
CLIENTS = [
    {0: VIEWS[0][ROWS[0]]},
    {0: VIEWS[0][ROWS[1]], 1: VIEWS[1][ROWS[1]]},
    {0: VIEWS[0][ROWS[2]]},
]
CLASSES = [TRUTH[rows] for rows in ROWS]


def make(**options):
    return FederatedClusterer("e_fkmvc", 3, **({"rounds": 3, "random_state": 0} | options))


@pytest.fixture(scope="module")
def ended():
    """An estimator, and the rounds that its fit ended after; those of shapes alone come first."""
    ends, evaluate = [], estimators.Steps.evaluate

    def noted(steps, federation, key, state, r):
        ends.append(r)
        return evaluate(steps, federation, key, state, r)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimators.Steps, "evaluate", noted)
        return make(tau=5.0).fit(CLIENTS), ends


@pytest.fixture(scope="module")
def fitted(ended):
    return ended[0]


@pytest.mark.ci
def test_clusters_are_those_of_the_engine(fitted):
    algorithm = e_fkmvc(FedHKConfig(3), FedHKHyperparams(tau=5.0))
    federation = Federation.from_clients(CLIENTS)
    run = jax.jit(lambda f: engine.run(algorithm, f, jax.random.key(0), 3, client_chunk=1))
    result = run(federation)
    for cohort, labels in zip(federation.cohorts, result.labels, strict=True):
        for client, found, mask in zip(cohort.client_ids, labels, cohort.mask, strict=True):
            np.testing.assert_array_equal(fitted.labels_[int(client)], found[mask])
    assert fitted.n_rounds_ == int(result.n_rounds)
    traffic = engine.traffic(algorithm, federation)
    times = {"setup": 1, "round": fitted.n_rounds_, "finish": 1}
    assert fitted.bytes_up_ == sum(n * traffic[stage].up for stage, n in times.items())
    assert fitted.bytes_down_ == sum(n * traffic[stage].down for stage, n in times.items())


def test_the_end_is_that_of_the_last_round(ended):
    fitted, ends = ended
    assert fitted.n_rounds_ > 1
    assert ends[-1] == fitted.n_rounds_ - 1


def test_columns_of_tables_are_told_by_name(fitted):
    pd = pytest.importorskip("pandas", reason="pandas is not installed: the extra experiments")
    tables = [
        {
            v: pd.DataFrame(x, columns=[f"f{i}" for i in range(x.shape[1])])
            for v, x in client.items()
        }
        for client in CLIENTS
    ]
    turned = {0: tables[2][0].iloc[:, ::-1]}
    with pytest.raises(ValueError, match="client 2: view 0: column 0 is 'f4'; allowed is 'f0'"):
        make().fit([*tables[:2], turned])
    narrow = {0: tables[2][0].iloc[:, :4]}
    with pytest.raises(ValueError, match="view 0 has 4 features"):
        make().fit([*tables[:2], narrow])
    found = make(tau=5.0).fit(tables)
    np.testing.assert_array_equal(np.concatenate(found.labels_), np.concatenate(fitted.labels_))
    with pytest.raises(ValueError, match="view 0: column 0 is 'f4'; allowed is 'f0'"):
        found.predict(turned)
    np.testing.assert_array_equal(found.predict(CLIENTS[2]), fitted.labels_[2])  # without names


def test_tables_that_name_rows_in_another_order_are_refused(fitted):
    pd = pytest.importorskip("pandas", reason="pandas is not installed: the extra experiments")
    names = [f"p{i}" for i in range(19)]
    tables = {v: pd.DataFrame(x, index=names) for v, x in CLIENTS[1].items()}
    turned = {0: tables[0], 1: tables[1][::-1]}
    text = "view 1: row 0 is 'p18' in its index; allowed is 'p0', as in {}view 0"
    with pytest.raises(ValueError, match="client 0: " + text.format("client 0: ")):
        make().fit([turned, CLIENTS[0]])
    with pytest.raises(ValueError, match=text.format("")):
        FederatedClusterer("lsimvc", 3).fit(list(turned.values()))
    classes = pd.Series(CLASSES[1], index=names)
    assert fitted.score(tables, classes) == fitted.score(CLIENTS[1], CLASSES[1])
    with pytest.raises(ValueError, match="y: row 0 is 'p18' in its index; allowed is 'p0', as in"):
        fitted.score(tables, classes[::-1])


def test_features_that_float32_would_round_away_are_refused():
    times = [{v: 1.7e9 + 30 * x for v, x in client.items()} for client in CLIENTS]
    with pytest.raises(ValueError, match="view 0: column 0: got numbers that float32 rounds by"):
        make().fit(times)
    with pytest.raises(ValueError, match="view 0: column 0: got numbers that float32 rounds by"):
        FederatedClusterer("local_kmeans", 3).fit(times[0][0])


def test_further_rows_are_clustered_as_those_of_a_client_are(fitted):
    for found, known in zip(fitted.predict(CLIENTS), fitted.labels_, strict=True):
        np.testing.assert_array_equal(found, known)
    one = fitted.predict({0: VIEWS[0]})  # a client that holds other rows
    assert adjusted_rand_score(TRUTH, one) == 1.0
    assert fitted.score(CLIENTS, CLASSES) == 1.0


QUICK = {"hidden": (8,), "pretrain_epochs": 2, "local_epochs": 1, "n_init": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("e_fkmvc", {}),
        ("fedhk_parafac2", {}),
        ("fedhk_parafac2", {"placement": "views"}),
        ("fedhk_tucker", {}),
        ("fmcsc", QUICK),
        ("fmcsc", QUICK | {"centroids": "federated"}),
        ("private_e_fkmvc", {"noise_multiplier": 1e-3}),
    ],
)
def test_one_row_is_clustered_as_it_is_among_others(method, settings):
    """Training asks for as many rows as clusters, and for as many clients as share the noise."""
    clients = [{v: x[rows] for v, x in enumerate(VIEWS)} for rows in ROWS]
    found = FederatedClusterer(method, 3, rounds=2, random_state=0, **settings).fit(clients)
    together = found.predict({v: x[:12] for v, x in enumerate(VIEWS)})
    alone = [found.predict({v: x[i : i + 1] for v, x in enumerate(VIEWS)}) for i in range(3)]
    assert [labels.tolist() for labels in alone] == [[label] for label in together[:3]]


@pytest.mark.slow
def test_fewer_rows_than_the_rank_of_a_model_of_samples_are_refused():
    options = {"rounds": 1, "random_state": 0, "placement": "samples"}
    clients = [{v: x[rows] for v, x in enumerate(VIEWS)} for rows in ROWS]
    found = FederatedClusterer("fedhk_parafac2", 3, **options).fit(clients)
    assert len(found.predict({v: x[:3] for v, x in enumerate(VIEWS)})) == 3
    with pytest.raises(ValueError, match="client: has 2 samples; allowed is 3 or more, the rank"):
        found.predict({v: x[:2] for v, x in enumerate(VIEWS)})


def test_what_training_asks_for_is_asked_before_it():
    rows = {0: VIEWS[0][:2], 1: VIEWS[1][:2]}
    with pytest.raises(ValueError, match="n_clusters: got 3 for 2 samples in all"):
        make().fit([rows])
    with pytest.raises(ValueError, match=r"client 0 .* has 2 samples; allowed is 3 or more"):
        FederatedClusterer("fmcsc", 3).fit([rows])


def test_the_same_seed_finds_the_same_and_a_clone_is_unfitted(fitted):
    again = clone(fitted)
    assert again.get_params() == fitted.get_params() and again.get_params()["tau"] == 5.0
    with pytest.raises(NotFittedError):
        again.predict(CLIENTS)
    for a, b in zip(again.fit_predict(CLIENTS), fitted.labels_, strict=True):
        np.testing.assert_array_equal(a, b)
    assert repr(fitted) == (
        "FederatedClusterer(method='e_fkmvc', n_clusters=3, random_state=0, rounds=3,\n"
        "                   tau=5.0)"
    )


def test_another_seed_is_another_run_and_no_rounds_are_none(fitted):
    other = make(tau=5.0, random_state=1, rounds=0).fit(CLIENTS)
    again = make(tau=5.0, rounds=0).fit(CLIENTS)
    assert other.n_rounds_ == again.n_rounds_ == 0
    states = zip(*(jax.tree.leaves(found.server_state_) for found in (other, again)), strict=True)
    assert any(np.any(a != b) for a, b in states)


def test_other_seeds_rows_and_numbers_compile_nothing(fitted, monkeypatch):
    compiled, compile_one = [], jax.stages.Lowered.compile

    def counted(lowered, *args, **kwargs):
        compiled.append(lowered)
        return compile_one(lowered, *args, **kwargs)

    def fit(clients, seed, method="local_kmeans", **settings):
        before = len(compiled)
        found = FederatedClusterer(method, 3, rounds=3, random_state=seed, **settings)
        return found.fit(clients).labels_, len(compiled) - before

    monkeypatch.setattr(jax.stages.Lowered, "compile", counted)
    shifted = [{v: x + 1 for v, x in client.items()} for client in CLIENTS]
    _, further = fit(shifted, 1, "e_fkmvc", beta=0.5)
    assert further == 0  # those of `fitted` will do
    estimators._programs.cache_clear()
    clients, shifted = CLIENTS[1:2], shifted[1:2]  # a cohort is enough
    for n_init in (1, 2):  # static
        _, first = fit(clients, 0, n_init=n_init, limit=3)
        assert first > 1
    shared, further = fit(shifted, 1, n_init=2, limit=2)
    assert further == 0 and len(np.unique(shared)) == 2
    estimators._programs.cache_clear()
    alone, _ = fit(shifted, 1, n_init=2, limit=2)
    np.testing.assert_array_equal(shared, alone)


def test_settings_are_parameters_that_can_be_searched(fitted):
    for setting in ParameterGrid({"tau": [1.0, 8.0], "n_clusters": [2, 3]}):
        assert clone(fitted).set_params(**setting).get_params().items() >= setting.items()
    both = make().set_params(tau=1.0).set_params(fuzzifier=1.5).get_params()
    assert (both["tau"], both["fuzzifier"]) == (1.0, 1.5)
    with pytest.raises(ValueError, match="parameter: got 'colour'; allowed is method, n_clusters"):
        make().set_params(colour=1)
    with pytest.raises(ValueError, match="got 'fuzifier'; did you mean 'fuzzifier'"):
        make().set_params(fuzifier=1.1)
    assert {"n_clusters", "tau"} <= set(parameters("e_fkmvc"))


def test_settings_go_with_their_method():
    """Both have a tau, which pulls towards centres in the one and is a temperature in the other."""
    changed = make(tau=5.0, fuzzifier=1.1, rounds=7)
    with pytest.warns(UserWarning, match="mgcd takes .* whose settings fuzzifier, tau are"):
        changed.set_params(method="mgcd", n_init=4)
    assert changed.settings == {"n_init": 4} and changed.rounds == 7
    assert changed.set_params(method="mgcd", tau=0.2).settings == {"n_init": 4, "tau": 0.2}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_has_parameters_and_can_be_cloned(method):
    estimator = clone(FederatedClusterer(method, 3))
    assert estimator.get_params()["method"] == method
    can = METHODS[method].topology == "horizontal" and not method.startswith("local_")
    assert hasattr(estimator, "predict") == can


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("lmvsc", {}),
        ("mgcd", {}),
        ("vertcohirf", {}),
        ("fmcsc", {"hidden": (16,), "pretrain_epochs": 20, "local_epochs": 5, "n_init": 2}),
    ],
)
def test_views_of_one_place_are_clustered_by_methods_of_every_kind(method, settings):
    found = FederatedClusterer(method, 3, random_state=0, **settings).fit(VIEWS)
    assert found.labels_.shape == (60,) and adjusted_rand_score(TRUTH, found.labels_) > 0.9


def test_the_number_of_clusters_is_found_only_where_none_is_given(monkeypatch):
    def make(**options):
        small = {"local_clusters": (3, 4), "n_init": 2, "random_state": 0}
        return FederatedClusterer("label_consensus", **small, **options)

    assert make().fit(VIEWS[0]).labels_.max() + 1 == 3
    given = []

    def noted(method, settings, of_the_run):
        given.append(settings["shared_clusters"])
        raise InterruptedError

    monkeypatch.setattr(estimators, "configured", noted)
    for options in ({"n_clusters": 2}, {"n_clusters": 2, "shared_clusters": 4}):
        with pytest.raises(InterruptedError):
            make(**options).fit(VIEWS[0])
    assert given == [2, 4]


@pytest.mark.ci
def test_bytes_of_rounds_that_shrink_are_each_rounds_own():
    rng = np.random.default_rng(4)
    views = [rng.normal(size=(300, d)) for d in (5, 4)]
    settings = {"local_clusters": 20, "repetitions": 1}
    found = FederatedClusterer("vertcohirf", random_state=0, **settings).fit(views)
    config, hyper = configured(METHODS["vertcohirf"], settings, {"n_clusters": None})
    federation = Federation.from_agents([(np.arange(300), x) for x in views])
    first = engine.traffic(METHODS["vertcohirf"].make(config, hyper), federation)["round"]
    assert found.n_rounds_ > 1
    assert first.up < found.bytes_up_ < found.n_rounds_ * first.up


def test_a_model_that_is_nan_has_no_clusters(monkeypatch):
    given = []
    monkeypatch.setattr(checks, "has_nan", lambda states: given.append(states) or True)
    with pytest.raises(ValueError, match="fit: the model of local_kmeans is NaN after 0 rounds"):
        FederatedClusterer("local_kmeans", 3, random_state=0).fit(CLIENTS)
    ((_, of_clients),) = given  # beside the server's
    assert sum(map(len, of_clients)) == 3


@pytest.mark.slow
def test_agents_with_clusters_of_their_own_have_an_array_each_even_where_they_agree():
    far = [np.eye(3, d)[TRUTH] for d in (5, 4)]
    found = FederatedClusterer("coreset_kmeans", 3, random_state=0).fit(far)
    first, second = found.labels_
    assert first.shape == second.shape == (60,) and adjusted_rand_score(first, second) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("method", [m for m in METHODS if METHODS[m].topology == "vertical"])
def test_labels_are_of_each_agent_where_they_follow_its_features(method):
    entry = METHODS[method]
    of_the_run = {"n_clusters": 3, "n_clients": 2, "rounds": 1}
    algorithm = entry.make(*configured(entry, {}, of_the_run))
    federation = Federation.from_agents([(range(60), view) for view in VIEWS])
    server, states = algorithm.init(jax.random.key(0), federation)
    state, client = jax.tree.map(lambda x: x[0], (states[0], federation.cohorts[0]))

    def labels(views):
        return algorithm.assign(server, state, dataclasses.replace(client, views=views))

    program = jax.make_jaxpr(labels)(client.views).jaxpr
    read = any(program.invars[0] is v for eqn in program.eqns for v in eqn.invars)
    assert read == METHODS[method].own_labels


@pytest.mark.parametrize(
    ("clients", "options", "text"),
    [
        ([{0: np.ones((4, 2)), 1: np.ones((3, 2))}], {}, "client 0: views: have {0: 4, 1: 3} rows"),
        ([{"a": np.ones((4, 2))}], {}, "client 0: views: got 'a'; allowed is ids 0, 1"),
        ([{0: np.full((4, 2), np.nan)}], {}, "client 0: view 0 contains NaN; allowed are"),
        ([{0: np.array([["a", "b"]])}], {}, "client 0: view 0: .*could not convert string"),
        ([{0: np.ones(4)}], {}, "client 0: view 0: Expected 2D array, got 1D"),
        ([{0: np.ones(4)}], {}, r"instead: Reshape your data"),
        ([np.ones(4), np.ones((4, 2))], {}, "view 0: Expected 2D array, got 1D"),
        ([{0: np.ones((4, 2)) * 1j}], {}, "client 0: view 0: Complex data not supported$"),
        (
            [{0: np.ma.masked_equal([[1.0], [2.0]], 2)}],
            {},
            "client 0: view 0 has 1 values that are",
        ),
        (
            [{0: np.array([["2020-01-01"]], "datetime64[s]")}],
            {},
            r"client 0: view 0: got 'datetime64\[s\]'; allowed is numbers, such as days since",
        ),
        ([CLIENTS[0], {0: np.ones((0, 5))}], {}, r"client 1: view 0: Found array with 0 sample"),
        ([{}], {}, "client 0: views: got 'none'; allowed is a dictionary of one array or more"),
        ([VIEWS[0], CLIENTS[0]], {}, "clients: got 'arrays and dictionaries'; allowed is a list"),
        ([VIEWS, VIEWS], {}, "clients: got 'lists of arrays'; allowed is a list with a dictionary"),
        ((client for client in CLIENTS), {}, "clients: got a generator; allowed is a list with"),
        (None, {}, "clients: got None; allowed is a list with a dictionary"),
        (
            [{0: VIEWS[0], 1: None}],
            {},
            "client 0: view 1: got None; allowed is an array; rows that",
        ),
        (CLIENTS, {"random_state": -1}, "random_state: got -1; allowed is None, a whole number"),
        (CLIENTS, {"method": "dbscan"}, "method: got 'dbscan'; allowed is comvc"),
        (CLIENTS, {"method": "E-FKMVC"}, "method: got 'E-FKMVC'; did you mean 'e_fkmvc'"),
        (CLIENTS, {"colour": 1}, "settings: got 'colour'"),
        (CLIENTS, {"rounds": -1}, "rounds: got -1; allowed is 0 or more"),
        (CLIENTS, {"n_clusters": 3.0}, "n_clusters: got 3.0; allowed is a whole number, 1 or more"),
        ([], {}, r"clients: got \[\]; allowed is a list with a dictionary"),
        (CLIENTS[0], {}, "clients: got a dict; allowed is a list with a dictionary"),
        (CLIENTS, {"n_clusters": 0}, "n_clusters: got 0; allowed is 1 or more"),
        (CLIENTS, {"fuzzifier": "1.1"}, r"fuzzifier: got '1\.1'; allowed is more than 1"),
        (
            CLIENTS,
            {"fuzzifier": [1.1, 1.2]},
            r"fuzzifier: got \[1\.1, 1\.2\]; allowed is one number",
        ),
        (CLIENTS, {"alpha": None}, "alpha: got None; allowed is more than 1"),
        (CLIENTS, {"method": "fmcsc", "hidden": 64}, "hidden: got 64; allowed is widths of 1 or"),
        (VIEWS, {"method": "fcuif", "imputer_hidden": (8, 0)}, r"imputer_hidden: got \(8, 0\)"),
        (CLIENTS, {"tau": -1.0}, "tau: got -1.0"),
        (CLIENTS, {"method": "mgcd"}, "agents of a vertical method, as this one is, hold"),
    ],
)
def test_bad_input_is_named(clients, options, text):
    with pytest.raises(ValueError, match=text):
        make().set_params(**{k: v for k, v in options.items() if k == "method"})
        FederatedClusterer(**({"method": "e_fkmvc", "n_clusters": 3} | options)).fit(clients)


def test_a_sparse_matrix_is_refused_though_it_is_a_dictionary():
    with pytest.raises(TypeError, match="parse data was passed"):
        make().fit(dok_array(np.eye(4)))


def test_classes_of_other_rows_are_refused(fitted):
    with pytest.raises(ValueError, match=r"y: got \[3\] classes; allowed are \[4\], as many"):
        fitted.score([{0: np.ones((4, 5))}], [np.zeros(3)])


def test_classes_that_are_missing_or_of_two_kinds_are_refused(fitted):
    rows = [{0: VIEWS[0][:2]}, {0: VIEWS[0][2:4]}]
    with pytest.raises(ValueError, match="y: got nan in 1 of 2 rows"):
        fitted.score(rows, [np.array([0, np.nan]), np.array([0, 1])])
    with pytest.raises(ValueError, match="y: got numbers and words"):
        fitted.score(rows, [np.array([0, 1]), np.array(["0", "1"])])
    with pytest.raises(ValueError, match=r"y: got \[1, 1, 1, 1\] classes; allowed are \[2, 2\]"):
        fitted.score(rows, TRUTH[:4])
    with pytest.raises(ValueError, match=r"y: got an array \(2, 2\); allowed is a class for each"):
        fitted.score(rows, [np.eye(2), np.eye(2)])


def test_without_classes_there_is_no_score(fitted):
    with pytest.raises(ValueError, match="y: got None; allowed is classes"):
        fitted.score(CLIENTS, None)


def test_rows_with_other_features_are_refused(fitted):
    with pytest.raises(ValueError, match=r"view 0: X has 3 features, but .* expecting 5"):
        fitted.predict({0: np.ones((4, 3))})
    with pytest.raises(ValueError, match="views: got 2; allowed is 0 to 1"):
        fitted.predict({2: np.ones((4, 3))})


@pytest.mark.parametrize("number", [1e30, 1e39])
def test_numbers_that_float32_cannot_hold_are_refused_by_predict_as_by_fit(fitted, number):
    with pytest.raises(ValueError, match=r"view 0 has .*; allowed are"):
        fitted.predict({0: np.full((2, 5), number)})


def test_methods_without_predict_say_why():
    with pytest.raises(AttributeError) as caught:
        FederatedClusterer("mgcd", 3).predict(CLIENTS)
    assert "mgcd clusters the rows that it is fitted on" in str(caught.value.__cause__)


def test_a_fitted_estimator_can_be_pickled(fitted):
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict({0: VIEWS[0]}), fitted.predict({0: VIEWS[0]}))


@pytest.mark.slow
def test_scikit_learns_own_checks():
    """One array is one view in one place, so that its checks apply."""
    found = check_estimator(
        FederatedClusterer("e_fkmvc", 2, rounds=2, random_state=0),
        on_skip=None,
        expected_failed_checks={
            "check_no_attributes_set_in_init": "settings of the method are parameters, kept in one"
        },
    )
    assert sum(check["status"] == "passed" for check in found) > 40
