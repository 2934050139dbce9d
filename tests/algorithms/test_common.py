"""What every method of the registry must do, whatever it computes."""

import collections
import dataclasses
import functools
import json
import os
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfedmvc import engine
from jaxfedmvc.algorithm import with_phases
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation, single_client
from tests.helpers import programs

K = 2
ROUNDS = 2
STAGES = ("setup", "round", "finish")

# Compiled code runs for milliseconds here and takes seconds to optimise.
jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)

# Settings of a small instance, where the defaults make a large one; a method may do without. Not
# too narrow: with a single living unit in a layer some gradients are zero but for rounding, which
# Adam blows up to full steps. Eight rows a batch: one batch for every client, and a second, empty
# one where rows are padded to 11.
SMALL = {
    "cpspan": {
        "hidden": (8,),
        "latent_dim": 3,
        "pretrain_epochs": 2,
        "align_epochs": 2,
        "batch_size": 8,
        "n_init": 2,
        "learning_rate": 0.01,
    },
    "dsimvc": {
        "hidden": (8,),
        "latent_dim": 4,
        "feature_dim": 4,
        "pretrain_epochs": 2,
        "neighbour_pretrain_epochs": 2,
        "neighbour_epochs": 2,
        "steps": 2,
        "batch_size": 8,
        "learning_rate": 0.01,
    },
    "e_fkmvc": {"n_restarts": 2, "personal": "proximal", "personal_steps": 2},
    "fcuif": {
        "hidden": (16,),
        "latent_dim": 4,
        "pretrain_epochs": 2,
        "local_epochs": 2,
        "imputer_epochs": 2,
        "batch_size": 8,
        "n_init": 2,
        "learning_rate": 0.01,
    },
    "fedhk_parafac2": {"n_restarts": 1},
    "fedhk_tucker": {"ranks": (2, 2, 1), "n_restarts": 1},
    "fmcsc": {
        "hidden": (),
        "latent_dim": 4,
        "head_hidden": 16,
        "pretrain_epochs": 2,
        "local_epochs": 2,
        "distill_epochs": 2,
        "batch_size": 8,
        "n_init": 2,
        "learning_rate": 0.01,
    },
    "gcfagg": {
        "hidden": (8,),
        "latent_dim": 4,
        "feature_dim": 4,
        "attention_hidden": 4,
        "pretrain_epochs": 2,
        "contrast_epochs": 2,
        "batch_size": 8,
        "n_init": 2,
        "learning_rate": 0.01,
    },
    # With the default, the low-rank part of so few rows is of rank 1: there is no second vector.
    "jpltd": {"lam": 0.5},
    "local_kmeans": {"n_init": 2},
    "mflvc": {
        "hidden": (8,),
        "latent_dim": 4,
        "feature_dim": 4,
        "pretrain_epochs": 2,
        "contrast_epochs": 2,
        "tune_epochs": 2,
        "batch_size": 8,
        "n_init": 2,
        "learning_rate": 0.01,
    },
    "mgcd": {
        "server": "trained",
        "latent_dim": 3,
        "server_hidden": 4,
        "server_epochs": 1,
        "batch_size": 8,
        "affinity": "each",
        "n_neighbours": 3,
        "n_init": 2,
    },
    "label_consensus": {"local_clusters": (2,), "n_init": 2},
    "proimp": {
        "hidden": (16, 16),
        "latent_dim": 8,
        "epochs": 3,
        "pretrain_epochs": 1,
        "batch_size": 8,
        "n_init": 2,
    },
    "private_e_fkmvc": {"noise_multiplier": 0.0},
    "simvc": {
        "hidden": (16,),
        "latent_dim": 8,
        "head_hidden": 8,
        "epochs": 4,
        "check_every": 2,
        "batch_size": 8,
        "n_runs": 2,
    },
    "vertcohirf": {"feature_share": 0.7},
}
SMALL["comvc"] = SMALL["simvc"]
SMALL["feddmvc"] = SMALL["fcuif"]
SMALL["local_fmcsc"] = SMALL["fmcsc"]


