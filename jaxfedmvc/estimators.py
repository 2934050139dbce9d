"""Every method as a scikit-learn estimator, generated from the table of methods.

    found = FederatedClusterer("fmcsc", n_clusters=10, rounds=5, random_state=0).fit(clients)
    found.labels_                  # one array a client
    found.predict({0: new_rows})   # of horizontal methods

`clients` is a list of dictionaries, `{view id: array [rows, D_v]}`, one for each client, which may
lack views; or, centralised, a list of views of the same rows, or one array. Arrays may be pandas
tables. Features are taken as they are: bring them to comparable ranges first, most methods expect
[0, 1]. Whatever a method's dataclasses of settings name is a parameter, and may be searched.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClusterMixin
from sklearn.metrics import adjusted_rand_score
from sklearn.utils import check_random_state
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_array, check_is_fitted

from jaxfedmvc import checks
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.algorithms.registry import OF_THE_RUN, configured
from jaxfedmvc.data.dataset import (
    check_arrays,
    check_columns,
    check_order,
    check_unmasked,
    kind_of_labels,
    some,
)
from jaxfedmvc.data.vertical import vertical_partition
from jaxfedmvc.engine.steps import Steps
from jaxfedmvc.engine.streaming import assign_program
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.precision import in_32_bits

_OWN = ("method", "n_clusters", "rounds", "random_state")


# What `fit` understands; the error for anything else.
_ALLOWED = (
    "a list with a dictionary {view: array} for each client, a list of views of the same rows, or"
    " one array"
)


_LACKING = "rows that lack a view are a client whose dictionary leaves it out"


def _can_predict(estimator: FederatedClusterer) -> bool:
    """Tells whether rows that a method was not fitted on have clusters.

    Raises:
      AttributeError: They have none; scikit-learn shows it as the cause of its own.
    """
    method = METHODS.get(estimator.method) if isinstance(estimator.method, str) else None
    if method is not None and (method.topology != "horizontal" or method.alone):
        raise AttributeError(
            f"method: {estimator.method} clusters the rows that it is fitted on and no others;"
            " their clusters are labels_, which adjusted_rand_score compares with classes"
        )
    return True


class FederatedClusterer(ClusterMixin, BaseEstimator):
    """Clusters the rows of clients, or of one place, by any method of `METHODS`.

    Attributes:
      labels_: Of clients: a list of one int32 array for each. Of views of one place: one array
        [rows]; of `coreset_kmeans`, `dpfmps` and `dpfmps_p2est`, whose agents cluster rows by what
        they hold themselves, a list of one for each view, whether they agree or not.
      embedding_: Representations that were clustered: of clients a list, of views of one place one
        array; None where a method has none.
      n_rounds_: Rounds made.
      bytes_up_, bytes_down_: Of all messages to the server, and from it.
      server_state_: After the last round.
      n_features_in_: Features of all views.
    """

    def __init__(
        self,
        method: str = "fmcsc",
        n_clusters: int | None = None,
        *,
        rounds: int | None = None,
        random_state: Any = None,
        **settings: Any,
    ) -> None:
        """Keeps the settings; they are checked by `fit`.

        Args:
          method: A name of `METHODS`.
          n_clusters: K. None: found by `label_consensus`; else eight, scikit-learn's default for
            KMeans, which says nothing of the data. `vertcohirf` always finds K itself, of agents
            that make so many clusters.
          rounds: Most rounds; as is usual for the method if None.
          random_state: None, a seed or a `RandomState`. The same seed finds the same clusters.
          **settings: Of the method's config and hyper-parameters, by name.
        """
        self.method = method
        self.n_clusters = n_clusters
        self.rounds = rounds
        self.random_state = random_state
        self.settings = settings

    # --- What scikit-learn asks for ---------------------------------------------------------------

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Returns the parameters, and those of the method's settings that were given."""
        return {name: getattr(self, name) for name in _OWN} | self.settings

    def set_params(self, **params: Any) -> FederatedClusterer:
        """Sets parameters, settings of the method among them.

        Settings go with their method: those of another one mean something else, also where they
        have the same name. Where the method changes they are dropped, with a warning.

        Raises:
          ValueError: Neither this class nor the method has a parameter of this name.
        """
        own = {name: value for name, value in params.items() if name in _OWN}
        before, kept = self.method, self.settings
        for name, value in own.items():
            setattr(self, name, value)
        if isinstance(self.method, str) and self.method in METHODS:  # else `fit` says so
            known = parameters(self.method)
            for name in params:
                if name not in known:
                    raise _unknown("parameter", name, known)
        # What is no name, such as an array, is for `fit` to refuse.
        old, new = (x if isinstance(x, str) else "" for x in (before, self.method))
        if old != new:
            if dropped := kept.keys() - params.keys():
                warnings.warn(
                    f"method: {self.method} takes the place of {before}, whose settings"
                    f" {', '.join(sorted(dropped))} are dropped; name with it what shall hold",
                    stacklevel=2,
                )
            kept = {}
        self.settings = kept | {n: v for n, v in params.items() if n not in own}
        return self

    def __sklearn_tags__(self) -> Any:
        """Says what input is understood beside a list of views."""
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = True
        return tags

    # --- Clustering -------------------------------------------------------------------------------

    @in_32_bits
    def fit(self, clients: Any, y: Any = None) -> FederatedClusterer:
        """Runs the method.

        Args:
          clients: See the module.
          y: Ignored; labels are for scoring.

        Raises:
          ValueError: A setting or an array is wrong; the message names it.
        """
        if not isinstance(self.method, str) or self.method not in METHODS:
            raise _unknown("method", self.method, METHODS)
        if self.n_clusters is not None:
            checks.whole("n_clusters", self.n_clusters, 1)
        checks.at_least(self, 0, "rounds")
        method = METHODS[self.method]
        # In their own type: what float32 would round away is refused.
        is_federated, given = _read(clients, [np.float64, np.float32])
        columns = _columns(clients)
        federation = _federation(given, is_federated, method.topology == "vertical")
        rounds = method.rounds if self.rounds is None else self.rounds
        k, settings = self.n_clusters, self.settings
        if k is not None and "shared_clusters" in parameters(self.method):  # found unless told
            settings = {"shared_clusters": k} | settings
        of_the_run = dict(
            zip(OF_THE_RUN, (8 if k is None else k, federation.n_clients, rounds), strict=True)
        )
        config, hyper = configured(method, settings, of_the_run)
        for field in dataclasses.fields(hyper):
            if np.ndim(value := getattr(hyper, field.name)):
                raise checks.wrong(field.name, value, "one number; a fit is made for each of many")
        steps = Steps(
            partial(method.make, config),
            hyper,
            federation,
            client_chunk=1 if jax.default_backend() == "cpu" else None,
            compiled=_programs(self.method, repr(config), _shapes(federation), _device()),
        )
        seed = _seed(self.random_state)
        key = jax.random.key(seed)
        # Shapes only: whatever the method itself refuses is found here.
        jax.eval_shape(lambda key: steps.algorithm.init(key, federation.without_labels()), key)
        steps.compile()
        state = steps.start(federation, key)
        state, _ = steps.setup(federation, key, state)
        sent = [steps.traffic()["setup"]]
        made = 0
        while steps.algorithm.round and steps.goes_on(state, made, rounds):
            state, _ = steps.one_round(federation, key, state, made)
            sent.append(steps.traffic()["round"])  # which may shrink from round to round
            state = steps.compacted(state)
            made += 1
        found = steps.evaluate(federation, key, state, max(made - 1, 0))
        if checks.has_nan((found.state.server, found.state.clients)):
            raise ValueError(
                f"fit: the model of {self.method} is NaN after {made} rounds; smaller steps or"
                " another scale of the features may help"
            )
        sent.append(steps.traffic()["finish"])
        self.bytes_up_, self.bytes_down_ = (sum(way) for way in zip(*sent, strict=True))
        self.n_rounds_ = made
        self.n_features_in_ = sum(federation.view_dims)
        self._columns = columns
        self.server_state_ = found.state.server
        labels = _by_client(federation, found.labels)
        self.labels_ = labels if is_federated or method.own_labels else labels[0]
        self.embedding_ = None
        if found.embedding is not None:
            embedding = _by_client(federation, found.embedding)
            self.embedding_ = embedding if is_federated else embedding[0]
        self._later = _Later(self.method, config, hyper, _outline(federation), seed)
        return self

    @in_32_bits
    def fit_predict(self, clients: Any, y: Any = None) -> Any:
        """Runs the method; returns `labels_`."""
        return self.fit(clients).labels_

    @available_if(_can_predict)
    @in_32_bits
    def predict(self, clients: Any) -> Any:
        """Finds the clusters of further rows, as of a client that comes when the rounds are over.

        Args:
          clients: As for `fit`, or one dictionary, of one client.

        Returns:
          One array for each client, or one array.

        Raises:
          ValueError: A view is not there, or has other features than it was fitted with, or numbers
            that float32 cannot hold; or tables have features in another order.
        """
        check_is_fitted(self, "server_state_")
        is_one = isinstance(clients, Mapping)
        # In their own type, as `fit` reads them, so that it is told what float32 cannot hold.
        is_federated, given = _read([clients] if is_one else clients, [np.float64, np.float32])
        _columns([clients] if is_one else clients, self._columns)
        found = [self._later.labels(self.server_state_, views) for views in given]
        return found if is_federated and not is_one else found[0]

    @available_if(_can_predict)
    def score(self, clients: Any, y: Any) -> float:
        """Computes the adjusted Rand index of the clusters of rows whose classes are known.

        Args:
          clients: As for `predict`.
          y: Classes [rows], or one such array for each client.

        Raises:
          ValueError: There are not as many classes as rows, or some are missing; or the tables of
            rows and the series of classes name the rows in different orders.
        """
        if y is None:
            raise checks.wrong("y", None, "classes [rows], or one such array for each client")
        found = self.predict(clients)
        parts, classes = (found, list(y)) if isinstance(found, list) else ([found], [y])
        rows, given = [len(part) for part in parts], [np.size(part) for part in classes]
        for mine in classes:
            if np.ndim(mine) > 1 and np.size(mine) != len(mine):
                raise ValueError(
                    f"y: got an array {np.shape(mine)}; allowed is a class for each row"
                )
        if rows != given:
            raise ValueError(
                f"y: got [{some(given)}] classes; allowed are [{some(rows)}], as many as the"
                " clients' rows"
            )
        holders = clients if _is_federated(clients) else [clients]
        kinds = set()
        for views, mine in zip(holders, classes, strict=True):
            views = views if isinstance(views, Mapping) else _of_one_place(views)
            check_order({f"view {v}": view for v, view in views.items()} | {"y": mine})
            kinds.add(kind_of_labels(mine, "y"))
        if len(kinds) > 1:
            raise ValueError("y: got numbers and words; allowed are either of them on all clients")
        truth = np.concatenate([np.ravel(mine) for mine in classes])
        return float(adjusted_rand_score(truth, np.concatenate(parts)))


