"""Reductions that bound what hostile clients do, in the place of sums and means of messages.

    guarded = robust(algorithm, trimmed_mean(0.2), ratios={"round[0]": Ratio(0, 1)})

A sum is the mean times a number, and one client moves a mean anywhere. `robust` collects the
messages of a sum in a stack, combines them by a rule, and hands the method's own `server` the
result times the number of clients: the algorithm stays as it is. Rules are functions
`(x [n, d], mask bool [n]) -> [d]` of one vector from each client:

    norm_bounding     the mean, deviations from the median cut to a common length
    trimmed_mean      coordinate by coordinate, without the least and the largest values
    median            coordinate by coordinate
    geometric_median  the point of least total distance, by Weiszfeld's iteration
    multi_krum        the mean of the messages whose nearest others are near

A tuple is a message of several parts, such as models and weights, and each part is combined on its
own: they have scales of their own, and a rule by distances would see the largest only. Any other
message is one part.

RATIOS. Many sums are numerators and denominators of a weighted mean: FMCSC's message is a model
times a weight, and the weight; FedHK's are sums of samples, and their mass. A rule by coordinates
has no meaning there, since the quotient of two medians is no median of quotients: it can lie
outside all that honest clients say, and a client that multiplies both by a thousand says nothing
else and yet outweighs all others. With a `Ratio` the rule is applied to the quotients (parameters,
centres), every client counting alike, and to the denominators on their own; the numerators that
the server gets are the product. What is lost is that clients of more weight count for more: weights
are what a hostile client says of itself. Without an attack the result is therefore not that of the
plain sum, and `trimmed_mean(0.0)` is the plain sum without ratios only.

QUORUM. A client says nothing of a quotient where it has no weight, as of a cluster that it holds no
rows of, and a hostile one can claim them all. Among the few that are left two could decide. So no
more than a quorum of clients makes a quotient nothing: numerators and denominators are zero, and
the server does what it does where nobody says anything (E-FKMVC's keeps the centre); nor is it part
of any distance. As long as the hostile clients are no more than half of the quorum, they are fewer
than the honest ones that speak, of every quotient that counts: a quarter of those that are reduced
together for the quorum of a half. The rule bounds them then if it bears half of those who speak, or
is told of as many. What hostile clients can do by silence is to keep a quotient from counting.
Without it, quorum=0, the bounds of the rules hold among the clients that speak of a quotient only.

LIMITS. A rule helps while the hostile clients are fewer than it can bear, among those that are
reduced together: cohorts whose messages have the same structure and shapes are, others are not, so
that two clients that hold a view alone cannot protect each other. It takes honest clients to be
alike; where they are not, it drops honest minorities along with hostile ones. Memory is that of
all messages. The server sees every one, and so secure aggregation is excluded. Nothing is said of
exchanges that are no sums: see `robust`.

Sources: Yin et al., "Byzantine-robust distributed learning: towards optimal statistical rates",
ICML 2018 (median, trimmed mean); Blanchard et al., "Machine learning with adversaries: Byzantine
tolerant gradient descent", NeurIPS 2017 (Krum); Pillutla et al., "Robust aggregation for federated
learning", IEEE Transactions on Signal Processing, 2022 (geometric median).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from jaxfedmvc.algorithm import FederatedAlgorithm, Phase, phases_by_name, with_phases
from jaxfedmvc.checks import number, whole, wrong
from jaxfedmvc.messages.secure import Masked
from jaxfedmvc.messages.transforms import check_floating

PyTree = Any
# `(x [n, d], mask bool [n]) -> [d]`. Rows outside the mask are finite and count nowhere.
Rule = Callable[[Array, Array], Array]

# What a share of clients may be short of a whole number by rounding.
_ROUNDING = 1e-4


class Ratio(NamedTuple):
    """Which parts of a message are sums of a weighted mean; see RATIOS above.

    Attributes:
      numerators: Place of the part, in the tuple that the message is, that is divided.
      denominators: Place of what it is divided by: a pytree of which the numerators' is an
        extension, whose leaves have the leading axes of the numerators'.
      least: A client whose denominator is no more than this has nothing to say about the quotient:
        it is left out there. 0 or more; may be traced.
      quorum: Share of the clients that count: where no more of them have something to say, the
        quotient and its denominator are zero. From 0 to below 1; may be traced.
    """

    numerators: int
    denominators: int
    least: ArrayLike = 0.0
    quorum: ArrayLike = 0.5


# --- Rules ----------------------------------------------------------------------------------------


def trimmed_mean(share: ArrayLike = 0.2) -> Rule:
    """Returns the mean of every coordinate without its least and its largest values.

    Args:
      share: Of the clients, cut off at each end; rounded down to whole clients, as
        `scipy.stats.trim_mean` does. From 0, the mean, to below 0.5; may be traced.

    Raises:
      ValueError: A concrete share out of range.
    """
    _check("share", share, 0.0, 0.5)

    def rule(x: Array, mask: Array) -> Array:
        n = jnp.sum(mask)
        cut = jnp.minimum(_count(share, n), jnp.maximum(n - 1, 0) // 2)
        place = jnp.arange(len(x))[:, None]
        kept = (place >= cut) & (place < n - cut)
        ordered = _ordered(x, mask[:, None])
        return jnp.sum(jnp.where(kept, ordered, 0.0), axis=0) / jnp.maximum(n - 2 * cut, 1)

    return rule


def median() -> Rule:
    """Returns the median of every coordinate, the mean of the two in the middle of an even number.

    Between the least and the largest honest value while fewer than half of the clients that count
    are hostile: of a ratio, those whose weight is above `least` (see QUORUM in the module).
    """
    return lambda x, mask: _median(x, mask[:, None])


def geometric_median(steps: int = 10) -> Rule:
    """Returns the point whose distances to the clients' have the least sum.

    Weiszfeld's iteration, smoothed near a client's point as in Pillutla et al., algorithm 2, which
    makes three or four steps; it begins at the median, since the mean may lie anywhere.

    Args:
      steps: Static number of steps, 1 or more.

    Raises:
      ValueError: `steps` below 1.
    """
    whole("steps", steps, 1)

    def rule(x: Array, mask: Array) -> Array:
        start = _median(x, mask[:, None])
        least = 1e-6 * _median(_norms(x - start[None]), mask) + 1e-20

        def step(_: int, centre: Array) -> Array:
            near = jnp.where(mask, 1 / jnp.maximum(_norms(x - centre[None]), least), 0.0)
            share = near / jnp.maximum(jnp.sum(near), 1e-30)
            return jnp.sum(jnp.where(share[:, None] > 0, share[:, None] * x, 0.0), axis=0)

        return jax.lax.fori_loop(0, steps, step, start)

    return rule


def multi_krum(share: ArrayLike = 0.2) -> Rule:
    """Returns the mean of the n - f messages of least score, f being the hostile ones at most.

    A message's score is the sum of its squared distances to the n - f - 2 others that are nearest
    (to one, where these are fewer). The guarantee of Blanchard et al., which is on Krum itself,
    takes n > 2 f + 2.

    Args:
      share: Of the clients, taken to be hostile: f of n, rounded down. From 0 to below 0.5; may be
        traced.

    Raises:
      ValueError: A concrete share out of range.
    """
    _check("share", share, 0.0, 0.5)

    def rule(x: Array, mask: Array) -> Array:
        n = jnp.sum(mask)
        f = _count(share, n)
        n_near, n_kept = jnp.maximum(n - f - 2, 1), jnp.maximum(n - f, 1)
        # Differences, one client at a time: a Gram matrix cancels where somebody is far away.
        squares = jax.lax.map(lambda row: jnp.sum((x - row[None]) ** 2, axis=1), x)
        others = mask[:, None] & mask[None] & ~jnp.eye(len(x), dtype=bool)
        ordered = _ordered(squares, others)
        near = jnp.where(jnp.arange(len(x))[:, None] < n_near, ordered, 0.0)
        scores = jnp.where(mask, jnp.sum(near, axis=0), jnp.inf)
        # By a threshold and not by places, which would depend on the order of the clients.
        kept = mask & (scores <= jnp.sort(scores)[n_kept - 1])
        return _mean(x, kept)

    return rule


def norm_bounding(radius: ArrayLike = 1.0) -> Rule:
    """Returns the mean, with deviations from the median scaled down to a common bound.

    The bound is `radius` times the median length of the clients' deviations from the median of
    every coordinate. That, and not what the clients were sent, is where deviations begin, so that
    sums are treated as models are. It bounds what a client does and removes nobody.

    Args:
      radius: 0, which is the median, or more; may be traced.

    Raises:
      ValueError: A concrete radius below zero.
    """
    _check("radius", radius, 0.0, np.inf)

    def rule(x: Array, mask: Array) -> Array:
        centre = _median(x, mask[:, None])
        away = x - centre[None]
        norms = _norms(away)
        bound = radius * _median(norms, mask)
        scale = jnp.where(norms > bound, bound / jnp.where(norms > 0, norms, 1.0), 1.0)[:, None]
        return centre + _mean(jnp.where(scale > 0, scale * away, 0.0), mask)

    return rule


RULES: dict[str, Callable[..., Rule]] = {
    "norm_bounding": norm_bounding,
    "trimmed_mean": trimmed_mean,
    "median": median,
    "geometric_median": geometric_median,
    "multi_krum": multi_krum,
}


def _check(name: str, value: ArrayLike, least: float, below: float) -> None:
    allowed = f"{least:g} or more" + (f", below {below:g}" if below < np.inf else "")
    number(name, value, (lambda x: (x >= least) & (x < below), allowed))


def _count(share: ArrayLike, n: Array) -> Array:
    return jnp.floor(share * n + _ROUNDING).astype(jnp.int32)


def _ordered(x: Array, where: Array) -> Array:
    """Sorts the first axis; what is not in `where` comes last, as infinite numbers."""
    return jnp.sort(jnp.where(where, x, jnp.inf), axis=0)


def _median(x: Array, where: Array) -> Array:
    """Returns the median over the first axis of what is in `where`; 0 where that is nothing."""
    n = jnp.sum(jnp.broadcast_to(where, x.shape), axis=0, keepdims=True)
    ordered = _ordered(x, where)
    low, high = (
        jnp.take_along_axis(ordered, jnp.maximum(place, 0), axis=0)[0]
        for place in ((n - 1) // 2, n // 2)
    )
    return jnp.where(n[0] > 0, 0.5 * low + 0.5 * high, 0.0)


def _mean(x: Array, mask: Array) -> Array:
    total = jnp.sum(jnp.where(mask[:, None], x, 0.0), axis=0)
    return total / jnp.maximum(jnp.sum(mask), 1)


def _norms(x: Array) -> Array:
    return jnp.sqrt(jnp.sum(x**2, axis=1))


# --- Algorithms -----------------------------------------------------------------------------------


def robust(
    algorithm: FederatedAlgorithm,
    rule: Rule,
    *,
    ratios: Mapping[str, Ratio] | None = None,
    centred: Collection[str] = (),
    unguarded: Collection[str] = (),
) -> FederatedAlgorithm:
    """Returns the same method with its sums over clients made by a rule that bounds each of them.

    Phases are named "setup[0]", "round[0]", "finish[0]" and so on. For one whose `reduce` is "sum"
    the method's server gets the sum that there would be if every client had sent what the rule
    found, and as `weights` their number. Clients of weight zero count nowhere, and neither does a
    message with a number that is not finite.

    A phase whose server reads single messages ("stack", or a leader's) has no reduction that a rule
    could bound. If its server averages them entry by entry, name it in `centred`: every client's
    message is then replaced by what the rule made of all, in the shapes that the server expects.
    Sets of centres, rankings or labels, whose entries do not stand for the same thing on every
    client, and factors of matrices must not be. Whatever else sends a message is named in
    `unguarded`: hostile clients are not bounded there, and a leader is trusted.

    Args:
      algorithm: Any method, with transformed or coded messages too.
      rule: See the module.
      ratios: By the name of a phase which parts of its sum are numerators and denominators.
      centred: Names of phases that are no sums and whose messages are replaced.
      unguarded: Names of phases that stay as they are.

    Raises:
      ValueError: A name is that of no phase, or of one that it does not fit; a ratio's concrete
        numbers are out of range. At trace time: a phase that is no sum, and named nowhere, sends a
        message that is not empty; messages are no floating-point arrays, or masked by secure
        aggregation.
    """
    ratios = {} if ratios is None else ratios
    phases = phases_by_name(algorithm)
    sums = [name for name, phase in phases.items() if _is_sum(phase)]
    stacks = [name for name, phase in phases.items() if phase.reduce == "stack"]
    for argument, names, allowed in (
        ("ratios", ratios, sums),
        ("centred", centred, stacks),
        ("unguarded", unguarded, list(phases)),
    ):
        for name in names:
            if name not in allowed:
                raise wrong(argument, name, ", ".join(allowed) or "none for this method")
    for name, ratio in ratios.items():
        _check(f"ratios: {name}: least", ratio.least, 0.0, np.inf)
        _check(f"ratios: {name}: quorum", ratio.quorum, 0.0, 1.0)

    def guarded(name: str, phase: Phase) -> Phase:
        if name in unguarded:
            return phase
        if _is_sum(phase):
            server = partial(_sum_server, phase.server, rule, ratios.get(name))
            return phase._replace(reduce="stack", server=server)
        if name in centred:
            return phase._replace(server=partial(_centred_server, phase.server, rule))
        return phase._replace(server=partial(_refusing_server, phase, name))

    return with_phases(algorithm, guarded)


def _is_sum(phase: Phase) -> bool:
    return phase.reduce == "sum" and phase.who == "everyone"


def _sum_server(
    server: Callable[..., Any],
    rule: Rule,
    ratio: Ratio | None,
    key: Array,
    state: PyTree,
    messages: tuple[PyTree, ...],
    weights: tuple[Array, ...],
) -> tuple[PyTree, PyTree]:
    """Hands the server of a sum what it expects: sums, and numbers of clients."""
    masks = _usable(messages, weights)
    counts = tuple(jnp.sum(mask).astype(jnp.float32) for mask in masks)
    typical = _typical(rule, ratio, messages, masks)
    sums = tuple(
        jax.tree.map(lambda x, n=n: n.astype(x.dtype) * x, one)
        for one, n in zip(typical, counts, strict=True)
    )
    return server(key, state, sums, counts)


def _centred_server(
    server: Callable[..., Any],
    rule: Rule,
    key: Array,
    state: PyTree,
    messages: tuple[PyTree, ...],
    weights: tuple[Array, ...],
) -> tuple[PyTree, PyTree]:
    """Hands the server of a stack as many messages as there are, all alike."""
    masks = _usable(messages, weights)
    typical = _typical(rule, None, messages, masks)
    copies = tuple(
        jax.tree.map(lambda x, mask=mask: jnp.broadcast_to(x, (len(mask), *x.shape)), one)
        for one, mask in zip(typical, masks, strict=True)
    )
    return server(key, state, copies, tuple(mask.astype(jnp.float32) for mask in masks))


def _refusing_server(
    phase: Phase,
    name: str,
    key: Array,
    state: PyTree,
    messages: tuple[PyTree, ...],
    weights: tuple[Array, ...],
) -> tuple[PyTree, PyTree]:
    if jax.tree.leaves(messages):
        raise ValueError(
            f"{name}: its server reads single messages (reduce={phase.reduce!r},"
            f" who={phase.who!r}), so that there is no reduction to bound; allowed are sums over"
            " everyone, empty messages, phases in centred, whose server averages, and phases in"
            " unguarded, where hostile clients are not bounded"
        )
    return phase.server(key, state, messages, weights)


def _usable(messages: tuple[PyTree, ...], weights: tuple[Array, ...]) -> tuple[Array, ...]:
    """Checks what kind of messages these are; tells which of them count, bool [n] each."""
    masks = []
    for message, weight in zip(messages, weights, strict=True):
        if isinstance(message, Masked):
            raise ValueError(
                "messages: are masked by secure aggregation, and a rule must see each of them;"
                " allowed is robust or secure_aggregation, not both"
            )
        check_floating(message, "be combined by a rule")
        mask = weight > 0
        for x in jax.tree.leaves(message):
            mask &= jnp.all(jnp.isfinite(x).reshape(len(mask), -1), axis=1)
        masks.append(mask)
    return tuple(masks)


def alike(messages: Sequence[PyTree]) -> list[list[int]]:
    """Groups the places of stacks of messages [clients, ...] of the same structure and shapes."""
    groups: dict[Any, list[int]] = {}
    for place, message in enumerate(messages):
        leaves, tree = jax.tree.flatten(message)
        form = tree, tuple((x.shape[1:], x.dtype) for x in leaves)
        groups.setdefault(form, []).append(place)
    return list(groups.values())


def _typical(
    rule: Rule, ratio: Ratio | None, messages: Sequence[PyTree], masks: Sequence[Array]
) -> list[PyTree]:
    """Returns, for each cohort, the message that the rule makes of all that are like its own."""
    found: list[PyTree] = [None] * len(messages)
    for places in alike(messages):
        stack = jax.tree.map(lambda *x: jnp.concatenate(x), *(messages[p] for p in places))
        mask = jnp.concatenate([masks[p] for p in places])
        # What does not count may be anything, and zero times infinity is no number.
        keep = jax.vmap(
            lambda m, row: jax.tree.map(lambda x: jnp.where(m, x, jnp.zeros_like(x)), row)
        )
        one = _of_parts(rule, ratio, keep(mask, stack), mask)
        for place in places:
            found[place] = one
    return found


def _of_parts(rule: Rule, ratio: Ratio | None, stack: PyTree, mask: Array) -> PyTree:
    """Combines the parts of a message, those of a ratio together."""
    if not isinstance(stack, tuple):
        if ratio is not None:
            raise wrong("ratios", ratio, "a ratio of parts of a message that is a tuple")
        return _of_part(rule, stack, mask)
    parts: list[PyTree] = list(stack)
    rest = list(range(len(parts)))
    if ratio is not None and parts:
        top, bottom = ratio.numerators, ratio.denominators
        if not {top, bottom} <= set(rest):
            raise wrong("ratios", ratio, f"places of the {len(parts)} parts of the message")
        rest = [place for place in rest if place not in (top, bottom)]
        parts[top], parts[bottom] = _of_ratio(rule, ratio, parts[top], parts[bottom], mask)
    for place in rest:
        parts[place] = _of_part(rule, parts[place], mask)
    return type(stack)(*parts) if hasattr(stack, "_fields") else tuple(parts)


def _of_part(rule: Rule, part: PyTree, mask: Array, said: PyTree | None = None) -> PyTree:
    """Applies a rule to one part of all messages; where `said` is False a client says nothing.

    Its number there becomes the median of the others', so that it moves none of the rules.
    """
    leaves = jax.tree.leaves(part)
    if not leaves:
        return part
    x, unravel = _matrix(leaves), ravel_pytree(jax.tree.map(lambda x: x[0], part))[1]
    if said is not None:
        where = _matrix(jax.tree.leaves(said)) & mask[:, None]
        x = jnp.where(where, x, _median(x, where)[None])
    return unravel(rule(x, mask))


def _matrix(leaves: Sequence[Array]) -> Array:
    return jnp.concatenate([x.reshape(len(x), -1) for x in leaves], axis=1)


def _of_ratio(
    rule: Rule, ratio: Ratio, numerators: PyTree, denominators: PyTree, mask: Array
) -> tuple[PyTree, PyTree]:
    """Combines quotients and denominators, over the clients that have something to say of each.

    Returns:
      Numerators and denominators of a typical client: the sum of the denominators over those that
      say something, divided by the number of all, and the quotient times that. Zeros where no more
      than the quorum say something.
    """
    least = ratio.least
    has_said = jax.tree.map(lambda w: w > least, denominators)

    def quotients(w: Array, top: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x / _widened(jnp.where(w > least, w, 1.0), x), top)

    def said_of(said: Array, top: PyTree) -> PyTree:
        # A quotient that overflows says nothing either.
        return jax.tree.map(lambda x: _widened(said, x) & jnp.isfinite(x), top)

    n = jnp.maximum(jnp.sum(mask), 1)

    def share_of(said: Array) -> Array:
        n_said = jnp.sum(jax.vmap(jnp.logical_and)(said, mask), axis=0)
        return jnp.where(n_said > ratio.quorum * n + _ROUNDING, n_said / n, 0.0)

    share = jax.tree.map(share_of, has_said)
    # Nor does what does not count: where hostile clients are most of the few that speak, it would
    # be the honest ones who lie far from the others, by whatever distance.
    has_said = jax.tree.map(lambda said, share: said & (share > 0)[None], has_said, share)
    means = jax.tree.map(quotients, denominators, numerators)
    mean = _of_part(rule, means, mask, jax.tree.map(said_of, has_said, means))
    bottom = _of_part(rule, denominators, mask, has_said)
    bottom = jax.tree.map(jnp.multiply, bottom, share)
    top = jax.tree.map(lambda w, x: jax.tree.map(lambda x: _widened(w, x) * x, x), bottom, mean)
    return top, bottom


def _widened(w: Array, like: Array) -> Array:
    """Gives `w` trailing axes, so that it broadcasts against `like`."""
    return jnp.broadcast_to(w.reshape(w.shape + (1,) * (like.ndim - w.ndim)), like.shape)
