"""VertCoHiRF: consensus, rankings, medoids and messages against hand-worked and plain ones."""

import functools
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from benchmarks.references.vertcohirf import reference
from jaxfedmvc import engine
from jaxfedmvc.algorithms.vertcohirf import (
    LocalStep,
    VertCoHiRFConfig,
    VertCoHiRFHyperparams,
    vertcohirf,
    vertcohirf_of_steps,
)
from jaxfedmvc.algorithms.vertcohirf.communication import communication
from jaxfedmvc.algorithms.vertcohirf.hierarchy import NEVER, labels_at
from jaxfedmvc.algorithms.vertcohirf.method import merge
from jaxfedmvc.algorithms.vertcohirf.prediction import medoid_rankings, predict
from jaxfedmvc.algorithms.vertcohirf.rankings import (
    centrality,
    least_rank_sum,
    rank_sum,
    ranked_ids,
)
from jaxfedmvc.clustering.local import (
    dbscan_method,
    kernel_kmeans_method,
    kmeans_method,
    sc_srgf_method,
)
from jaxfedmvc.data import synthetic
from jaxfedmvc.federation import Federation
from tests.helpers.vertical import HALVES, N, by_halves, federation, make_views, messages

ROUNDS = 12


KMEANS = vertcohirf_of_steps(LocalStep(kmeans_method(3), 0.6, 3))
FEW = vertcohirf_of_steps(LocalStep(by_halves), n_candidates=4)
DENSE = vertcohirf_of_steps(LocalStep(dbscan_method(2.0, 3)))
GRAPHS = vertcohirf_of_steps(LocalStep(sc_srgf_method(3, 3)))


@functools.cache
def masked(algorithm, rounds=ROUNDS):
    return jax.jit(lambda fed, key: engine.run(algorithm, fed, key, rounds))


@functools.cache
def always(algorithm):
    return lambda _: algorithm


def run(algorithm, views, seed=0):
    return masked(algorithm)(federation(views), jax.random.key(seed))


def labels_of(result):
    return np.asarray(result.labels[0][0])


# --- Against the plain implementation, and by hand ------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_parents_are_those_of_the_plain_implementation(seed):
    views, _ = make_views(seed)
    result = run(HALVES, views)
    state = result.state.server

    def cluster(agent, iteration, rows):
        cells = np.floor(rows[:, 0] / 2).astype(int)
        return cells - cells.min()

    expected = reference(views, cluster)
    np.testing.assert_array_equal(state.parents, expected.parents)
    absorbed = np.asarray(state.absorbed_at)
    moved = np.asarray(state.parents) != np.arange(N)
    np.testing.assert_array_equal(absorbed[moved], np.asarray(expected.absorbed_at)[moved])
    np.testing.assert_array_equal(labels_of(result), expected.labels)
    assert int(state.n_iter) == expected.n_iter == int(result.n_rounds)
    assert 1 < len(set(expected.labels)) < N  # something happened


def test_six_points_by_hand():
    """Agent 0 sees two groups of three, agent 1 splits the second; medoids by rank sum.

    Group {0, 1, 2}: agent 0's directions are 0, 10 and 20 degrees, so its ranking is 1, then 0
    and 2 tied by symmetry; agent 1's are 0, 40 and 50 degrees: 1, 2, 0. Rank sums 3, 0, 2 give 1.
    Group {3, 4} has two members, a tie for both agents: the lower row, 3. Group {5} is 5.
    """
    degrees = np.deg2rad([[0, 10, 20, 80, 85, 88], [0, 40, 50, 60, 70, 80]])
    radius = [[1, 1, 1, 2, 2, 2], [1, 1, 1, 2, 2, 4]]
    views = [
        np.stack([np.array(r), np.cos(d), np.sin(d)], axis=1).astype(np.float32)
        for r, d in zip(radius, degrees, strict=True)
    ]

    def first_column(key, x, where):
        return jnp.where(where, jnp.round(x[:, 0]).astype(jnp.int32), -1)

    # The radius would enter the cosines: it labels the points, and is then zeroed for the ranking.
    one_round = masked(vertcohirf_of_steps(LocalStep(first_column)), 1)
    state = one_round(federation(views), jax.random.key(0)).state.server
    codes, everyone, active = np.array([0, 0, 0, 1, 1, 2]), np.ones(6, bool), np.arange(6)

    @jax.jit
    def ranking(x):
        scores = centrality(x, codes, everyone, "cosine")
        return ranked_ids(scores, jnp.asarray(codes), jnp.asarray(everyone), jnp.asarray(active))

    rankings = np.stack([ranking(np.float32(v[:, 1:])) for v in views])
    assert rankings.tolist() == [[1, 0, 2, 3, 4, 5], [1, 2, 0, 3, 4, 5]]
    total = jax.jit(rank_sum)(rankings, codes, everyone, active)
    assert total.tolist() == [3, 0, 3, 0, 2, 0]
    least = jax.jit(least_rank_sum)(total, codes, everyone, active)
    assert np.asarray(least)[:3].tolist() == [1, 3, 5]
    assert state.n_active == 3 and np.asarray(state.parents)[[3, 4, 5]].tolist() == [3, 3, 5]
    # Whoever is a medoid was not absorbed.
    assert np.asarray(state.absorbed_at)[[3, 4, 5]].tolist() == [NEVER, 0, NEVER]
    # Clusters that were refined before are not those of another round.
    again = jax.jit(merge)(state._replace(refined=np.zeros(6, np.int32)), state.active)
    assert np.all(again.refined == -1)


