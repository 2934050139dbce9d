"""FMCSC, federated end to end: `python -m experiments.fmcsc [--flagfile=...]`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from absl import flags

from experiments import base, common
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms.fmcsc import FMCSCConfig, FMCSCHyperparams, fmcsc
from jaxfedmvc.federation import Federation

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(common)

flags.DEFINE_list("hidden", ["256", "256", "512"], "Widths of the encoder's hidden layers.")
flags.DEFINE_integer("latent_dim", 20, "Width of Z, H^v and H.")
flags.DEFINE_integer("head_hidden", 256, "Hidden width of the heads.")
flags.DEFINE_integer("pretrain_epochs", 250, "Epochs of reconstruction before the rounds.")
flags.DEFINE_integer("local_epochs", 25, "Epochs of a round.")
flags.DEFINE_integer("distill_epochs", 50, "Epochs of eq. (6) in a round.")
flags.DEFINE_integer("batch_size", 256, "Rows of a step.")
flags.DEFINE_enum("contrast", "paper", ["paper", "ntxent"], "Form of the feature contrast.")
flags.DEFINE_string("components", "ABCD", "Components that are on; leave out letters to ablate.")
flags.DEFINE_integer("n_init", 100, "k-means++ restarts of the client that passes its centroids.")
flags.DEFINE_float("learning_rate", 3e-4, "Adam's step size.")
flags.DEFINE_float("tau_m", 0.5, "Temperature of the feature contrast, eq. (5).")
flags.DEFINE_float("tau_p", 0.5, "Temperature of the model contrast, eq. (7).")
flags.DEFINE_float("weight_floor", 1e-3, "Least mutual-information weight, in bits.")

flags.DEFINE_integer(
    "leader_epochs", 0, "Epochs for which one client trains all models before the first round."
)
flags.DEFINE_bool("partial_rounds", True, "Whether partial clients train and send in the rounds.")
flags.DEFINE_enum(
    "partial_models",
    "distilled",
    ["distilled", "branch"],
    "Models for one view: fitted by eq. (6), or the global model's own branch for the view.",
)
flags.DEFINE_enum("target", "own", ["own", "global"], "Whose H eq. (6) fits partial models to.")
flags.DEFINE_enum(
    "centroids",
    "leader",
    ["leader", "federated"],
    "One client's centroids for all, or k-means of all clients' centroids and Lloyd's steps.",
)
flags.DEFINE_integer("centroid_rounds", 10, "Lloyd's steps of federated k-means.")
flags.DEFINE_float("mask_rate", None, "Share of features hidden in eq. (5) and (6).")
flags.DEFINE_float("upload_noise", None, "Scale of Laplace noise on what clients send.")
flags.DEFINE_float("upload_clip", None, "Largest L1 norm of a client's update.")

# Flags of numbers that runs of one program may differ in.
TRACED = (
    "learning_rate",
    "tau_m",
    "tau_p",
    "weight_floor",
    "mask_rate",
    "upload_noise",
    "upload_clip",
)


def traced() -> tuple[str, ...]:
    """Flags of numbers that runs of one program may differ in."""
    return TRACED


def no_axis() -> set[str]:
    """Flags that cannot be swept: all can."""
    return set()


def defaults() -> None:
    """What flags say that are not given."""
    FLAGS.dataset = FLAGS.dataset or "digits"


def config(n_clusters: int) -> FMCSCConfig:
    """The static configuration, from flags.

    Raises:
      ValueError: A flag's value is not allowed.
    """
    names = (
        "latent_dim",
        "head_hidden",
        "pretrain_epochs",
        "local_epochs",
        "distill_epochs",
        "batch_size",
        "contrast",
        "components",
        "n_init",
        "leader_epochs",
        "partial_rounds",
        "partial_models",
        "target",
        "centroids",
        "centroid_rounds",
    )
    try:
        hidden = tuple(int(width) for width in FLAGS.hidden)
    except ValueError as error:
        raise ValueError(
            f"hidden: got {','.join(FLAGS.hidden)!r}; allowed are whole numbers with commas"
        ) from error
    return FMCSCConfig(n_clusters, hidden=hidden, **{name: FLAGS[name].value for name in names})


def hyperparams() -> FMCSCHyperparams:
    """The numbers that may be swept, from flags.

    Raises:
      ValueError: A flag's value is not allowed.
    """
    for name in TRACED:
        number = FLAGS[name].value
        if not (number is None or number > 0):
            raise ValueError(f"{name}: got {number}; allowed is above 0")
    if FLAGS.mask_rate is not None and not FLAGS.mask_rate < 1:
        raise ValueError(f"mask_rate: got {FLAGS.mask_rate}; allowed is above 0 and below 1")
    return FMCSCHyperparams(**{name: FLAGS[name].value for name in TRACED})


def maker(
    n_clusters: int, federation: Federation
) -> Callable[[FMCSCHyperparams], FederatedAlgorithm]:
    """`hyperparams -> algorithm`, all else from flags."""
    return partial(fmcsc, config(n_clusters))


def build(n_clusters: int, federation: Federation) -> FederatedAlgorithm:
    """The algorithm, from flags."""
    return maker(n_clusters, federation)(hyperparams())


def cost(stage: str, phase: int, held: int, n_views: int) -> float:
    """Work of one client in passes over one view, for the time left."""
    branched = "B" in FLAGS.components and FLAGS.partial_models == "branch"
    if held < n_views and (branched or (stage != "setup" and not FLAGS.partial_rounds)):
        return 0.0
    if stage == "setup":
        return (2 * FLAGS.leader_epochs if phase == 2 else FLAGS.pretrain_epochs) * held
    fitted = "B" in FLAGS.components and not branched
    trains, distills = True, held == n_views and fitted
    if FLAGS.target == "global" and fitted:  # two exchanges
        trains, distills = (held == n_views) == (phase == 0), distills and phase == 1
    return (FLAGS.local_epochs * trains + FLAGS.distill_epochs * distills) * held


def main() -> None:
    """Runs the job that the flags describe."""
    defaults()
    common.main_job("fmcsc", build, cost)


if __name__ == "__main__":
    base.launch(main)