def fields_of(settings):
    return [field.name for field in dataclasses.fields(settings)]


def small_settings(name):
    """Config and hyper-parameters of a method of the registry with K clusters, small."""
    method, settings = METHODS[name], SMALL.get(name, {})

    def read(kind, **run):
        names = {field.name for field in dataclasses.fields(kind)}
        return kind(**{n: v for n, v in (settings | run).items() if n in names})

    config = read(method.config, n_clusters=K, n_clients=1, rounds=ROUNDS)
    return config, read(method.hyperparams)


def small(name):
    return METHODS[name].make(*small_settings(name))


# Views, and for each client its id and number of samples. Client 0 does not come first.
CLIENTS = {
    "horizontal": (((0, 1), {3: 8, 0: 5, 5: 6}), ((1,), {1: 7, 4: 6}), ((0,), {2: 8})),
    "full": (((0, 1), {3: 8, 0: 5, 5: 6, 1: 7, 4: 6, 2: 8}),),
    "vertical": (((1,), {1: 13}), ((0,), {0: 13}), ((2,), {2: 13})),
}
WIDTH = {"horizontal": 8, "full": 8, "vertical": 14}
DIMS = {"horizontal": (4, 3), "full": (4, 3), "vertical": (4, 3, 2)}
# Methods whose clients must hold all views.
FULL = tuple(name for name, method in METHODS.items() if method.complete)


def parts(kind, clients=None, extra=0):
    """A partition; samples are dealt out by client id, so that the order does not matter."""
    counts = {i: n for _, members in CLIENTS[kind] for i, n in members.items()}
    first = {
        i: 0 if kind == "vertical" else sum(n for j, n in counts.items() if j < i) for i in counts
    }
    result = []
    for view_ids, members in clients or CLIENTS[kind]:
        ids = np.full((len(members), WIDTH[kind] + extra), -1, np.int32)
        for row, (client, n) in zip(ids, members.items(), strict=True):
            row[:n] = first[client] + np.arange(n)
        result.append(Part(view_ids, ids, np.array(list(members), np.int32)))
    return result


def federation(kind, partition):
    rng = np.random.default_rng(0)
    truth = np.arange(40) % K
    centers = [2 * rng.normal(size=(K, d)) for d in DIMS[kind]]
    views = [c[truth] + rng.normal(size=(40, c.shape[1])) for c in centers]
    return Federation.from_arrays(views, truth, partition=partition)


# Methods whose model clusters clients that come later. Local k-means has no model.
JOINED = tuple(
    name
    for name, method in METHODS.items()
    if method.topology == "horizontal" and name != "local_kmeans"
)


class Lab:
    """One algorithm, with each of its programs compiled once for all tests."""

    def __init__(self, name):
        self.name = name
        self.topology = METHODS[name].topology
        self.vertical = self.topology == "vertical"
        self.kind = "full" if name in FULL else "vertical" if self.vertical else "horizontal"
        self.algorithm = small(name)
        self.federation = self.divided()
        self.key = jax.random.key(7)
        self.traces = collections.Counter()

    def divided(self, clients=None, extra=0):
        return federation(self.kind, parts(self.kind, clients, extra))

    @functools.cached_property
    def result(self):
        return self.run(self.federation, self.key)

    def run(self, federation, key, chunk=None):
        return self._program(chunk)(federation, key)

    @functools.cache  # noqa: B019, a lab lives as long as the module
    def _program(self, chunk):
        def program(federation, key):
            self.traces[chunk] += 1
            return engine.run(self.algorithm, federation, key, ROUNDS, client_chunk=chunk)

        return jit(program)

    @functools.cached_property
    def start_program(self):
        return jit(functools.partial(engine.start, self.algorithm))

    @functools.cached_property
    def start(self):
        return self.start_program(self.federation, self.key)

    def phases(self):
        for stage in STAGES:
            for place, phase in enumerate(getattr(self.algorithm, stage)):
                yield stage, place, phase

    @functools.cached_property
    def traffic(self):
        """Bytes as counted, and what clients and servers were given and returned meanwhile.

        `{phase: [(view ids, sent, message, state before, after), ...]}` and `{phase: (before,
        after)}`, traced arrays; one trace for all that is read off shapes.
        """
        clients, servers = collections.defaultdict(list), {}

        def recorded(name, phase):
            def client(key, sent, state, client):
                after, message, info = phase.client(key, sent, state, client)
                clients[name].append((client.view_ids, sent, message, state, after))
                return after, message, info

            def server(key, state, messages, weights):
                after, info = phase.server(key, state, messages, weights)
                servers[name] = state, after
                return after, info

            return phase._replace(client=client, server=server)

        counted = engine.traffic(with_phases(self.algorithm, recorded), self.federation)
        return counted, clients, servers

    def cohorts(self, phase):
        """Places of the cohorts that take part in a phase."""
        views = [cohort.view_ids for cohort in self.federation.cohorts]
        if phase.who == "leader":
            return (min(range(len(views)), key=lambda c: (-len(views[c]), views[c])),)
        return range(len(views))