def test_ends_when_nothing_merges_and_counts_the_idle_round():
    views, _ = make_views(0)
    result = run(HALVES, views)
    n_active = np.asarray(result.info["rounds"][0]["server"]["n_active"])
    clusters = np.asarray(result.info["rounds"][0]["server"]["n_clusters"])
    n = int(result.n_rounds)
    assert n < ROUNDS and clusters[n - 1] == n_active[n - 1]
    assert (clusters[: n - 1] < n_active[: n - 1]).all()
    assert (n_active[n:] == 0).all()  # rounds that were not made


@pytest.mark.slow
def test_max_iter_stops_before_the_end():
    views, _ = make_views(0)
    one = masked(KMEANS, 1)(federation(views), jax.random.key(0))
    full = run(KMEANS, views)
    assert not one.state.server.done and int(one.n_rounds) == 1
    state = full.state.server
    first = np.asarray(labels_at(state.parents, state.absorbed_at, None, 0))
    assert len({*zip(labels_of(one), first, strict=True)}) == first.max() + 1
    assert labels_of(one).max() > labels_of(full).max()


@pytest.mark.slow
def test_two_modalities_are_recovered_exactly():
    dataset = synthetic.multimodal(0, "text")
    steps = [LocalStep(dbscan_method(2.25, 5)), LocalStep(kmeans_method(3), 1.0, 2)]
    fed = federation(dataset.views, dataset.labels)
    result = engine.run_compacting(always(vertcohirf_of_steps(steps)), fed, jax.random.key(0), 100)
    assert adjusted_rand_score(dataset.labels, labels_of(result)) == 1.0


# --- Two ways of running --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "seed"),
    [
        pytest.param(HALVES, 0, id="halves0"),
        pytest.param(HALVES, 1, id="halves1"),
        *(pytest.param(KMEANS, i, id=f"kmeans{i}", marks=pytest.mark.slow) for i in range(3)),
        pytest.param(DENSE, 0, id="dbscan0", marks=pytest.mark.slow),
        pytest.param(GRAPHS, 0, id="sc_srgf0", marks=pytest.mark.slow),
    ],
)
def test_masked_and_compacting_give_the_same_labels(algorithm, seed):
    views, _ = make_views(seed, n=80, spread=1.5)
    fed, key = federation(views), jax.random.key(seed)
    one = masked(algorithm)(fed, key)
    made = []
    other = engine.run_compacting(
        always(algorithm),
        fed,
        key,
        ROUNDS,
        on_round=lambda r, state, info: made.append(len(state.server.active)),
    )
    np.testing.assert_array_equal(labels_of(one), labels_of(other))
    np.testing.assert_array_equal(one.state.server.parents, other.state.server.parents)
    assert made[0] == 80 and made[-1] < 80  # the arrays did shrink
    assert int(one.n_rounds) == int(other.n_rounds) == len(made)