def parameters(method: str) -> list[str]:
    """Lists the parameters of a method's estimator.

    Raises:
      ValueError: There is no such method.
    """
    if method not in METHODS:
        raise _unknown("method", method, METHODS)
    entry = METHODS[method]
    fields = (*dataclasses.fields(entry.config), *dataclasses.fields(entry.hyperparams))
    return [*_OWN, *(field.name for field in fields if field.name not in OF_THE_RUN)]


def _unknown(what: str, got: Any, known: Iterable[str]) -> ValueError:
    """Returns the error for a name that is none of those known, with the one probably meant."""
    # Methods' names in papers have capitals and hyphens.
    close = checks.meant(got.lower().replace("-", "_"), known) if isinstance(got, str) else ""
    return ValueError(f"{what}: got {got!r}; {close}allowed is {', '.join(known)}")


# --- Input and output -----------------------------------------------------------------------------


def _read(clients: Any, dtype: Any) -> tuple[bool, list[dict[int, np.ndarray]]]:
    """Returns whether these are clients, and the views of each; of one place there is one."""
    is_list = isinstance(clients, (list, tuple))
    if is_list and not clients:
        raise checks.wrong("clients", clients, _ALLOWED)
    # Generators among them, which could be read only once.
    if not is_list and not hasattr(clients, "__array__") and not issparse(clients):
        got = "None" if clients is None else f"a {type(clients).__name__}"
        raise ValueError(f"clients: got {got}; allowed is {_ALLOWED}")
    if _is_federated(clients):
        given = [_views(client, f"client {i}: ", dtype) for i, client in enumerate(clients)]
        return True, given
    if is_list and any(map(_is_client, clients)):
        raise checks.wrong("clients", "arrays and dictionaries", _ALLOWED)
    if is_list and any(isinstance(x, (list, tuple)) and any(map(_is_view, x)) for x in clients):
        raise checks.wrong("clients", "lists of arrays", _ALLOWED)
    return False, [_views(_of_one_place(clients), "", dtype)]