# Variants of others, or long to compile: `make test` leaves them to `make test-all`. Of centralised
# methods, which share an adapter and have tests of their own, one stays.
SLOW = (
    "comvc",
    "coreset_kmeans",
    "cpspan",
    "distr_kmeans",
    "dpfmps",
    "dpfmps_p2est",
    "dsimvc",
    "fcuif",
    "feddmvc",
    "fedhk_parafac2",
    "fedhk_tucker",
    "fedmvl",
    "gcfagg",
    "hcp_imsc",
    "imvc_cbg",
    "jpltd",
    "label_consensus",
    "lmvsc",
    "local_fmcsc",
    "local_kmeans",
    "mflvc",
    "private_e_fkmvc",
    "proimp",
    "simvc",
)
# Of those that are left the ones that compile longest; they have many tests of their own.
CI = ("fmcsc", "mgcd", "vertcohirf")


def _marks(name):
    return [pytest.mark.slow] * (name in SLOW) + [pytest.mark.ci] * (name in CI)


NAMES = [pytest.param(name, marks=_marks(name)) for name in sorted(METHODS)]


@pytest.fixture(scope="module", params=NAMES)
def lab(request):
    yield Lab(request.param)
    programs.make_room()


def plain(tree):
    """The arrays of a tree in NumPy, keys too."""

    def array(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(array, tree)


def assert_close(actual, expected):
    chex.assert_trees_all_close(plain(actual), plain(expected), rtol=1e-3, atol=1e-4)


def by_client(federation, stacks):
    """`{client id: leaves}` of stacks [clients, ...]."""
    result = {}
    for cohort, stack in zip(federation.cohorts, stacks, strict=True):
        for place, client in enumerate(np.asarray(cohort.client_ids)):
            result[int(client)] = jax.tree.map(lambda x, p=place: x[p], plain(stack))
    return result


def test_init_reads_no_feature(lab):
    """So that the server of a deployment can make the initial states of clients."""
    zeroed = lab.federation.replace(
        cohorts=tuple(
            c.replace(views=tuple(np.zeros_like(x) for x in c.views))
            for c in lab.federation.cohorts
        )
    )
    found = lab.start_program(zeroed, lab.key)
    chex.assert_trees_all_equal(plain(found), plain(lab.start))


def test_labels_are_clusters_on_samples_and_minus_one_on_padding(lab):
    for cohort, labels in zip(lab.federation.cohorts, lab.result.labels, strict=True):
        labels, mask = np.asarray(labels), np.asarray(cohort.mask)
        assert labels.shape == mask.shape and labels.dtype == np.int32
        # VertCoHiRF finds the number of clusters itself.
        assert set(labels[mask]) <= set(range(mask.sum() if lab.name == "vertcohirf" else K))
        assert (labels[~mask] == -1).all()
    assert not all(cohort.mask.all() for cohort in lab.federation.cohorts)  # there is padding


def test_labels_and_bytes_are_as_they_were(lab):
    """`JAXFEDMVC_RECORD=1` writes them anew, where a change is meant."""
    path = Path(__file__).parents[1] / "golden" / "labels" / f"{lab.name}.json"
    found = {
        "labels": [np.asarray(x).tolist() for x in lab.result.labels],
        "bytes": {s: list(t) for s, t in lab.traffic[0].items()},
    }
    if "JAXFEDMVC_RECORD" in os.environ:
        path.write_text(json.dumps(found) + "\n")
    if not path.exists():
        pytest.skip("a method that is being added: nothing is recorded of it")
    assert json.loads(path.read_text()) == found


def test_everything_is_finite(lab):
    chex.assert_tree_all_finite((plain(lab.result.state), plain(lab.result.info)))


def test_padding_chunks_and_order_of_cohorts_change_only_rounding(lab):
    """Three rows more on every client, a loop over clients instead of vmap, and the cohorts and
    their clients the other way round."""
    turned = [(ids, dict(reversed(c.items()))) for ids, c in CLIENTS[lab.kind][::-1]]
    wide, width = lab.divided(turned, extra=3), WIDTH[lab.kind]
    result = lab.run(wide, lab.key, chunk=1)
    assert by_client(wide, result.labels).keys() == set(range(wide.n_clients))
    chex.assert_trees_all_equal(
        {client: labels[:width] for client, labels in by_client(wide, result.labels).items()},
        by_client(lab.federation, lab.result.labels),
    )
    assert all((np.asarray(labels)[:, width:] == -1).all() for labels in result.labels)
    if lab.topology != "horizontal":
        return  # states have a place for every row, and may keep the order of the cohorts
    assert_close(result.state.server, lab.result.state.server)
    assert_close(
        by_client(wide, result.state.clients),
        by_client(lab.federation, lab.result.state.clients),
    )


def test_permuting_clients_permutes_labels(lab):
    if lab.vertical:
        pytest.skip("every cohort is a single agent")
    turned = lab.divided([(ids, dict(reversed(c.items()))) for ids, c in CLIENTS[lab.kind]])
    assert not np.array_equal(turned.cohorts[0].mask, lab.federation.cohorts[0].mask)
    result = lab.run(turned, lab.key)
    for labels, expected in zip(result.labels, lab.result.labels, strict=True):
        np.testing.assert_array_equal(np.asarray(labels)[::-1], expected)
    assert_close(result.state.server, lab.result.state.server)


def test_values_in_padding_are_never_used(lab):
    dirty = lab.federation.replace(
        cohorts=tuple(
            c.replace(views=tuple(np.where(c.mask[..., None], x, np.float32(50)) for x in c.views))
            for c in lab.federation.cohorts
        )
    )
    result = lab.run(dirty, lab.key)
    chex.assert_trees_all_equal(result.labels, lab.result.labels)
    assert_close(result.state, lab.result.state)


def test_same_key_same_bits_and_one_compilation(lab):
    again = lab.run(lab.federation, jax.random.key(7))
    chex.assert_trees_all_equal(plain(again), plain(lab.result))
    lab.run(lab.federation, jax.random.key(8))
    assert lab.traces[None] == 1


def test_labels_of_the_truth_reach_nothing(lab):
    hidden = lab.federation.without_labels()
    seen = jax.eval_shape(functools.partial(engine.start, lab.algorithm), hidden, lab.key)
    chex.assert_trees_all_equal_shapes_and_dtypes(seen, lab.start)
    for cohort in hidden.cohorts:
        assert set(cohort.__dataclass_fields__) == {
            "views",
            "mask",
            "sample_ids",
            "client_ids",
            "view_ids",
        }
    flipped = lab.federation.replace(labels=tuple(1 - x for x in lab.federation.labels))
    chex.assert_trees_all_equal(plain(lab.run(flipped, lab.key)), plain(lab.result))


def _bytes(tree):
    leaves = jax.tree.leaves(tree)
    # Numbers only: an object or a Python scalar is nothing that can be put on a wire.
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert all(leaf.dtype.kind in "biuf" for leaf in leaves)  # nor is a key
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def test_traffic_is_the_bytes_of_what_travels(lab):
    counted, clients, _ = lab.traffic
    up, down = collections.Counter(), collections.Counter()
    for stage, place, phase in lab.phases():
        asked = [lab.federation.cohorts[c] for c in lab.cohorts(phase)]
        found = clients[f"{stage}[{place}]"]
        for cohort, (view_ids, sent, message, *_) in zip(asked, found, strict=True):
            assert view_ids == cohort.view_ids
            n = 1 if phase.who == "leader" else cohort.n_clients
            peers = lab.federation.n_clients - 1 if lab.algorithm.peers else 1
            up[stage] += n * peers * _bytes(message)
            down[stage] += n * (peers * _bytes(message) if lab.algorithm.peers else _bytes(sent))
    assert set(counted) == set(STAGES)
    for stage in STAGES:
        assert counted[stage] == (up[stage], down[stage]), stage


def test_states_keep_their_form_in_every_phase(lab):
    """Of the server, and of each client that is asked."""
    _, clients, servers = lab.traffic
    for stage, place, phase in lab.phases():
        name = f"{stage}[{place}]"
        for found in servers[name]:
            chex.assert_trees_all_equal_shapes_and_dtypes(found, lab.start.server)
        for c, (*_, before, after) in zip(lab.cohorts(phase), clients[name], strict=True):
            stack = lab.start.clients[c]
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stack)
            for found in (before, after):
                chex.assert_trees_all_equal_shapes_and_dtypes(found, one)