def test_compacting_needs_a_method_that_can():
    views, _ = make_views(0)
    with pytest.raises(ValueError, match="use run"):
        engine.run_compacting(
            always(KMEANS._replace(compact=None)), federation(views), jax.random.key(0), 1
        )
    for rounds in (-1, 1.5):
        with pytest.raises(ValueError, match=f"rounds: got {rounds}"):
            engine.run_compacting(always(KMEANS), federation(views), jax.random.key(0), rounds)


@pytest.mark.slow
def test_numbers_are_swept_in_one_program():
    views, _ = make_views(0)
    fed = federation(views)
    traces = []

    def clusters(key, share, limit, threshold, k, n_candidates):
        traces.append(1)
        step = LocalStep(kmeans_method(k, 4), share, 3, limit, threshold)
        algorithm = vertcohirf_of_steps(step, n_candidates=n_candidates)
        return engine.run(algorithm, fed, key, 6).labels[0][0]

    program = jax.jit(jax.vmap(clusters))
    keys = jax.random.split(jax.random.key(0), 2)
    arguments = (
        keys,
        jnp.array([0.5, 1.0]),
        jnp.array([1, 3]),
        jnp.array([0.5, 0.8]),
        jnp.array([2, 4]),
        jnp.array([2, N]),
    )
    found = program(*arguments)
    program(*arguments)
    assert len(traces) == 1
    fixed = vertcohirf_of_steps(LocalStep(kmeans_method(4), 1.0, 3, None, 0.8), n_candidates=N)
    alone = masked(fixed, 6)(fed, keys[1])
    np.testing.assert_array_equal(found[1], labels_of(alone))


def test_all_noise_ends_after_one_round_with_every_point_alone():
    views, _ = make_views(0)
    algorithm = vertcohirf_of_steps(LocalStep(lambda key, x, where: jnp.full(len(x), -1)))
    result = run(algorithm, views)
    assert int(result.n_rounds) == 1
    np.testing.assert_array_equal(labels_of(result), np.arange(N))


@pytest.mark.slow
def test_one_sample():
    result = engine.run(
        KMEANS, federation([np.ones((1, 2)), np.ones((1, 3))]), jax.random.key(0), 5
    )
    assert labels_of(result).tolist() == [0] and int(result.n_rounds) == 1


@pytest.mark.slow
def test_with_few_candidates_medoids_are_among_them_and_the_labels_stay_nested():
    views, _ = make_views(2)
    algorithm = vertcohirf_of_steps(LocalStep(by_halves), n_candidates=2)
    state = run(algorithm, views).state.server
    levels = [
        np.asarray(labels_at(state.parents, state.absorbed_at, state.active, e)) for e in (-1, 0, 9)
    ]
    for fine, coarse in itertools.pairwise(levels):
        assert len({*zip(fine, coarse, strict=True)}) == fine.max() + 1
    (first, *_), _ = messages(algorithm, federation(views), jax.random.key(0), 1)
    listed = {int(i) for i in np.asarray(first[1][0]["ranking"]).ravel() if i >= 0}
    absorbed = np.asarray(state.absorbed_at) == 0
    medoids = set(np.asarray(state.parents)[absorbed].tolist())
    assert medoids <= listed
    assert max(np.bincount(levels[1][sorted(listed)])) == 2


# --- Messages -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_only_integers_travel():
    views, _ = make_views(0)
    sent, _ = messages(KMEANS, federation(views), jax.random.key(0), 1)
    for message in jax.tree.leaves(sent):
        assert message.dtype == jnp.int32
        assert message.shape == (1, N)


@pytest.mark.slow
def test_equal_labels_and_rankings_give_equal_messages():
    """Definition 3.2: other features with the same partition and the same order are not told apart.

    Agent 1's features are negated and four times as large: distances scale, cosines stay.
    """
    views, _ = make_views(1)
    other = [views[0], -4 * views[1], views[2]]
    key = jax.random.key(0)
    one, _ = messages(KMEANS, federation(views), key)
    two, _ = messages(KMEANS, federation(other), key)
    chex.assert_trees_all_equal(one, two)
    third, _ = messages(KMEANS, federation([views[0], views[1] ** 2, views[2]]), key)
    assert not all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(third), strict=True)
    )