def _is_federated(clients: Any) -> bool:
    return isinstance(clients, (list, tuple)) and isinstance(clients[0], Mapping)


def _is_client(item: Any) -> bool:
    # A sparse matrix may be a dictionary, too; check_array says that none is understood.
    return isinstance(item, Mapping) and not issparse(item)


def _is_view(item: Any) -> bool:
    return getattr(item, "ndim", 0) == 2 or hasattr(item, "iloc")


def _of_one_place(clients: Any) -> dict[int, Any]:
    is_views = isinstance(clients, (list, tuple)) and (
        # A column among views is one of them that has a wrong shape, and no row.
        any(map(_is_view, clients)) or np.ndim(clients[0]) == 2
    )
    return dict(enumerate(clients if is_views else [clients]))


def _columns(
    clients: Any, known: Mapping[int, tuple[str, ...]] | None = None
) -> dict[int, tuple[str, ...]]:
    """Returns the names of each view's columns, where it is a table that has them.

    Args:
      clients: As `_read` has checked.
      known: Of each view, what they are to be.

    Raises:
      ValueError: Two tables of a view differ, be it in the order.
    """
    is_federated = _is_federated(clients)
    found = dict(known or {})
    for i, views in enumerate(clients if is_federated else [_of_one_place(clients)]):
        for v, table in views.items():
            name = f"client {i}: view {v}" if is_federated else f"view {v}"
            found[int(v)] = check_columns(name, table, found.get(int(v), ()))
    return found