def test_what_labels_are_read_off_has_been_sent(lab):
    """The last exchange leaves it as it is: a later change would reach no client, and be free."""
    every = list(lab.phases())
    if lab.algorithm.peers or not every:
        return  # among peers everybody computes it
    stage, _, last = every[-1]
    only = lab.algorithm._replace(**{name: () for name in STAGES} | {stage: (last,)})

    def exchanged(server):
        state, args = lab.start._replace(server=server), (only, lab.federation, lab.key)
        if stage == "setup":
            return engine.setup(*args, state)[0].server
        exchange = engine.one_round if stage == "round" else engine.finish
        return exchange(*args, state, 0)[0].server

    def assigned(server):
        return engine.assign(lab.algorithm, lab.federation, lab.start._replace(server=server))

    before = jax.make_jaxpr(assigned)(lab.start.server).jaxpr
    used = [v for eqn in before.eqns for v in eqn.invars] + before.outvars
    read = [any(x is v for v in used) for x in before.invars]
    after = jax.make_jaxpr(exchanged)(lab.start.server).jaxpr
    kept = [x is y for x, y in zip(after.invars, after.outvars, strict=True)]
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(lab.start.server)]
    unsent = [
        jax.tree_util.keystr(path)
        for path, r, k in zip(paths, read, kept, strict=True)
        if r and not k
    ]
    assert not unsent, f"{stage} changes what assign reads, and no exchange sends it: {unsent}"