def test_other_features_with_the_same_structure_send_the_same():
    """Agent 0 holds other numbers in other units, made so that groups and orders are the same."""
    degrees = np.deg2rad(np.array([0, 10, 25, 60, 62, 61, 150, 151]))
    groups = np.array([0, 0, 0, 1, 1, 1, 2, 2])

    def agent(angles, sizes):
        direction = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        return (sizes[groups][:, None] * direction).astype(np.float32)

    def by_size(key, x, where):
        size = jnp.round(jnp.linalg.norm(x, axis=1)).astype(jnp.int32)
        return jnp.where(where, size, -1)

    algorithm = vertcohirf_of_steps(LocalStep(by_size))
    second = agent(degrees[::-1] / 2, np.array([2, 3, 4]))
    # The angles within a group keep their order of centrality, the sizes theirs.
    views = [agent(degrees, np.array([1, 2, 3])), second]
    other = [agent(1.2 * degrees + 0.3, np.array([10, 20, 300])), second]
    key = jax.random.key(0)
    one, _ = messages(algorithm, federation(views), key, 2)
    two, _ = messages(algorithm, federation(other), key, 2)
    chex.assert_trees_all_equal(one, two)


def test_bytes_of_peers():
    views, _ = make_views(0)
    counted = engine.traffic(KMEANS, federation(views))
    # Two messages of N int32 from each of three agents to two others.
    assert counted["round"] == (3 * 2 * 2 * N * 4, 3 * 2 * 2 * N * 4)
    assert counted["setup"] == counted["finish"] == (0, 0)


def test_bits_by_hand():
    bits = communication(1000, [4, 5, 2], n_active=100, n_clusters=7, n_listed=60, n_longest=20)
    assert bits.labels == 2 * 100 * (2 + 3 + 1)
    assert bits.rankings == 3 * 2 * 60 * 10
    assert bits.bound == 3 * 2 * (100 * 3 + 7 * 20 * 10)
    assert bits.int32_bytes == 3 * 2 * (100 + 60) * 4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_bits_are_those_of_the_messages_and_keep_to_proposition_3_1(seed):
    """Counted from what was sent, with N_s = 4, against what the run says of itself."""
    views, _ = make_views(seed)
    sent, _ = messages(FEW, federation(views), jax.random.key(seed), 2)
    info = run(FEW, views, seed).info["rounds"][0]["server"]
    for r, (labels, rankings) in enumerate(sent):
        labels = np.stack([np.asarray(m["labels"])[0] for m in labels])
        lists = [np.asarray(m["ranking"])[0] for m in rankings]
        active = labels[0] >= 0
        bits = 0
        for own, listed in zip(labels, lists, strict=True):
            bits += 2 * active.sum() * math.ceil(math.log2(len(set(own[active]))))
            bits += 2 * (listed >= 0).sum() * math.ceil(math.log2(N))
        row = {name: np.asarray(value)[r] for name, value in info.items()}
        counted = communication(
            N,
            row["n_labels"].tolist(),
            *(int(row[x]) for x in ("n_active", "n_clusters", "n_listed", "n_longest")),
        )
        assert counted.labels + counted.rankings == bits
        most = math.ceil(math.log2(max(len(set(own[active])) for own in labels)))
        clusters = len({*map(tuple, labels.T[active])})
        bound = 6 * (active.sum() * most + clusters * 4 * math.ceil(math.log2(N)))
        assert bits <= counted.bound <= bound


# --- New samples ----------------------------------------------------------------------------------


rankings_of, predicted = jax.jit(medoid_rankings), jax.jit(predict, static_argnums=1)


def test_new_samples_join_where_all_agents_agree():
    medoids = [np.array([[0.0], [10.0], [20.0]]), np.array([[0.0], [5.0], [6.0]])]
    new = [np.array([[1.0], [11.0], [14.0]]), np.array([[0.5], [5.1], [0.1]])]
    rankings = np.stack([rankings_of(x, m) for x, m in zip(new, medoids, strict=True)])
    assert rankings.tolist() == [
        [[0, 1, 2], [1, 2, 0], [1, 2, 0]],
        [[0, 1, 2], [1, 2, 0], [0, 1, 2]],
    ]
    assert predicted(rankings).tolist() == [0, 1, -1]
    # Third sample: ranks (2, 0, 1) and (0, 1, 2), sums (2, 1, 3).
    assert predicted(rankings, "ranked").tolist() == [0, 1, 1]