def _views(views: Any, whose: str, dtype: Any) -> dict[int, np.ndarray]:
    if not isinstance(views, Mapping) or not views:
        got = "none" if isinstance(views, Mapping) else type(views).__name__
        raise checks.wrong(f"{whose}views", got, "a dictionary of one array or more")
    found = {}
    for v, array in views.items():
        if not isinstance(v, (int, np.integer)) or isinstance(v, bool) or v < 0:
            raise checks.wrong(f"{whose}views", v, "ids 0, 1, ...")
        name = f"{whose}view {v}"
        if array is None:
            raise checks.wrong(name, None, f"an array; {_LACKING}")
        check_unmasked(name, array)
        kinds: Any = getattr(array, "dtypes", getattr(array, "dtype", None))  # of a table, each
        times = [str(kind) for kind in np.ravel(kinds) if getattr(kind, "kind", "") in ("m", "M")]
        if times:
            raise checks.wrong(name, times[0], "numbers, such as days since a day")
        try:
            found[int(v)] = check_array(array, dtype=dtype, input_name=name)
        except ValueError as error:  # which names the view in some of its messages
            if "contains NaN" in str(error):
                raise ValueError(
                    f"{name} contains NaN; allowed are finite numbers; {_LACKING}"
                ) from error
            if name in str(error):
                raise
            # Some show the array, in many lines, before they say what to do.
            first, *others = str(error).splitlines()
            advice = [line for line in others if line.startswith("Reshape")]
            raise ValueError(" ".join([f"{name}: {first}", *advice])) from error
    check_order({f"{whose}view {v}": array for v, array in views.items()})
    rows = {v: len(array) for v, array in found.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(f"{whose}views: have {rows} rows; allowed is the same number")
    return found


def _federation(
    given: list[dict[int, np.ndarray]], is_federated: bool, vertical: bool
) -> Federation:
    if not vertical:
        return Federation.from_clients(given)
    agents = given if is_federated else [{v: x} for v, x in given[0].items()]
    views = [x for agent in agents for x in agent.values()]
    if any(len(agent) != 1 for agent in agents) or len({len(x) for x in views}) > 1:
        held = [{v: x.shape for v, x in agent.items()} for agent in agents]
        raise ValueError(
            f"clients: got views of the shapes {some(held)}; agents of a vertical method, as this"
            " one is, hold one view each, of the same rows in the same order"
        )
    federation = Federation.from_arrays(
        views, partition=vertical_partition(len(views[0]), len(views))
    )
    federation.check_vertical()
    federation.check_features()
    return federation


def _by_client(federation: Federation, stacks: Sequence[Any]) -> list[np.ndarray]:
    """Returns the rows of each client, in the order of their ids."""
    found: dict[int, np.ndarray] = {}
    for cohort, stack in zip(federation.cohorts, stacks, strict=True):
        for i, rows, mask in zip(
            np.asarray(cohort.client_ids), np.asarray(stack), np.asarray(cohort.mask), strict=True
        ):
            found[int(i)] = rows[mask]
    return [found[i] for i in sorted(found)]


@functools.lru_cache(maxsize=4)
def _programs(*alike: Any) -> dict[str, Future]:
    """Returns the compiled programs of earlier fits that are alike in all of this, by their text.

    So that another seed, other numbers or other rows of the same shapes compile nothing. Of few
    kinds of fits, since programs take memory.
    """
    return {}


def _shapes(federation: Federation) -> tuple[tuple[int, ...], ...]:
    return tuple(np.shape(x) for cohort in federation.cohorts for x in cohort.views)


def _device() -> tuple[Any, str]:
    return jax.config.jax_default_device, jax.default_backend()  # type: ignore[attr-defined]


def _seed(random_state: Any) -> int:
    if isinstance(random_state, (int, np.integer)) and 0 <= random_state < 2**31:
        return int(random_state)
    try:
        return int(check_random_state(random_state).randint(2**31 - 1))
    except ValueError as error:
        allowed = "None, a whole number from 0 to 2^32 - 1 or a numpy.random.RandomState"
        raise checks.wrong("random_state", random_state, allowed) from error


# --- Further clients ------------------------------------------------------------------------------


def _outline(federation: Federation) -> Federation:
    """Returns a federation of the same clients without their features, in next to no memory."""

    def emptied(cohort: Any) -> Cohort:
        nothing = tuple(np.broadcast_to(np.float32(0), np.shape(x)) for x in cohort.views)
        return jax.tree.map(np.asarray, cohort).replace(views=nothing)

    return dataclasses.replace(federation, cohorts=tuple(map(emptied, federation.cohorts)))


@dataclasses.dataclass
class _Later:
    """What is needed to find the clusters of a client that comes later; can be pickled."""

    method: str
    config: Any
    hyper: Any
    outline: Federation
    seed: int

    @functools.cached_property
    def algorithm(self) -> FederatedAlgorithm:
        """The method; made again where this was unpickled, since functions are not."""
        return METHODS[self.method].make(self.config, self.hyper)

    @functools.cached_property
    def first_state(self) -> Any:
        """`(view ids, rows, key) -> state` of a client that comes when all others are there.

        All of it is traced, so that what a method asks of clients that train, such as a least
        number of rows, is not asked of one that joins. `init` reads no features, so zeros do.
        """
        known = self.outline
        new = known.n_clients

        def state(ids: tuple[int, ...], rows: int, key: jax.Array) -> Any:
            alike = [c.client_ids for c in known.cohorts if c.view_ids == ids]
            n = sum(map(len, alike)) + 1
            mine = Cohort(
                views=tuple(jnp.zeros((n, rows, known.view_dims[v])) for v in ids),
                mask=jnp.ones((n, rows), bool),
                sample_ids=jnp.tile(jnp.arange(rows)[None], (n, 1)),
                client_ids=jnp.concatenate([*alike, jnp.full(1, new)]).astype(jnp.int32),
                view_ids=ids,
            )
            others = [cohort for cohort in known.cohorts if cohort.view_ids != ids]
            federation = dataclasses.replace(known, cohorts=(*others, mine))
            _, states = self.algorithm.init(key, federation)
            return jax.tree.map(lambda x: x[-1:], states[-1])

        return jax.jit(state, static_argnums=(0, 1))

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the functions out."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def labels(self, server: Any, views: Mapping[int, np.ndarray]) -> np.ndarray:
        """Returns the clusters [rows] of a client that holds these views.

        Raises:
          ValueError: A view is not there, has other features than it was fitted with, or numbers
            that float32 cannot hold.
        """
        known = self.outline
        for v, x in views.items():
            if v >= known.n_views:
                raise checks.wrong("views", v, f"0 to {known.n_views - 1}")
            if x.shape[1] != known.view_dims[v]:
                raise ValueError(
                    f"view {v}: X has {x.shape[1]} features, but FederatedClusterer is expecting"
                    f" {known.view_dims[v]} features as input"
                )
        ids = tuple(sorted(views))
        check_arrays([views[v] for v in ids], names=[str(v) for v in ids])
        rows = len(views[ids[0]])
        mine = Cohort(
            views=tuple(np.asarray(views[v], np.float32)[None] for v in ids),  # type: ignore[misc]
            mask=np.ones((1, rows), bool),  # type: ignore[arg-type]
            sample_ids=np.arange(rows, dtype=np.int32)[None],  # type: ignore[arg-type]
            client_ids=np.full(1, known.n_clients, np.int32),  # type: ignore[arg-type]
            view_ids=ids,
        )
        state = self.first_state(ids, rows, jax.random.key(self.seed))
        found = assign_program(self.algorithm.assign, server, state, mine)
        return np.asarray(found)[0].astype(np.int32)