def _start_shapes(lab, federation):
    """Starts a run of these clients, whose rows are known, and computes nothing."""
    return jax.eval_shape(functools.partial(engine.start, lab.algorithm, federation), lab.key)


def test_a_client_with_fewer_samples_than_clusters_is_named(lab):
    few = parts(lab.kind)
    if lab.vertical:
        for part in few:
            part.sample_ids[:, 1:] = -1
    else:
        few[-1].sample_ids[-1, 1:] = -1
    if lab.name == "vertcohirf":
        assert int(lab.run(federation(lab.kind, few), lab.key).labels[0].max()) == 0
        return
    sums = ("e_fkmvc", "fedhk_parafac2", "fedhk_tucker", "private_e_fkmvc")
    if lab.topology == "pooled" or lab.name in sums:
        # Sums do not mind a client of one sample; of all clients together there must be enough.
        _start_shapes(lab, federation(lab.kind, few))
        lone = [Part((0, 1), np.array([[0]], np.int32), np.array([0], np.int32))]
        with pytest.raises(ValueError, match="n_clusters: got 2 for 1 samples"):
            _start_shapes(lab, federation(lab.kind, lone))
        return
    named = "client 1" if lab.vertical else "client 2"
    least = K + 1 if lab.name == "mgcd" else K  # its criterion asks for one eigenvector more
    with pytest.raises(ValueError, match=rf"{named} .*1 samples; allowed is {least}"):
        _start_shapes(lab, federation(lab.kind, few))