def test_training_medoids_join_their_own_clusters():
    views, _ = make_views(0)
    state = run(HALVES, views).state.server
    roots = np.asarray(state.active)[: int(state.n_active)]
    rankings = np.stack([rankings_of(x[roots], x[roots]) for x in views])
    np.testing.assert_array_equal(predicted(rankings), np.arange(len(roots)))


# --- Settings -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_settings_make_the_same_steps_as_by_hand():
    config = VertCoHiRFConfig(
        3, ("2:sc_srgf", "0:kernel_kmeans", "dbscan"), repetitions=2, n_graphs=3, similarity="rbf"
    )
    hyper = VertCoHiRFHyperparams(0.6, 0.8, n_candidates=4, eps=2.0, min_samples=3, gamma=0.1)
    steps = [
        LocalStep(kernel_kmeans_method(3, 0.1), 0.6, 2, threshold=0.8),
        LocalStep(dbscan_method(2.0, 3), 0.6, 2, threshold=0.8),
        LocalStep(sc_srgf_method(3, 3, 0.5)),
    ]
    views, _ = make_views(3)
    found = run(vertcohirf(config, hyper), views)
    expected = run(vertcohirf_of_steps(steps, n_candidates=4, similarity="rbf"), views)
    np.testing.assert_array_equal(labels_of(found), labels_of(expected))
    assert 1 < labels_of(found).max() < N - 1


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (("kmeans",), ["kmeans"] * 3),
        (("kmeans", "dbscan", "sc_srgf"), ["kmeans", "dbscan", "sc_srgf"]),
        (("0:sc_srgf", "2:kmeans", "1:dbscan"), ["sc_srgf", "dbscan", "kmeans"]),
        (("1:dbscan", "kmeans"), ["kmeans", "dbscan", "kmeans"]),
    ],
)
def test_one_base_clusterer_for_all_or_one_for_each(base, expected):
    config = VertCoHiRFConfig(3, base)
    config.check_agents(3)
    assert [config.bases().of(agent) for agent in range(3)] == expected


@pytest.mark.slow
def test_hyperparameters_are_traced():
    views, _ = make_views(0)
    traces = []

    @jax.jit
    def clusters(hyper):
        traces.append(1)
        algorithm = vertcohirf(VertCoHiRFConfig(3), hyper)
        return engine.run(algorithm, federation(views), jax.random.key(0), 4).labels[0][0]

    for share in (0.4, 1.0):
        assert clusters(VertCoHiRFHyperparams(share, relaxed=0.5, n_candidates=3)).min() == 0
    assert len(traces) == 1


