"""FMCSC's settings: what shapes the program, and the numbers that may be swept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
from flax import struct

from jaxfedmvc import checks

SquaredError = Literal["mean", "sum"]


@dataclass(frozen=True)
class FMCSCConfig:
    """Static settings: what changes shapes, loop lengths or the program.

    The defaults are the paper's (appendix D.2).

    Attributes:
      n_clusters: Number of clusters, K.
      hidden: Widths of the encoders' hidden layers; the decoders mirror them.
      latent_dim: Width of Z^v, H^v and H; one number, since eq. (7) compares them.
      head_hidden: Hidden width of the heads that compute H^v and H.
      pretrain_epochs: Epochs of reconstruction before the rounds.
      local_epochs: Epochs of local training in a round, E.
      distill_epochs: Epochs in a round of eq. (6), by which multi-view clients fit partial models.
      batch_size: Rows in one step of training.
      least_steps: Fewest steps of an epoch: a client whose rows make fewer batches goes through
        them several times, so that few rows do not mean little training. 1: an epoch is one pass.
      contrast: Form of the feature contrast, eq. (5). "paper": as printed. "ntxent": that of the
        published code.
      squared_error: How eq. (1), (2) and (6) add up over a batch. "mean": all are means over rows
        and features, as in the published code, so that the contrast's share depends on neither.
        "sum": as printed, sums over features, and in (6) over rows.
      components: Letters of the components that are on. A: consensus pre-training; without it every
        client pre-trains from a start of its own. B: multi-view clients optimise the partial global
        models, eq. (6). C: model contrast, eq. (7), on models that partial clients keep; without it
        they restart from the global model and only reconstruct. D: mutual-information weights;
        without them the average is plain.
      n_bins: Bins on each axis of the histogram that mutual information is estimated from.
      n_init: k-means++ restarts of a client that sends its own centroids; the best one counts.
      leader_epochs: Epochs for which one multi-view client trains all global models, by eq. (8) and
        (6), between pre-training and the first round: all clients then start from these models, of
        one common space of H, and not from random heads. 0: off, as in the paper, whose consensus
        is on autoencoders alone.
      partial_rounds: Whether partial clients train and send their models in the rounds. If not,
        they pre-train at most and receive the models in the end, and C, eq. (7), has no effect.
      partial_models: What the global model for a single view is. "distilled": the one that
        multi-view clients fit by eq. (6), as in the paper. "branch": f_g's own branch for the view,
        E^v, D^v and H^v, which eq. (5) has drawn to H while f_g was trained. Nothing more is then
        trained or sent for it, and partial clients train nothing at all; their rows move the
        centroids, if these are federated, and no model.
      target: What eq. (6) fits partial models to. "own": H of the client's own f_m, as printed.
        "global": H of the round's new f_g, in a second exchange after the f_m are averaged, so that
        all clients fit theirs to one space.
      centroids: How clients come to common clusters. "leader": all start k-means from the centroids
        of one client, as in the paper. "federated": every client sends the centroids and sizes of a
        k-means of its own, the server clusters these, and Lloyd's steps follow, for which clients
        send the sum and the number of their rows of H in each cluster; rows belong to the nearest
        of the common centroids.
      centroid_rounds: Lloyd's steps of federated k-means.
      centroid_starts: Starts of federated k-means, side by side: k-means++ draws the seeds of each
        from the clients' centroids, and they multiply the bytes of Lloyd's steps. Clients also send
        the sum of squared distances to each start's centroids; the start of the least total counts.
        1: the best k-means of the clients' centroids, by these alone.
      min_cluster_size: Least number of a client's rows in a cluster for which federated k-means is
        sent their sum or centroid; of smaller clusters nothing is sent, and their rows are not
        taught. None: off. A leader's centroids travel without numbers of rows and cannot have it.
      teach_features: Number of random features, even, on which clients with all views teach clients
        of some views which of their rows belong to which cluster, after the rounds; see
        `fmcsc.teaching`. Partial clients then take a row's cluster from what they were taught, and
        not from the nearest centroid. Not in the paper. 0: off.
      teach_patches: Side, in pixels, of the patches that `teach_features` are made of, for views
        that are square grey images, row by row; the number of features is then a multiple of 16.
        0: they are made of the views' features as they are, and of Z.
      teach_together: Whether all views are images of one kind, say photographs of one thing, and
        with `teach_patches` every image is an example for one classifier of all of them. False:
        each view has its own.
      teach_again: Whether clients with all views then put their own rows where the views'
        classifiers do on average, each row by what the others tell, and teach once more; they take
        that cluster in the end, too, and not the one of the nearest centroid.
      teach_back: Whether partial clients then teach, too, by their own rows of which they are sure.
      stack_views: Whether networks of views of equal width are trained as one stack, in half the
        kernels for two views. None: on accelerators, where launches of kernels take the time; on a
        CPU of two cores wide networks take a tenth longer so. It changes rounding.
    """

    n_clusters: int
    hidden: tuple[int, ...] = (500, 500, 2000)
    latent_dim: int = 20
    head_hidden: int = 256
    pretrain_epochs: int = 250
    local_epochs: int = 25
    distill_epochs: int = 50
    batch_size: int = 256
    least_steps: int = 1
    contrast: Literal["paper", "ntxent"] = "paper"
    squared_error: SquaredError = "mean"
    components: str = "ABCD"
    n_bins: int = 10
    n_init: int = 100
    leader_epochs: int = 0
    partial_rounds: bool = True
    partial_models: Literal["distilled", "branch"] = "distilled"
    target: Literal["own", "global"] = "own"
    centroids: Literal["leader", "federated"] = "leader"
    centroid_rounds: int = 10
    centroid_starts: int = 1
    min_cluster_size: int | None = None
    teach_features: int = 0
    teach_patches: int = 0
    teach_together: bool = False
    teach_again: bool = False
    teach_back: bool = False
    stack_views: bool | None = None

    def __post_init__(self) -> None:
        """Checks all fields.

        Raises:
          ValueError: Names the field, its value and what is allowed.
        """
        checks.at_least(self, 1, "n_clusters", "latent_dim", "head_hidden", "batch_size")
        checks.at_least(self, 1, "n_bins", "n_init", "centroid_rounds", "centroid_starts")
        checks.at_least(self, 1, "min_cluster_size", "least_steps")
        checks.at_least(
            self,
            0,
            "pretrain_epochs",
            "local_epochs",
            "distill_epochs",
            "leader_epochs",
            "teach_features",
            "teach_patches",
        )
        checks.choices(self)
        if self.teach_features % 2:
            raise checks.wrong("teach_features", self.teach_features, "an even number")
        if self.teach_patches and not self.teach_features:
            raise checks.wrong("teach_patches", self.teach_patches, "0 without teach_features")
        if self.teach_together and not self.teach_patches:
            raise checks.wrong("teach_together", True, "false without teach_patches")
        for name in ("teach_again", "teach_back"):
            if getattr(self, name) and not self.teach_features:
                raise checks.wrong(name, True, "false without teach_features")
            if getattr(self, name) and self.min_cluster_size is not None:
                allowed = "false with min_cluster_size, below which clusters may fall"
                raise checks.wrong(name, True, allowed)
        checks.widths(self, "hidden")
        if not isinstance(self.components, str) or not set(self.components) <= set("ABCD"):
            raise checks.wrong("components", self.components, "letters of 'ABCD'")
        if self.leader_epochs and "A" not in self.components:
            raise checks.wrong(
                "leader_epochs", self.leader_epochs, "0 without component A, whose leader trains"
            )
        if self.partial_models == "branch" and "B" not in self.components:
            raise checks.wrong(
                "partial_models", "branch", "'distilled' without component B, which they replace"
            )
        if self.partial_models == "branch" and self.partial_rounds:
            raise checks.wrong(
                "partial_rounds",
                self.partial_rounds,
                "False with partial_models='branch', where nothing that partial clients could send"
                " is used",
            )
        if self.centroid_starts > 1 and self.centroids == "leader":
            raise checks.wrong("centroid_starts", self.centroid_starts, "1 with centroids='leader'")
        if self.min_cluster_size is not None and self.centroids == "leader":
            raise checks.wrong(
                "min_cluster_size",
                self.min_cluster_size,
                "None with centroids='leader', which travel without numbers of rows",
            )

    @property
    def fits_partial_models(self) -> bool:
        """Whether multi-view clients train models for the kinds of partial clients, eq. (6)."""
        return "B" in self.components and self.partial_models == "distilled"

    @property
    def solves_again(self) -> bool:
        """Whether what is taught is learned a second time."""
        return self.teach_again or self.teach_back

    @property
    def takes_branches(self) -> bool:
        """Whether branches of f_g are the models for single views."""
        return self.partial_models == "branch"


@struct.dataclass
class FMCSCHyperparams:
    """Numbers that may be swept: every leaf may be traced or batched.

    Attributes:
      learning_rate: Adam's step size.
      tau_m: Temperature of the feature contrast, eq. (5).
      tau_p: Temperature of the model contrast, eq. (7).
      weight_floor: Least mutual-information weight of a model, in bits, before normalisation. The
        difference of section 3.4 can be negative, and a weight cannot.
      mask_rate: Share of the features that are set to zero, drawn anew in every step, before a
        multi-view client's models see them in eq. (5) and (6); they reconstruct all features. None:
        off.
      upload_noise: Scale b of the Laplace noise on every parameter that a client sends. None: off.
      upload_clip: Largest L1 norm C of a client's update, sent minus received, over all its models.
        Longer updates are scaled down, and models are averaged without weights, which would reveal
        something of the data without noise. None: off. A client's whole data changes an upload by
        at most 2 C in L1, so that T uploads are (2 C T / b)-differentially private for clients, not
        counting the centroids.
      settle_rounds: Rounds in which the global models become the average of what clients sent, eq.
        (10). In a round r after them they go the share (settle_rounds / r)^2 of the way, so that a
        run of many rounds settles. Not in the paper. None: off.
      teach_ridge: Ridge of the regression with `teach_features`; a row's features have a squared
        norm of 2 on average, or of 1 with `teach_patches`. None: 0.3, or 0.01 with patches.
      limit: Number of clusters in use, at most n_clusters, so that one program serves a search over
        the number of clusters; messages keep their size for n_clusters; none: all.
    """

    learning_rate: jax.Array | float = 3e-4
    tau_m: jax.Array | float = 0.5
    tau_p: jax.Array | float = 0.5
    weight_floor: jax.Array | float = 1e-3
    mask_rate: jax.Array | float | None = None
    upload_noise: jax.Array | float | None = None
    upload_clip: jax.Array | float | None = None
    settle_rounds: jax.Array | float | None = None
    teach_ridge: jax.Array | float | None = None
    limit: jax.Array | int | None = None


def check_hyperparams(hyper: FMCSCHyperparams) -> None:
    """Checks the numbers that are concrete; traced ones and None (off) pass.

    Raises:
      ValueError: Names the number, its value and what is allowed.
    """
    positive = "learning_rate", "tau_m", "tau_p", "weight_floor", "upload_noise", "upload_clip"
    rules = dict.fromkeys((*positive, "teach_ridge"), checks.POSITIVE)
    rules["mask_rate"] = (lambda x: (x > 0) & (x < 1), "above 0 and below 1")
    rules["settle_rounds"] = (lambda r: r >= 1, "1 or more")
    checks.numbers(hyper, rules)
