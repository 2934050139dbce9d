"""Generated data sets of vertical experiments: a view for each agent, and known classes."""

import math

import numpy as np

from jaxfedmvc.data.dataset import Dataset
from jaxfedmvc.data.partition import _check_count

# Of the multimodal set: samples, mean radii of the two spheres, deviation of the radius. The text
# that introduces the set and the results printed for it differ in all three.
_VARIANTS = {"text": (1200, (3.0, 7.0), 0.3), "table1": (2000, (0.5, 1.0), 0.01)}

# A regular tetrahedron with edges of length 1 around the origin.
_TETRAHEDRON = np.array([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]) / math.sqrt(8)


def multimodal(seed: int, variant: str = "text") -> Dataset:
    """Two modalities that know nothing of each other: two spheres, and three corners of a square.

    Density tells the spheres apart: DBSCAN with at least 5 points to a neighbourhood finds them
    without an error for radii of 2.2 to 2.3 (``"text"``) and 0.25 to 0.42 (``"table1"``), on seeds
    0..29. Distance to means tells the corners apart. The square's two coordinates are stretched at
    random, each by 1 to 101; where that makes it too flat for k-means, standardising them helps.

    Args:
      seed: seeds all randomness.
      variant: ``"text"`` has 1200 samples and radii 3 and 7 with deviation 0.3; ``"table1"`` has
        2000 samples and radii 0.5 and 1 with deviation 0.01.

    Returns:
      Views [n, 3] and [n, 2]; labels 3 * sphere + corner, six classes of the same size or sizes
      that differ by one.

    Raises:
      ValueError: `seed` or `variant` is not allowed.
    """
    _check_count("seed", seed, 0)
    if variant not in _VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(_VARIANTS)}; got {variant!r}")
    from sklearn.datasets import make_classification  # deferred: slow to import

    n, radii, sigma = _VARIANTS[variant]
    rng = np.random.default_rng(seed)
    square, corner = make_classification(
        n,
        n_features=2,
        n_informative=2,
        n_redundant=0,
        n_classes=3,
        n_clusters_per_class=1,
        flip_y=0.0,
        class_sep=3 * math.sqrt(2),
        shift=None,
        scale=None,
        shuffle=False,
        random_state=int(rng.integers(2**31)),
    )
    # The rows come corner by corner, so that every corner gets half of each sphere.
    sphere = np.arange(n) % 2
    points = rng.normal(np.array(radii)[sphere], sigma)[:, None] * _directions(rng, n)
    rows = rng.permutation(n)
    name = "multimodal" if variant == "text" else f"multimodal_{variant}"
    return _dataset(name, [points[rows], square[rows]], (3 * sphere + corner)[rows])


def _directions(rng: np.random.Generator, n: int) -> np.ndarray:
    """Unit vectors [n, 3], uniform on the sphere."""
    polar, azimuth = np.arccos(rng.uniform(-1, 1, n)), rng.uniform(0, 2 * np.pi, n)
    x, y = np.sin(polar) * np.cos(azimuth), np.sin(polar) * np.sin(azimuth)
    return np.stack([x, y, np.cos(polar)], axis=1)


def simplex(seed: int, sigma: float, n_samples: int = 1000) -> Dataset:
    """Four clusters that no agent can tell apart alone, for the study of Byzantine rankings.

    The clusters lie around the corners of a regular simplex in three dimensions, with edges of
    length 1 and turned at random. To these columns come three of standard normal noise. Agent i of
    three sees column i of either kind.

    Args:
      seed: seeds all randomness.
      sigma: standard deviation of a cluster in each of the three dimensions.
      n_samples: number of samples, 4 or more.

    Returns:
      Three views [n, 2]; labels 0..3 in classes whose sizes differ by at most one.

    Raises:
      ValueError: an argument is out of range; the text names it.
    """
    _check_count("seed", seed, 0)
    _check_count("n_samples", n_samples, len(_TETRAHEDRON))
    _check_deviation("sigma", sigma)
    from scipy.spatial.transform import Rotation  # deferred: slow to import

    rng = np.random.default_rng(seed)
    # The direction of a normal vector is uniform, and uniform unit quaternions turn uniformly.
    corners = _TETRAHEDRON @ Rotation.from_quat(rng.normal(size=4)).as_matrix()
    labels = rng.permutation(np.arange(n_samples) % len(corners))
    signal = corners[labels] + sigma * rng.normal(size=(n_samples, 3))
    noise = rng.normal(size=(n_samples, 3))
    views = [np.stack([signal[:, i], noise[:, i]], axis=1) for i in range(3)]
    return _dataset("simplex", views, labels)


def blobs(
    seed: int,
    n_samples: int,
    n_features: int = 12,
    n_centers: int = 5,
    n_agents: int = 3,
    cluster_std: float = 1.0,
) -> Dataset:
    """Round Gaussian clusters with their features cut into one view for each agent.

    Args:
      seed: of `sklearn.datasets.make_blobs`, which makes the same data from it.
      n_samples: number of samples.
      n_features: number of features of all agents together.
      n_centers: number of clusters, with centres uniform in [-10, 10].
      n_agents: number of agents, at most `n_features`.
      cluster_std: standard deviation of a cluster in each feature.

    Returns:
      One view [n, features of the agent] each; labels 0..n_centers-1.

    Raises:
      ValueError: an argument is out of range; the text names it.
    """
    _check_count("seed", seed, 0, 2**32 - 1)
    _check_count("n_samples", n_samples, 1)
    _check_count("n_features", n_features, 1)
    _check_count("n_centers", n_centers, 1)
    _check_count("n_agents", n_agents, 1, n_features)
    _check_deviation("cluster_std", cluster_std)
    from sklearn.datasets import make_blobs  # deferred: slow to import

    x, labels = make_blobs(
        n_samples, n_features, centers=n_centers, cluster_std=cluster_std, random_state=seed
    )
    return _dataset("blobs", np.array_split(x, n_agents, axis=1), labels)


def _check_deviation(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number, 0 or more; got {value!r}")


def _dataset(name: str, views: list[np.ndarray], labels: np.ndarray) -> Dataset:
    return Dataset(name, tuple(v.astype(np.float32) for v in views), labels.astype(np.int32))
