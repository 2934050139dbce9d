"""Settings of FedDMVC and FCUIF, and what they may be."""

from __future__ import annotations

import dataclasses
from typing import Literal

from flax import struct
from jax import Array

from jaxfedmvc import checks


@dataclasses.dataclass(frozen=True)
class FedDMVCConfig:
    """Static settings of FedDMVC.

    Attributes:
      n_clusters: Number of clusters c.
      hidden: Widths of the encoders' hidden layers; the decoders mirror them.
      latent_dim: Width of what the encoders return.
      pretrain_epochs: Epochs of the autoencoders before the rounds.
      local_epochs: Epochs of an agent in a round; comments in the authors' code ask for 30 on BDGP.
      batch_size: Rows in a step.
      normalise: How the server scales what it is sent. l1: absolute values of a row sum to 1, as in
        the authors' code, whose centres then lie in another space than the agents' encodings that
        they are compared with; none: not at all.
      n_init: Starts of every k-means, of which the best is kept.
    """

    n_clusters: int
    hidden: tuple[int, ...] = (500, 500, 2000)
    latent_dim: int = 10
    pretrain_epochs: int = 500
    local_epochs: int = 300
    batch_size: int = 256
    normalise: Literal["none", "l1"] = "none"
    n_init: int = 100

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        checks.at_least(self, 1, "n_clusters", "latent_dim", "batch_size", "n_init")
        checks.at_least(self, 0, "pretrain_epochs", "local_epochs")
        checks.choices(self)
        checks.widths(self, "hidden")


@dataclasses.dataclass(frozen=True)
class FCUIFConfig(FedDMVCConfig):
    """Static settings of FCUIF: those of FedDMVC, and of the server's networks.

    Attributes:
      imputer_hidden: Widths of the hidden layers of the server's imputation networks.
      imputer_epochs: Steps of these networks in an exchange, each on all complete rows.
      align: Whether agents may have different samples in the same row, which the server then
        aligns: in rows where all agents have the same sample it learns how, and applies it to the
        others. Those must be held by all agents.
      align_steps: Steps of the alignment networks in an exchange, each on all aligned rows.
    """

    imputer_hidden: tuple[int, ...] = (32, 64)
    imputer_epochs: int = 300
    align: bool = False
    align_steps: int = 200

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        super().__post_init__()
        checks.at_least(self, 0, "imputer_epochs", "align_steps")
        checks.widths(self, "imputer_hidden")


@struct.dataclass
class FedDMVCHyperparams:
    """Numbers of FedDMVC that may be traced.

    Attributes:
      guidance: Weight of the divergence from the server's targets, 0 or more.
      learning_rate: Adam's step size of the agents.
    """

    guidance: Array | float = 0.1
    learning_rate: Array | float = 1e-3


@struct.dataclass
class FCUIFHyperparams(FedDMVCHyperparams):
    """Numbers of FCUIF that may be traced: those of FedDMVC, and of the server's networks.

    Attributes:
      imputer_rate: Adam's step size of the imputation networks.
      align_rate: Adam's step size of the alignment networks.
      align_weight: Weight of the distance between an alignment and the true one, 0 or more.
    """

    imputer_rate: Array | float = 1e-3
    align_rate: Array | float = 1e-3
    align_weight: Array | float = 0.1


def check_hyperparams(hyper: FedDMVCHyperparams) -> None:
    """Checks the hyper-parameters that are not traced.

    Raises:
      ValueError: Names the first one that is out of range.
    """
    rules = {"guidance": checks.NOT_NEGATIVE, "learning_rate": checks.POSITIVE}
    if isinstance(hyper, FCUIFHyperparams):
        rules |= dict.fromkeys(("imputer_rate", "align_rate"), checks.POSITIVE)
        rules["align_weight"] = checks.NOT_NEGATIVE
    checks.numbers(hyper, rules)
