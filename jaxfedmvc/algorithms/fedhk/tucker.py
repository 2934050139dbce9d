"""FedHK-Tucker: centres of low multilinear rank, of which only small cores travel.

(70) = (89): the centres of all views, padded to the widest, are a tensor C [c, D_max, s], and
C ~ G x_1 A x_2 B x_3 W with a core G [R1, R2, R3]. The printed updates (76) fit it in the Euclidean
norm, which may raise J; here it is fitted to the quadratic bound of J, by a second majorisation
(Kiers, "Weighted least squares fitting using ordinary least squares algorithms", 1997).

A core means nothing without its factors: (G, B) and (G x_2 O^T, B O) are the same tensor. So either
all share a basis B, made before the rounds of the clients' summaries, or every client rotates its
own factors towards those it was sent before they are averaged (`alignment`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxfedmvc import checks, linalg
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms.fedhk import heat_kernel as hk
from jaxfedmvc.algorithms.fedhk.method import e_fkmvc
from jaxfedmvc.algorithms.fedhk.model import Centres, Codec, positive
from jaxfedmvc.algorithms.fedhk.settings import FedHKHyperparams, FedHKTuckerConfig
from jaxfedmvc.precision import matmul
from jaxfedmvc.tensor import tucker as tk

# Sweeps of the server in a round, where it constrains clusters or views.
_SWEEPS = 10
# Of the Gram matrix of a view's part of the basis, whose eigenvalues are at most 1.
_RIDGE = 1e-4


def fedhk_tucker(
    config: FedHKTuckerConfig, hyperparams: FedHKHyperparams | None = None
) -> FederatedAlgorithm:
    """Returns E-FKMVC with centres in Tucker form.

    With `aggregation="statistics"` clients send N^h B^h, [c, R2] for each view instead of [c, d_h]:
    linear, so that the sum of the compressed is the compressed sum. With "average" they send the
    core of their centres, and with `alignment="procrustes"` their factors too.

    Ranks R1 <= c, R2 <= D_max, R3 <= s, each at most the product of the others; without any they
    are c (at most D_max s), 2c (at most D_max and R1 R3, at least R3 / R1) and s (at most c D_max).

    Raises:
      ValueError: As `e_fkmvc`. From `init` also: ranks that the tensor cannot have.
    """
    hyper = checks.settings(config, FedHKTuckerConfig, hyperparams, FedHKHyperparams)
    return e_fkmvc(config, hyper, tucker_codec(config))


def tucker_codec(config: FedHKTuckerConfig) -> Codec:
    """Returns the codec of centres in Tucker form; see `fedhk_tucker`."""
    if config.aggregation == "statistics":
        return _of_statistics(config)
    return _of_cores(config) if config.alignment == "shared_basis" else _of_factors(config)


def stacked(centres: Centres) -> Array:
    """Stacks centres by (64)-(66): the tensor [c, D_max, s], views padded with zeros."""
    width = max(part.shape[1] for part in centres.values())
    return jnp.stack(
        [jnp.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in centres.values()], axis=2
    )


def feature_basis(rows: dict[int, Array], counts: Array, rank: int) -> Array:
    """Returns B [D_max, R2], leading directions of the clients' summaries, all views in one mode.

    They are the left singular vectors of the mode-2 unfolding of the summaries, every row weighted
    by its count and every view by its total, as J weighs them.
    """
    weighted = {v: part * jnp.sqrt(counts)[:, None] for v, part in rows.items()}
    totals = {v: positive(jnp.sum(jnp.square(part))) for v, part in weighted.items()}
    tensor = stacked({v: part / jnp.sqrt(totals[v]) for v, part in weighted.items()})
    gram = jnp.einsum("njs,nks->jk", tensor, tensor, precision=lax.Precision.HIGHEST)
    vectors = linalg.eigh(gram)[1][:, : -rank - 1 : -1]
    return vectors * tk.largest_entry_signs(vectors)


def _of_statistics(config: FedHKTuckerConfig) -> Codec:
    """Returns the codec of compressed sums.

    The fit is C in the coordinates of the basis, Z = G x_1 A x_3 W [c, R2, s], as a Tucker form. A
    mode of full rank has no factor there but an empty tuple: the core takes it in.
    """

    def start(
        rows: dict[int, Array], counts: Array, centres: Centres
    ) -> tuple[Array, tuple[Array, tuple]]:
        widths = {v: part.shape[-1] for v, part in centres.items()}
        ranks = _ranks(config, widths)
        basis = feature_basis(rows, counts, ranks[1])

        def one(centres: Centres) -> tuple[Array, tuple]:
            inner = jnp.stack([_into(part, basis) for part in centres.values()], axis=2)
            return _kept(tk.hosvd(inner, ranks))

        return basis, jax.vmap(one)(centres)

    def centres(sent: tuple[Array, tuple], basis: Array, widths: dict[int, int]) -> Centres:
        inner = _inner(sent)
        return {v: matmul(inner[:, :, v], basis[:width].T) for v, width in widths.items()}

    return Codec(
        start=start,
        sent=lambda fit, view_ids: fit,
        centres=centres,
        compress=lambda numerators, basis: {v: _into(n, basis) for v, n in numerators.items()},
        update=_update,
        shares_basis=True,
    )


def _update(
    fit: tuple[Array, tuple],
    numerators: dict[int, Array],
    weights: dict[int, Array],
    relevance: Array,
    basis: Array,
    widths: dict[int, int],
) -> tuple[Array, tuple]:
    """Moves Z nearer to the centres N / W, all in the coordinates of the basis.

    The bound of J is sum_kh w_kh |B^h z_kh - m_kh|^2 with w_kh = delta_h v_h^alpha W_kh, where
    B^h has the rows of the basis that view h fills. Without further constraint every z_kh has
    its own minimum. Else sweeps of HOOI go towards
    Z + w / max w (B^h^T m - B^h^T B^h Z), which lowers the bound as B^h^T B^h <= 1.
    """
    grams = jnp.stack([matmul(basis[:width].T, basis[:width]) for width in widths.values()])
    strengths = relevance[:, None] * jnp.stack([weights[v] for v in widths])  # [s, c]

    def residual(inner: Array) -> Array:
        """Computes B^h^T m - B^h^T B^h Z, [s, c, R2], zero where a cluster is empty."""
        fitted = matmul(jnp.moveaxis(inner, 2, 0), grams)
        targets = [hk.centres_from(numerators[v], weights[v], fitted[v]) for v in widths]
        return jnp.stack(targets) - fitted

    old = _inner(fit)
    _, (clusters, views) = fit
    if isinstance(clusters, tuple) and isinstance(views, tuple):
        # Of directions that a narrow view does not fill, nothing is known: they stay.
        inverses = jax.vmap(linalg.inverse)(grams + _RIDGE * jnp.eye(len(grams[0]))[None])
        return old + jnp.moveaxis(matmul(residual(old), inverses), 0, 2), ((), ())

    strength = jnp.broadcast_to(strengths.T[:, None], old.shape)

    def sweep(_: int, fit: tuple[Array, tuple]) -> tuple[Array, tuple]:
        inner = _inner(fit)
        wanted = inner + jnp.moveaxis(residual(inner), 0, 2)
        plain = tk.weighted_target(wanted, inner, strength)
        factors = [
            jnp.eye(size) if isinstance(factor, tuple) else factor
            for factor, size in zip((fit[1][0], (), fit[1][1]), inner.shape, strict=True)
        ]
        return _kept(tk.project(plain, tk.hooi_sweep(plain, factors)))

    return lax.fori_loop(0, _SWEEPS, sweep, fit)


def _of_cores(config: FedHKTuckerConfig) -> Codec:
    """Returns the codec of cores alone, for factors A, B, W that are fixed before the rounds.

    Averages of cores are then cores of averages. All starts share the factors: with R1 < c those of
    the first start's clusters, which suit the others less.
    """

    def start(
        rows: dict[int, Array], counts: Array, centres: Centres
    ) -> tuple[tuple[Array, ...], Array]:
        widths = {v: part.shape[-1] for v, part in centres.items()}
        ranks = _ranks(config, widths)
        features = feature_basis(rows, counts, ranks[1])
        # Clusters and views have the factors of the first start.
        first = stacked({v: part[0] for v, part in centres.items()})
        clusters, _, views = tk.hosvd(tk.mode_product(first, features.T, 1), ranks).factors
        factors = (clusters, features, views)
        cores = jax.vmap(lambda c: tk.project(stacked(c), factors).core)(centres)
        return factors, cores

    def centres(sent: Array, basis: tuple[Array, ...], widths: dict[int, int]) -> Centres:
        return _unstacked(tk.reconstruct(tk.Tucker(sent, basis)), widths)

    def encode(centres: Centres, sent: Array, basis: tuple[Array, ...]) -> Array:
        whole = _with_held(tk.reconstruct(tk.Tucker(sent, basis)), centres)
        return tk.project(whole, basis).core

    return Codec(
        start=start,
        sent=lambda fit, view_ids: fit,
        centres=centres,
        encode=encode,
        decode=lambda payloads, weights, fit, *_: _mean(payloads, weights, fit),
        shares_basis=True,
    )


def _of_factors(config: FedHKTuckerConfig) -> Codec:
    """Returns the codec of core and factors, (104)-(111), of every client's own decomposition.

    The client rotates its factors towards those that it was sent; their averages are made
    orthonormal again.
    """

    def start(
        rows: dict[int, Array], counts: Array, centres: Centres
    ) -> tuple[tuple[()], tk.Tucker]:
        ranks = _ranks(config, {v: part.shape[-1] for v, part in centres.items()})
        return (), jax.vmap(lambda c: tk.hooi(stacked(c), ranks).tucker)(centres)

    def centres(sent: tk.Tucker, basis: tuple[()], widths: dict[int, int]) -> Centres:
        return _unstacked(tk.reconstruct(sent), widths)

    def encode(centres: Centres, sent: tk.Tucker, basis: tuple[()]) -> tk.Tucker:
        whole = _with_held(tk.reconstruct(sent), centres)
        found = tk.project(whole, tk.hooi_sweep(whole, sent.factors))
        return tk.procrustes(found, sent.factors)

    def decode(
        payloads: Any, weights: Any, fit: tk.Tucker, basis: Any, widths: dict[int, int]
    ) -> tk.Tucker:
        mean = _mean(payloads, weights, fit)
        return tk.Tucker(mean.core, tuple(map(tk.polar, mean.factors)))

    return Codec(
        start=start,
        sent=lambda fit, view_ids: fit,
        centres=centres,
        encode=encode,
        decode=decode,
    )


def _ranks(config: FedHKTuckerConfig, widths: dict[int, int]) -> tuple[int, ...]:
    """Returns R1, R2, R3, checked against the sizes of the tensor."""
    sizes = config.n_clusters, max(widths.values()), len(widths)
    ranks = config.ranks
    if not ranks:
        # No rank is above the product of the others: few clusters of many views need features.
        clusters, views = min(sizes[0], sizes[1] * sizes[2]), min(sizes[2], sizes[0] * sizes[1])
        features = max(2 * sizes[0], -(-views // clusters))
        ranks = clusters, min(features, sizes[1], clusters * views), views
    for n, (rank, size) in enumerate(zip(ranks, sizes, strict=True)):
        others = ranks[0] * ranks[1] * ranks[2] // max(rank, 1)
        if not 1 <= rank <= min(size, others):
            raise ValueError(
                f"ranks: got {ranks} for a tensor of clusters, features and views {sizes}; R{n + 1}"
                f" is allowed to be 1 to {size}, and no more than the product of the others"
            )
    return ranks


def _mean(payloads: Sequence[Any], weights: Sequence[Array], fit: Any) -> Any:
    """Averages as `model.averaged` does: what was stays where no client has weight."""
    total = jnp.asarray(sum(weights))

    def mean(old: Array, *parts: Array) -> Array:
        return jnp.where(total > 0, jnp.asarray(sum(parts)) / positive(total), old)

    return jax.tree.map(mean, fit, *payloads)


def _into(part: Array, basis: Array) -> Array:
    """Returns rows of one view in the coordinates of the basis, [c, R2]."""
    return matmul(part, basis[: part.shape[1]])


def _inner(fit: tuple[Array, tuple]) -> Array:
    """Returns Z [c, R2, s]."""
    core, (clusters, views) = fit
    for factor, mode in ((clusters, 0), (views, 2)):
        if not isinstance(factor, tuple):
            core = tk.mode_product(core, factor, mode)
    return core


def _kept(form: tk.Tucker) -> tuple[Array, tuple]:
    """Returns a form of Z without the factors that are square: the core takes them in."""
    core, kept = form.core, []
    for mode, factor in enumerate(form.factors):
        square = factor.shape[0] == factor.shape[1]
        if square:
            core = tk.mode_product(core, factor, mode)
        if mode != 1:
            kept.append(() if square else factor)
    return core, tuple(kept)


def _unstacked(tensor: Array, widths: dict[int, int]) -> Centres:
    return {v: tensor[:, :width, v] for v, width in widths.items()}


def _with_held(tensor: Array, held: Centres) -> Array:
    """Puts the centres of some views into the tensor; a client knows the others as sent.

    Padding, too, stays as the form has it: zeros there would pull the core, and none has weight.
    """
    for v, part in held.items():
        tensor = tensor.at[:, : part.shape[1], v].set(part)
    return tensor
