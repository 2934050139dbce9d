"""MGCD's settings: what the two modes say, and what may be set against them."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from flax import struct
from jax import Array

from jaxfedmvc.checks import (
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    at_least,
    choices,
    number,
    numbers,
    widths,
    wrong,
)

Mode = Literal["robust", "literal"]
Server = Literal["trained", "average"]
Encoder = Literal["linear", "deep"]
Affinity = Literal["auto", "each", "mean", "both", "absolute"]
Contrast = Literal["printed", "infonce"]
LOSSES = ("r", "s", "cl", "dd")


class ByMode(NamedTuple):
    """Values of the settings that are None; `lam` is a hyper-parameter."""

    server: Server
    affinity: Affinity
    latent_dim: int
    server_hidden: int
    server_epochs: int
    lam: float


# The literal mode is what the paper prints, but for step sizes: Adam's 1e-6 of all phases moves no
# weight by more than 1.6e-4 in its 20 epochs of pre-training on Mfeat.
BY_MODE: dict[Mode, ByMode] = {
    "robust": ByMode("average", "auto", 32, 64, 5, lam=1.0),
    "literal": ByMode("trained", "mean", 512, 500, 1, lam=1e-3),
}


@dataclasses.dataclass(frozen=True)
class MGCDConfig:
    """Static settings of MGCD: what changes shapes, loop lengths or the form of the method.

    Attributes:
      n_clusters: Number of clusters of the spectral clustering, 2 or more.
      mode: literal is the paper's method, trained by gradients as printed; robust solves the
        clients' two problems in closed form and lets the server's networks start at the average.
      server: trained minimises eq. (6); average adds the mean of the diversity graphs to the
        consistency graph, which is the minimum of the diversity loss. None: average in the robust
        mode, trained in the literal one.
      losses: The losses that are on, of r (reconstruction), s (self-representation), cl (graph
        contrast) and dd (graph diversity).
      dual: Whether a client has two encoders, whose outputs add up, or one. A linear encoder is
        one map either way.
      distillation: Whether the server has the network f_pre.
      encoder: Encoder of the robust mode: linear is the closed-form optimum of a linear
        autoencoder, deep is trained as in the paper and then left alone. The literal mode's encoder
        is always deep.
      latent_dim: Width of the latent space (d); a linear encoder has no more than its view has
        features. None: 32 in the robust mode, 512 in the literal one.
      hidden: Widths of the deep encoders' hidden layers, which the decoder mirrors.
      server_hidden: Width of the hidden layer of the server's networks f_pre and f_post. None: 64
        in the robust mode, 500 in the literal one.
      pretrain_epochs: Epochs of eq. (1), before the rounds.
      local_epochs: Epochs of eq. (3) in each round of the literal mode.
      server_epochs: Epochs of eq. (6) in each round. None: 5 in the robust mode, 1 in the literal
        one.
      batch_size: Samples of a step, at clients and server.
      contrast: Form of eq. (4): as printed, or infonce, which has the positive in the denominator.
      affinity: How spectral clustering reads the consistency graphs. each: the largest positive
        entries of every row of each view's graph, averaged; mean: those of the views' mean graph;
        both: the mean of these two; auto: of these three the one that separates the clusters best;
        absolute: (|G| + |G^T|) / 2 of the mean graph, which needs N x N numbers. None: auto in the
        robust mode, mean in the literal one.
      n_neighbours: Entries of a row that the affinity keeps (k).
      dense: Whether graphs are sent and kept as N x N numbers, and not as factors.
      rank: Rank of the factored consistency graph; None: one that loses nothing in the first
        rounds.
      n_init: Starts of k-means.
      memory_limit: GB that the server's graphs and networks may take; a run that is predicted to
        take more is refused.
      choose_views: Whether the clusters are those of the views that agree, of three or more: in the
        first round the server clusters every view's graph alone, and leaves out views whose
        clusters are unlike those of all others, see `least_agreement`. Goes with an averaging
        server of the robust mode. None: yes, there.
      report_graphs: Whether the server's info of a round holds the clusters of three graphs: of the
        new consistency graph, of the mean diversity graph, and of the old consistency graph plus
        the mean diversity graph. For curves; costs up to two more spectral clusterings a round.
    """

    n_clusters: int
    mode: Mode = "robust"
    server: Server | None = None
    losses: tuple[str, ...] = LOSSES
    dual: bool = True
    distillation: bool = True
    encoder: Encoder = "linear"
    latent_dim: int | None = None
    hidden: tuple[int, ...] = (500, 500, 2000)
    server_hidden: int | None = None
    pretrain_epochs: int = 20
    local_epochs: int = 1
    server_epochs: int | None = None
    batch_size: int = 256
    contrast: Contrast = "printed"
    affinity: Affinity | None = None
    n_neighbours: int = 10
    dense: bool = False
    rank: int | None = None
    n_init: int = 20
    memory_limit: float = 8.0
    report_graphs: bool = False
    choose_views: bool | None = None

    def __post_init__(self) -> None:
        """Checks what does not depend on data.

        Raises:
          ValueError: Names the setting, its value and what is allowed.
        """
        choices(self)
        at_least(self, 2, "n_clusters")
        at_least(self, 1, "latent_dim", "server_hidden", "batch_size", "n_neighbours", "n_init")
        at_least(self, 1, "rank")
        at_least(self, 0, "pretrain_epochs", "local_epochs", "server_epochs")
        if not set(self.losses) <= set(LOSSES):
            raise wrong("losses", self.losses, f"any of {', '.join(LOSSES)}")
        widths(self, "hidden")
        if self.choose_views and (self.mode, self.server or "average") != ("robust", "average"):
            raise wrong(
                "choose_views",
                self.choose_views,
                "None or False but with mode='robust' and server='average': a trained server learns"
                " from all views",
            )
        number("memory_limit", self.memory_limit, (lambda x: x > 0, "a number of GB above 0"))

    def resolved(self) -> ResolvedConfig:
        """Returns the settings with the mode's values in place of None."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        by_mode = BY_MODE[self.mode]._asdict()
        return ResolvedConfig(
            **{n: by_mode[n] if v is None and n in by_mode else v for n, v in values.items()}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedConfig(MGCDConfig):
    """Settings of which none waits for what the mode says; see `MGCDConfig.resolved`."""

    server: Server
    latent_dim: int
    server_hidden: int
    server_epochs: int
    affinity: Affinity

    @property
    def deep(self) -> bool:
        """Whether clients train networks."""
        return self.mode == "literal" or self.encoder == "deep"

    @property
    def chooses_views(self) -> bool:
        """Whether views may be left out."""
        return self.choose_views is not False and self.mode == "robust" and not self.server_trains

    @property
    def server_trains(self) -> bool:
        """Whether the server has networks."""
        return self.server == "trained"


@struct.dataclass
class MGCDHyperparams:
    """Settings of MGCD that may be traced, so that a sweep over them is one program.

    Attributes:
      gamma: Weight of self-representation in eq. (3).
      lam: Weight of the diversity loss in eq. (6): of its sum over all rows in the literal mode, of
        its mean over rows in the robust one. None: 1 in the robust mode, 0.001 in the literal one.
      tau: Temperature of the graph contrast, eq. (4).
      ridge: Penalty of the closed-form self-representation, relative to the number of samples.
      pretrain_rate: Adam's step size for eq. (1).
      local_rate: Adam's step size for eq. (3).
      server_rate: Adam's step size for eq. (6).
      least_agreement: Least agreement of a view that counts, as a share of the greatest one's, with
        choose_views; a view's agreement is the mean adjusted Rand index of its own clusters with
        those of every other view.
    """

    gamma: Array | float = 100.0
    lam: Array | float | None = struct.field(default=None, metadata={"flag": "lambda"})
    tau: Array | float = 0.5
    ridge: Array | float = 1.0
    pretrain_rate: Array | float = 1e-3
    local_rate: Array | float = 1e-4
    server_rate: Array | float = 1e-4
    least_agreement: Array | float = 0.2


def check_hyperparams(hp: MGCDHyperparams) -> None:
    """Checks the hyper-parameters that are not traced.

    Raises:
      ValueError: Names the first one that is out of range.
    """
    above_zero = ("tau", "ridge", "pretrain_rate", "local_rate", "server_rate")
    numbers(
        hp,
        {"gamma": NOT_NEGATIVE, "lam": NOT_NEGATIVE, "least_agreement": SHARE}
        | dict.fromkeys(above_zero, POSITIVE),
    )


def diversity_weight(config: MGCDConfig, hp: MGCDHyperparams) -> Array | float:
    """Returns lambda of eq. (6): the hyper-parameter, or what the mode says."""
    return BY_MODE[config.mode].lam if hp.lam is None else hp.lam
