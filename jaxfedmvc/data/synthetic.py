"""Generated data sets: of vertical experiments, and small ones of many shapes."""

import math

import numpy as np

from jaxfedmvc import checks
from jaxfedmvc.data.dataset import Dataset

# Of the multimodal set: samples, mean radii of the two spheres, deviation of the radius. The text
# that introduces the set and the results printed for it differ in all three.
_VARIANTS = {"text": (1200, (3.0, 7.0), 0.3), "table1": (2000, (0.5, 1.0), 0.01)}

# Of `unequal`: samples, clusters and views, from the first number up to below the second.
_UNEQUAL = (210, 601), (5, 11), (2, 6)

# A regular tetrahedron with edges of length 1 around the origin.
_TETRAHEDRON = np.array([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]) / math.sqrt(8)


def multimodal(seed: int, variant: str = "text") -> Dataset:
    """Draws two modalities that know nothing of each other: two spheres, three corners of a square.

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
    checks.whole("seed", seed, 0)
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
    """Draws four clusters that no agent can tell apart alone, for studies of Byzantine rankings.

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
    checks.whole("seed", seed, 0)
    checks.whole("n_samples", n_samples, len(_TETRAHEDRON))
    checks.number("sigma", sigma, checks.NOT_NEGATIVE)
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
    """Draws round Gaussian clusters with their features cut into one view for each agent.

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
    checks.whole("seed", seed, 0, 2**32 - 1)
    checks.whole("n_samples", n_samples, 1)
    checks.whole("n_features", n_features, 1)
    checks.whole("n_centers", n_centers, 1)
    checks.whole("n_agents", n_agents, 1, n_features)
    checks.number("cluster_std", cluster_std, checks.NOT_NEGATIVE)
    from sklearn.datasets import make_blobs  # deferred: slow to import

    x, labels = make_blobs(
        n_samples, n_features, centers=n_centers, cluster_std=cluster_std, random_state=seed
    )
    return _dataset("blobs", np.array_split(x, n_agents, axis=1), labels)


def unequal(seed: int) -> Dataset:
    """Draws one of many small sets of unlike shapes, whose views tell unequally much.

    For what a method does with few rows, and with data that nobody has tuned it for. The seed draws
    the shape, too: 210 to 600 samples in 5 to 10 clusters of unequal size, and two to five views of
    5 to 60 features. Clusters are round in up to eight directions of a view. The first view
    mostly separates them best, and from four views on the last is noise. Sets of odd seeds bend
    these directions by tanh and add noise of heavy tails.

    Args:
      seed: seeds all randomness.

    Returns:
      Views [n, D_v] and labels [n], in random order.

    Raises:
      ValueError: `seed` is not allowed.
    """
    checks.whole("seed", seed, 0)
    rng = np.random.default_rng(seed)
    n, n_clusters, n_views = (int(rng.integers(*bounds)) for bounds in _UNEQUAL)
    sizes = 4 + rng.multinomial(n - 4 * n_clusters, rng.dirichlet(np.full(n_clusters, 8.0)))
    labels = rng.permutation(np.repeat(np.arange(n_clusters), sizes))
    told = rng.uniform(0.5, 1.0, n_views)
    told[0] = 1.0
    if n_views > 3:
        told[-1] = 0.0
    views = []
    for share in told:
        dim = int(rng.integers(5, 61))
        rank = min(dim, 8)
        centres = share * rng.uniform(0.6, 1.0) * rng.normal(size=(n_clusters, rank))
        signal = centres[labels] + rng.normal(size=(n, rank))
        if seed % 2:
            bent = np.tanh(signal @ rng.normal(size=(rank, dim)) / math.sqrt(rank))
            views.append(2 * bent + 0.2 * rng.standard_t(4, size=(n, dim)))
        else:
            turned = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
            rest = 0.5 * rng.normal(size=(n, dim - rank))
            views.append(np.concatenate([signal, rest], axis=1) @ turned)
    return _dataset(f"unequal_{seed}", views, labels)


def _dataset(name: str, views: list[np.ndarray], labels: np.ndarray) -> Dataset:
    return Dataset(name, tuple(v.astype(np.float32) for v in views), labels.astype(np.int32))