@pytest.mark.parametrize("name", JOINED)
def test_a_client_that_joins_with_other_views_is_refused(name):
    """From shapes alone: other widths would be broadcast, or fail far inside of the method."""
    algorithm = small(name)
    whole = federation("full", parts("full"))
    server, (states,) = jax.eval_shape(lambda: algorithm.init(jax.random.key(0), whole))
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), states)

    def assigned(*views):
        client = single_client({v: np.ones((9, width)) for v, width in views})
        return jax.eval_shape(algorithm.assign, server, state, client)

    assert assigned((0, 4), (1, 3)).shape == (9,)
    for width in (1, 2):
        text = f"view 1 has {width} features; allowed is 3, as when the model was made"
        with pytest.raises(ValueError, match=text):
            assigned((0, 4), (1, width))
    with pytest.raises(ValueError, match=r"^(view 5 is none|client: holds views \(0, 5\))"):
        assigned((0, 4), (5, 3))


def test_a_whole_run_is_as_its_stages_one_by_one(lab):
    """`run` is start, setup, rounds, finish, assign: what a binary compiles apart."""

    def stages(federation, key):
        state = engine.start(lab.algorithm, federation, key)
        state, _ = engine.setup(lab.algorithm, federation, key, state)
        return state

    shapes = jax.eval_shape(stages, lab.federation, lab.key)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, lab.result.state)
    labels = jit(functools.partial(engine.assign, lab.algorithm))(lab.federation, lab.result.state)
    chex.assert_trees_all_equal(labels, lab.result.labels)


def test_embedding_has_a_row_for_each_sample(lab):
    if lab.algorithm.embed is None:
        with pytest.raises(ValueError, match="no representation"):
            engine.embed(lab.algorithm, lab.federation, lab.result.state)
        return
    program = jit(functools.partial(engine.embed, lab.algorithm))
    for cohort, found in zip(
        lab.federation.cohorts, program(lab.federation, lab.result.state), strict=True
    ):
        assert found.shape[:2] == cohort.mask.shape and found.ndim == 3
        assert np.isfinite(np.asarray(found)).all()


@pytest.mark.parametrize("name", sorted(n for n, m in METHODS.items() if fields_of(m.hyperparams)))
def test_an_array_is_no_hyper_parameter(name):
    """Two of them would be taken for a number for each of two clusters, by E-FKMVC for one."""
    config, hyper = small_settings(name)
    for field in fields_of(hyper):
        many = dataclasses.replace(hyper, **{field: np.ones(K, np.float32)})
        with pytest.raises(ValueError, match=f"^{field}: got .*array.*; allowed"):
            METHODS[name].make(config, many)


@pytest.mark.parametrize("name", METHODS)
def test_settings_of_another_method_are_refused(name):
    method = METHODS[name]
    config, hyper = small_settings(name)
    with pytest.raises(
        ValueError, match=rf"^config: got 3; .*instance of {method.config.__name__}"
    ):
        method.make(3, hyper)
    own = rf"^hyperparams: got 0; .*instance of {method.hyperparams.__name__}"
    with pytest.raises(ValueError, match=own):
        method.make(config, 0)