# --- Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VertCoHiRFConfig(3, ("ward",)), "base: got 'ward'; allowed is one of kmeans, "),
        (lambda: VertCoHiRFConfig(3, ("0:ward",)), "base: got '0:ward'"),
        (lambda: VertCoHiRFConfig(3, ("a:kmeans",)), "base: got 'a:kmeans'"),
        (lambda: VertCoHiRFConfig(3, ("0:kmeans", "0:dbscan")), "with each agent once"),
        (lambda: VertCoHiRFConfig(3, ("0:kmeans", "dbscan", "kmeans")), "base: got '0:kmeans,"),
        (lambda: VertCoHiRFConfig(3, ()), "base: got ''"),
        (lambda: VertCoHiRFConfig(0), "n_clusters: got 0; allowed is 1 or more"),
        (lambda: VertCoHiRFConfig(3, repetitions=0), "repetitions: got 0; allowed is 1 or more"),
        (lambda: VertCoHiRFConfig(3, similarity="dot"), "similarity: got 'dot'"),
        (lambda: vertcohirf(VertCoHiRFConfig()), "local_clusters: got None; allowed is 1 or more"),
        (lambda: settled(feature_share=0.0), "feature_share: got 0.0"),
        (lambda: settled(feature_share=0), "feature_share: got 0;"),
        (lambda: settled(relaxed=3.0), "relaxed: got 3.0; allowed is a Rand index"),
        (lambda: settled(n_candidates=0), "n_candidates: got 0"),
        (lambda: settled(eps=-1.0), "eps: got -1.0; allowed is a finite number above 0"),
        (lambda: settled(min_samples=0), "min_samples: got 0"),
        (lambda: settled(gamma=np.inf), "gamma: got inf"),
        (lambda: settled(sampling_ratio=1.5), "sampling_ratio: got 1.5"),
        (lambda: vertcohirf_of_steps(LocalStep(by_halves, 0.0)), "feature_share: got 0.0"),
        (lambda: vertcohirf_of_steps(LocalStep(by_halves, 1.5)), "feature_share: got 1.5"),
        (lambda: vertcohirf_of_steps(LocalStep(by_halves, 1.0, 0)), "repetitions: got 0"),
        (lambda: vertcohirf_of_steps(LocalStep(by_halves, 1.0, 2, 0)), "limit: got 0"),
        (lambda: vertcohirf_of_steps(LocalStep(by_halves, threshold=2.0)), "threshold: got 2.0"),
        (lambda: vertcohirf_of_steps(LocalStep(by_halves), n_candidates=0), "n_candidates: got 0"),
        (
            lambda: vertcohirf_of_steps(LocalStep(by_halves), similarity="dot"),
            "similarity: got 'dot'",
        ),
        (lambda: predict(np.zeros((2, 3)), "strict"), "rankings: got shape"),
        (lambda: predict(np.zeros((2, 3, 0)), "strict"), "rankings: got shape"),
        (lambda: predict(np.zeros((2, 3, 2)), "vote"), "rule: got 'vote'"),
        (lambda: medoid_rankings(np.zeros((2, 3)), np.zeros((2, 2))), "x: got"),
    ],
)
def test_settings_out_of_range_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def settled(**hyper):
    return vertcohirf(VertCoHiRFConfig(3), VertCoHiRFHyperparams(**hyper))


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (("0:dbscan",), "base: got '0:dbscan', which gives agent 1 None"),
        (("7:dbscan", "kmeans"), "base: got '7:dbscan,kmeans'; allowed are the agents 0 to 2"),
        (("kmeans", "dbscan"), "base: got 'kmeans,dbscan', which gives agent 2 None"),
    ],
)
def test_base_clusterers_must_match_the_agents(base, message):
    algorithm = vertcohirf(VertCoHiRFConfig(3, base))
    with pytest.raises(ValueError, match=message):
        engine.start(algorithm, federation(make_views(0)[0]), jax.random.key(0))


def test_steps_must_match_the_agents():
    views, _ = make_views(0)
    with pytest.raises(ValueError, match="steps: got 2; allowed is one, or one for each agent, 3"):
        engine.start(
            vertcohirf_of_steps([LocalStep(by_halves)] * 2), federation(views), jax.random.key(0)
        )


def test_agents_bring_their_own_ids_in_their_own_order():
    views, _ = make_views(0)
    rng = np.random.default_rng(0)
    ids = np.array([f"patient {i}" for i in range(N)])
    turned = [rng.permutation(N) for _ in views]
    turned[0] = np.arange(N)
    fed = Federation.from_agents(
        [(ids[order], view[order]) for order, view in zip(turned, views, strict=True)]
    )
    for cohort, view in zip(fed.cohorts, views, strict=True):
        np.testing.assert_array_equal(cohort.views[0][0], view)


def test_agents_that_do_not_fit_are_named():
    views, _ = make_views(0)
    ids = np.arange(N)
    with pytest.raises(ValueError, match="agent 1"):
        Federation.from_agents([(ids, views[0]), (ids + 1, views[1])])
    with pytest.raises(ValueError, match="agent 2"):
        twice = np.where(ids == 5, 4, ids)
        Federation.from_agents([(ids, views[0]), (ids, views[1]), (twice, views[2])])
    with pytest.raises(ValueError, match="agent 1: all of its 2 features are constant"):
        Federation.from_agents([(ids, views[0]), (ids, np.ones((N, 2)))])
    with pytest.raises(ValueError, match=r"view of agent 1 must be a non-empty array"):
        Federation.from_agents([(ids, views[0]), (ids, np.ones((N, 0)))])
    with pytest.raises(ValueError, match="held by several clients"):
        two = Federation.from_clients([{0: views[0]}, {0: views[0]}])
        engine.start(HALVES, two, jax.random.key(0))
