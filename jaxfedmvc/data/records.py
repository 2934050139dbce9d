"""What is published about the named data sets: files, shapes, usual scaling and origin."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxfedmvc.data.dataset import Dataset


@dataclasses.dataclass(frozen=True)
class Record:
    """A named set.

    Attributes:
      stems: accepted file names without suffix, the preferred one first.
      n_samples: number of samples.
      view_dims: the width of every view, for every layout in circulation.
      n_classes: number of classes.
      scale: what `load` does by default, one of its scalings or ``"bytes"``.
      source: where the file comes from, to follow the word "get".
      openml_id: number of the set at OpenML, None where it is not from there.
    """

    stems: tuple[str, ...]
    n_samples: int
    view_dims: tuple[tuple[int, ...], ...]
    n_classes: int
    scale: str
    source: str
    openml_id: int | None = None

    def misfit(self, dataset: Dataset) -> str | None:
        """Says what the set must hold and what was got, or nothing (None) where they agree."""
        dims = tuple(view.shape[1] for view in dataset.views)
        labels = dataset.labels
        n, k = len(dataset.views[0]), None if labels is None else int(labels.max()) + 1
        if n == self.n_samples and dims in self.view_dims and k in (None, self.n_classes):
            return None
        expected = " or ".join(str(list(layout)) for layout in self.view_dims)
        return (
            f"must hold {self.n_samples} samples, view dimensions {expected} and "
            f"{self.n_classes} classes; got {n} samples, {list(dims)} and {k} classes"
        )


def _openml(name: str, number: int, n: int, width: int, k: int, stem: str | None = None) -> Record:
    """A table of one view, kept as it is: vertical experiments encode and scale it themselves."""
    return Record(
        stems=(stem or name,),
        n_samples=n,
        view_dims=((width,),),
        n_classes=k,
        scale="none",
        source=f"OpenML's data set {number} by `python -m jaxfedmvc.data.openml {name}`",
        openml_id=number,
    )


RECORDS: dict[str, Record] = {
    "mnist_usps": Record(
        stems=("MNIST_USPS",),
        n_samples=5000,
        view_dims=((784, 784), (784, 256)),  # USPS framed to 28x28, or as it is, 16x16
        n_classes=10,
        scale="none",
        source="MNIST_USPS.mat in the data folder of github.com/myliu2048/DSE-FDMC",
    ),
    "bdgp": Record(
        stems=("BDGP",),
        n_samples=2500,
        view_dims=((1750, 79),),
        n_classes=5,
        scale="minmax",
        source="BDGP.mat of github.com/scutbioinformatics/CELT",
    ),
    "multi_fashion": Record(
        stems=("Multi_Fashion", "Fashion", "Multi_Fashion_rebuilt"),
        n_samples=10000,
        view_dims=((784, 784, 784),),
        n_classes=10,
        scale="bytes",
        source="Fashion.mat of github.com/SubmissionsIn/MFLVC, or rebuild it from Fashion-MNIST "
        "(three images of one class per sample) as Multi_Fashion_rebuilt.npz",
    ),
    "nuswide": Record(
        stems=("NUSWIDE",),
        n_samples=5000,
        view_dims=((65, 226, 145, 74, 129),),
        n_classes=5,
        scale="minmax",
        source="the NUS-WIDE subset of 5 views and 5 classes (NUSWIDE.mat) in the data "
        "collections of MFLVC and other multi-view clustering repositories",
    ),
    "mfeat": Record(
        stems=("Mfeat",),
        n_samples=2000,
        view_dims=((216, 76, 64, 6, 240, 47),),
        n_classes=10,
        scale="minmax",
        source="Mfeat.mat of github.com/UeharaSetsuYu/Multi-view-Datasets",
    ),
    "scene15": Record(
        stems=("Scene15", "Scene-15"),
        n_samples=4485,
        view_dims=((20, 59, 40),),
        n_classes=15,
        scale="minmax",
        source="Scene-15.mat in the data folder of github.com/XLearning-SCU/2021-CVPR-Completer",
    ),
    "noisymnist10k": Record(
        stems=("NoisyMNIST10k_rebuilt", "NoisyMNIST10k"),
        n_samples=10000,
        view_dims=((784, 784),),
        n_classes=10,
        scale="bytes",
        source="MNIST's first 10000 training images and rebuild it (view 1: the digit turned by up"
        " to 45 degrees; view 2: another image of its class with uniform noise, cut to [0, 1])",
    ),
    "aloi10": Record(
        stems=("ALOI10_standin", "ALOI10"),
        n_samples=1079,
        view_dims=((64, 64, 77, 13),),
        n_classes=10,
        scale="minmax",
        source="ALOI.mat, ten objects, in the data folder of github.com/AllminerLab/Code-for-UIMC",
    ),
    "alizadeh_2000_v2": _openml("alizadeh_2000_v2", 46773, 62, 2093, 3),
    "chowdary_2006": _openml("chowdary_2006", 46778, 104, 182, 2),
    "coil20": _openml("coil20", 46783, 1440, 1024, 20, stem="COIL20"),
    "garber_2001": _openml("garber_2001", 46779, 66, 4553, 4),
    "nursery": _openml("nursery", 1568, 12958, 8, 4),
    "shuttle": _openml("shuttle", 40685, 58000, 9, 7),
}


def find_record(name: str) -> Record | None:
    """Finds the record whose name or file stem is `name`, in any case; None when there is none."""
    key = name.lower().replace("-", "_")
    for alias, record in RECORDS.items():
        if key == alias or key in (stem.lower() for stem in record.stems):
            return record
    return None
